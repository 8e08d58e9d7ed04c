"""The test harness itself, with the smallest kernel: correct in the interpreter, tensor cores and resources when
compiled."""

from __future__ import annotations

import pytest
import torch

from support.triton import NO_TRITON, Kernel, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from support.triton_kernels import multiply


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_multiplies_in_the_interpreter(dtype: torch.dtype) -> None:
    left, right = (torch.randn((16, 16), generator=torch.Generator().manual_seed(n)).to(dtype) for n in (1, 2))
    torch.testing.assert_close(multiply(left, right), left.float() @ right.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_is_compiled_for_tensor_cores_and_its_spills_are_seen() -> None:
    def launch(size: int, dtype: torch.dtype, **options: int) -> None:
        multiply(*torch.empty((2, size, size), device="meta", dtype=dtype), **options)

    launches = record(
        lambda: [
            launch(64, torch.bfloat16),
            launch(16, torch.float32),
            launch(32, torch.float32, num_warps=1, maxnreg=32),
        ]
    )
    assert [each.kernel for each in launches] == [Kernel("support.triton_kernels", "_multiply")] * 3
    assert launches[0].divisible == ("left", "right", "product") and launches[2].options["maxnreg"] == 32
    small, exact, spilled = compile_for(launches)
    assert small.has_wgmma and not exact.has_mma
    assert 0 < small.shared_bytes <= 2 * 64 * 64 * 2 and 16 < small.registers <= 255
    assert small.stack_bytes == 0 < spilled.stack_bytes
