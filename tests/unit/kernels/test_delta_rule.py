"""The gated delta rule: the definition and every compiled variant against the oracle, and equal bits in any batch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from reference import delta_rule as oracle
from serve_llm.kernels import delta_rule
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.delta_rule import DeltaRuleKernel
from serve_llm.kernels.cpu.library import Library
from serve_llm.kernels.delta_rule import DeltaRule
from support.delta_rule import check_drafts, make_cache, make_inputs, make_layer

COMPILED = library.find()
VARIANTS = [] if COMPILED is None else list(Library(COMPILED).variants)
SIZES = [
    (1, 1, 128, 128),
    (3, 2, 10, 11),
    (2, 3, 16, 40),
    (1, 2, 8, 80),
]  # key heads, heads per key head, key_dim, value_dim
NUM_SLOTS = 6
LENGTHS = [1, 2, 7, 30]
SLOTS = [4, 1, 0, 2]

Run = Callable[..., Tensor]


@pytest.fixture(params=["torch", *VARIANTS])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "torch":
        return delta_rule.gated_delta_rule
    assert COMPILED is not None
    return DeltaRuleKernel(Library(COMPILED, request.param)).gated_delta_rule


def run_twice(run: Run, layer: DeltaRule, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Run new sequences, then some that continue next to one that takes over a slot."""
    starts = [0, *accumulate(LENGTHS)]
    qkv, gates = make_inputs(layer, starts[-1], dtype)
    cache = make_cache(layer, NUM_SLOTS)
    first = run(qkv, gates, layer, cache, SLOTS, starts, LENGTHS)
    slots = [2, 4, 1]
    second = run(qkv[3:9], gates[3:9], layer, cache, slots, [0, 1, 4, 6], [LENGTHS[3] + 1, 3, LENGTHS[1] + 2])
    return [first, second], cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_against_the_oracle(run: Run, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer = make_layer(sizes, dtype)
    ours, cache = run_twice(run, layer, dtype)
    theirs, expected = run_twice(oracle.gated_delta_rule, layer, dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert cache[[3, 5], 0].isnan().all()  # unused slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_same_bits_in_any_chunks_and_any_batch(run: Run, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer = make_layer(sizes, dtype)
    starts = [0, *accumulate(LENGTHS)]
    qkv, gates = make_inputs(layer, starts[-1], dtype)
    whole = make_cache(layer, NUM_SLOTS)
    together = run(qkv, gates, layer, whole, SLOTS, starts, LENGTHS)
    threads = torch.get_num_threads()
    try:
        for chunk, used in ((1, 1), (2, 3), (5, 2), (40, 1)):
            torch.set_num_threads(used)
            cache = make_cache(layer, NUM_SLOTS)
            for slot, (first, end) in zip(SLOTS, pairwise(starts), strict=True):
                for begin in range(first, end, chunk):
                    stop = min(begin + chunk, end)
                    alone = run(
                        qkv[begin:stop],
                        gates[begin:stop],
                        layer,
                        cache,
                        [slot],
                        [0, stop - begin],
                        [stop - first],
                    )
                    assert torch.equal(alone, together[begin:stop])
            assert torch.equal(cache[SLOTS], whole[SLOTS])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_drafts_leave_no_trace(run: Run, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    check_drafts(run, make_layer(sizes, dtype), dtype)
