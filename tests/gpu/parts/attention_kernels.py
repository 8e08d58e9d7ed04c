"""Paged attention on the card: the cases of `parts.attention`.

`--rehearse`: in Triton's interpreter, tiny.
"""

from __future__ import annotations

import torch

from parts import attention, common
from parts.kernels import choose, run, tell


def check(here: common.Place) -> None:
    for name, call, most in attention.checks(choose, torch.device(here.device), here.rehearse):
        tell(here, ((name, found(), most) for found in (call,)), name)


if __name__ == "__main__":
    run(common.place("attention_kernels"), check)
