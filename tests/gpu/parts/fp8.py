"""The shape of Llama 8B with `--quantization fp8`: decoding and a prompt."""

from __future__ import annotations

from floors import LLAMA_8B

from parts import common
from parts.speed import measure_shape


def main() -> None:
    here = common.place("fp8")
    if here.rehearse:
        here.report.not_run("8B fp8", "it is served on GPUs only")
        return
    measure_shape(here, "8B fp8", LLAMA_8B, "fp8")


if __name__ == "__main__":
    main()
