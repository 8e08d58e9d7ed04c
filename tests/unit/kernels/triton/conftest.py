"""Fixtures of tests of Triton kernels: the interpreter rounds as a GPU does, and as silently."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from support import triton_rounding


@pytest.fixture(autouse=True)
def like_a_gpu() -> Iterator[None]:
    interpreter = pytest.importorskip("triton.runtime.interpreter", exc_type=ImportError)
    with mock.patch.object(interpreter, "_convert_float", triton_rounding.convert), np.errstate(all="ignore"):
        yield
