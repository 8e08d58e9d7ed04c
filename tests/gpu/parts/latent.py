"""Latent attention in the shape of DeepSeek-V2-Lite (16B): decoding and a prompt."""

from __future__ import annotations

from floors import LATENT_16B

from parts import common
from parts.speed import measure_shape


def main() -> None:
    here = common.place("latent")
    measure_shape(here, "16B MLA", LATENT_16B)


if __name__ == "__main__":
    main()
