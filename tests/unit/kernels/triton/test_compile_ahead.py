"""Kernels are compiled in threads without being launched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from support.triton import NO_TRITON, compiler_environment

pytest.importorskip("triton", reason=NO_TRITON)

import torch

from serve_llm.kernels.triton.compile_ahead import ZeroFill


def test_kernels_are_compiled_and_not_launched() -> None:
    command = [sys.executable, "-P", "-m", "support.compile_ahead"]
    done = subprocess.run(command, capture_output=True, text=True, env=compiler_environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["compiled"] == [["CompiledKernel"] * 2, ["CompiledKernel"]], "each once"
    assert found["is_forgotten"], "what could not be compiled, so that its first launch tries again"
    assert found["are_zeros"] and found["is_restored"]
    assert "power of 2" in found["error"], "3 rows are refused when they are first launched, not before"


@pytest.fixture
def filled_with_nan() -> Iterator[None]:
    """Fill memory that torch leaves uninitialised with NaN, or with the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_with_nan")
def test_what_torch_does_not_fill() -> None:
    assert torch.empty(3).isnan().all()
    x = torch.ones(1 << 20)
    with torch.inference_mode(), ZeroFill():
        unfilled = [
            torch.empty(1 << 20),
            torch.empty(1 << 20, dtype=torch.int64),
            torch.empty_like(x),
            torch.empty_strided((1 << 10, 1 << 10), (1, 1 << 10)),
            x.new_empty(1 << 20),
            x.new_empty_strided((1 << 20,), (1,)),
        ]
        assert torch.equal(x + 1, torch.full_like(x, 2.0))
    for tensor in unfilled:
        assert not tensor.any()
