"""Facts about the machine: versions, the card, and the two rates that everything is compared with."""

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
        card = torch.cuda.get_device_properties(0)
        here.report.measured("card", card.name)
        here.report.measured("memory", card.total_memory / 2**30, "GiB")
        here.report.measured("multiprocessors", card.multi_processor_count)
    found = common.limits(here.rehearse)
    here.report.measured("copy", found.bandwidth, "GB/s, read and written")
    here.report.measured("bf16 matrix product", found.peak / 1000, "TFLOP/s")


if __name__ == "__main__":
    main()
