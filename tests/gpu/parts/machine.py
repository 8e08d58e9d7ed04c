"""What the machine is: versions, the card, and the two rates that everything is compared with."""

from __future__ import annotations

import platform

import torch

from parts import common


def main() -> None:
    here = common.place("machine")
    here.report.measured("Python", platform.python_version())
    here.report.measured("torch", torch.__version__)
    for name in ("triton", "transformers", "numpy"):
        try:
            here.report.measured(name, __import__(name).__version__)
        except ImportError as error:
            here.report.measured(name, f"none: {error}")
    if not here.rehearse:
        found = torch.cuda.get_device_properties(0)
        here.report.measured("card", found.name)
        here.report.measured("memory", found.total_memory / 2**30, "GiB")
        here.report.measured("multiprocessors", found.multi_processor_count)
    bandwidth, peak = common.limits(here.rehearse)
    here.report.measured("copy", bandwidth / 1e9, "GB/s, read and written")
    here.report.measured("bf16 matrix product", peak / 1e12, "TFLOP/s")


if __name__ == "__main__":
    main()
