"""Encoder attention in every compiled variant that this processor supports: equal to the definition, and a prompt's
bits depend only on that prompt."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from serve_llm.kernels import encoder_attention
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.encoder_attention import EncoderKernel, build_encoder_attention
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.cpu.rows import RowKernels
from serve_llm.kernels.rope import HeadNorms
from support.matrix import mostly_slow

COMPILED = library.find()
pytestmark = pytest.mark.skipif(COMPILED is None, reason="no C++ compiler at installation")
VARIANTS = [] if COMPILED is None else list(Library(COMPILED).variants)
STARTS = [0, 1, 6, 262, 519, 1103]  # prompts of 1, 5, 256, 257 and 584 tokens; tiles have 256 keys


@pytest.fixture(params=VARIANTS)
def kernel(request: pytest.FixtureRequest) -> EncoderKernel:
    assert COMPILED is not None
    found = Library(COMPILED, request.param)
    return build_encoder_attention(found, RowKernels(found).rope_and_cache)


@pytest.fixture(autouse=True)
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotation(head_dim: int) -> tuple[Tensor, Tensor]:
    positions = torch.cat([torch.arange(end - start) for start, end in pairwise(STARTS)])
    angles = positions[:, None] / 1000.0 ** (torch.arange(0, head_dim, 2) / head_dim)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", mostly_slow([None, 1, 65, 300], [None, 65]))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "kind"),
    [
        (12, 12, 32, "plain"),
        (6, 2, 32, "plain"),
        (12, 12, 32, "alibi"),
        (3, 3, 64, "rope"),
        (4, 1, 64, "rope"),
        (2, 2, 40, "norms"),
    ],
)
def test_equals_the_definition(
    kernel: EncoderKernel, heads: int, kv_heads: int, head_dim: int, kind: str, window: int | None, dtype: torch.dtype
) -> None:
    qkv = random(STARTS[-1], (heads + 2 * kv_heads) * head_dim).to(dtype)
    angles = None if kind in ("plain", "alibi") else rotation(head_dim)
    slopes = torch.logspace(-8, -1, heads, base=2.0) if kind == "alibi" else None
    norms = None
    if kind == "norms":
        norms = HeadNorms(random(head_dim, seed=1).to(dtype), random(head_dim, seed=2).to(dtype), 1e-6)
    scale = head_dim**-0.5

    def attend(rows: Tensor, starts: list[int], first: int = 0) -> Tensor:
        share = None if angles is None else (angles[0][first : first + len(rows)], angles[1][first : first + len(rows)])
        return kernel(rows, heads, kv_heads, norms, share, starts, scale=scale, window=window, alibi_slopes=slopes)

    ours = attend(qkv, STARTS)
    theirs = encoder_attention.encoder_attention(
        qkv, heads, kv_heads, norms, angles, STARTS, scale=scale, window=window, alibi_slopes=slopes
    )
    assert ours.dtype == dtype
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **close)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for start, end in pairwise(STARTS):
            alone = attend(qkv[start:end], [0, end - start], start)
            assert torch.equal(alone, ours[start:end]), f"{end - start} tokens, {threads} threads"
