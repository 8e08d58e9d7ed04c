"""The families that the part `families` does not cover."""

from __future__ import annotations

from parts import common
from parts.families import run
from support.tiny import FAMILIES

if __name__ == "__main__":
    run(common.place("more_families"), FAMILIES[-2::-2])
