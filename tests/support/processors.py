"""Marks of tests that need what only some processors compute."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from serve_llm.kernels import linear_int8

NEEDS_INT8 = pytest.mark.skipif(not linear_int8.works(), reason="this processor computes no int8 products")


def mark_int8(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: "int8" and "int8 weights" need int8 products."""
    return [pytest.param(name, marks=NEEDS_INT8) if name in ("int8", "int8 weights") else name for name in names]
