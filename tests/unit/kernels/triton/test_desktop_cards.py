"""The largest tiles of products and of sampling fit desktop cards, on which a program has 99 KB of shared memory.
Attention has its own test, as its tiles depend on the card."""

from __future__ import annotations

import pytest
import torch

from support.triton import NO_TRITON, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton.linear import pack, pack_heads
from serve_llm.kernels.triton.moe import pack_experts
from serve_llm.kernels.triton.sampling import sample

SHARED_BYTES = 99 * 1024
LARGE = {"_multiply_experts", "_linear", "_find_threshold"}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def launch_experts(dtype: torch.dtype) -> None:
    pair = pack(empty(1024, 512, dtype=dtype)), pack(empty(512, 512, dtype=dtype))
    packed = pack_experts([pair] * 8, lambda rows: rows[:, :512].contiguous(), range(8))
    chosen = torch.zeros((4096, 2), dtype=torch.int64, device="meta")
    packed(empty(4096, 512, dtype=dtype), empty(4096, 2, dtype=torch.float32), chosen)


def launch_all() -> None:
    launch_experts(torch.bfloat16)
    launch_experts(torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        pack(empty(28672, 4096, dtype=dtype))(empty(7, 4096, dtype=dtype))  # as --batch-invariant has them
    pack_heads(empty(128, 512, 128))(empty(7, 128, 576)[:, :, :128])
    sample(empty(256, 151936), empty(256, 5, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [86, *(pytest.param(number, marks=pytest.mark.long) for number in (89, 120))])
def test_the_largest_tiles_fit(capability: int) -> None:
    launches = [each for each in record(launch_all) if each.kernel.name in LARGE]
    assert {each.kernel.name for each in launches} == LARGE
    for kernel in compile_for(launches, capability):
        assert 0 < kernel.shared_bytes <= SHARED_BYTES and kernel.stack_bytes <= 64, kernel
