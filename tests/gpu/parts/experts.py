"""Experts in the shape of Qwen3 30B-A3B: decoding and a prompt."""

from __future__ import annotations

from floors import EXPERTS_30B

from parts import common
from parts.speed import measure_shape


def main() -> None:
    here = common.place("experts")
    measure_shape(here, "30B-A3B", EXPERTS_30B)


if __name__ == "__main__":
    main()
