"""The shape of Llama 8B with `--quantization int4`: decoding and a prompt."""

from __future__ import annotations

from floors import LLAMA_8B

from parts import common
from parts.speed import measure_shape


def main() -> None:
    here = common.place("int4")
    measure_shape(here, "8B int4", LLAMA_8B, "int4")


if __name__ == "__main__":
    main()
