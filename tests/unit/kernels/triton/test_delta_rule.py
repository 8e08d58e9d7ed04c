"""The gated delta rule in Triton: equal to the oracle in the interpreter, and compiled for GPUs."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from reference import delta_rule as oracle
from support.delta_rule import check_drafts, make_cache, make_inputs, make_layer
from support.matrix import mostly_slow
from support.triton import NO_TRITON, compile_for, record

pytest.importorskip("triton", reason=NO_TRITON)
from serve_llm.kernels.triton import delta_rule as ours

LENGTHS = [1, 2, 19]
SLOTS = [3, 0, 1]


@pytest.mark.parametrize("dtype", mostly_slow([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize("sizes", [(2, 2, 10, 11), (1, 1, 16, 40)])
def test_against_the_oracle_in_any_chunks(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    layer = make_layer(sizes, dtype)
    starts = [0, *accumulate(LENGTHS)]
    qkv, gates = make_inputs(layer, starts[-1], dtype)
    expected_cache = make_cache(layer, 4)
    expected = oracle.gated_delta_rule(qkv, gates, layer, expected_cache, SLOTS, starts, LENGTHS)
    cache = make_cache(layer, 4)
    found = ours.gated_delta_rule(qkv, gates, layer, cache, SLOTS, starts, LENGTHS)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(cache, expected_cache, rtol=tolerance, atol=tolerance, equal_nan=True)
    again = make_cache(layer, 4)
    first = starts[2]
    for begin, stop in ((0, 2), (2, 3), (3, 19)):
        part = slice(first + begin, first + stop)
        chunk = ours.gated_delta_rule(qkv[part], gates[part], layer, again, [1], [0, stop - begin], [stop])
        assert torch.equal(chunk, found[part])
    assert torch.equal(again[1], cache[1])


@pytest.mark.parametrize("sizes", [(2, 2, 10, 11), (1, 1, 16, 40)])
def test_drafts_leave_no_trace(sizes: tuple[int, int, int, int]) -> None:
    check_drafts(ours.gated_delta_rule, make_layer(sizes, torch.bfloat16), torch.bfloat16, num_steps=5)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [0, 4])
def test_the_sizes_of_qwen3_next_compile_without_spills(num_drafts: int) -> None:
    layer = make_layer((16, 2, 128, 128), torch.bfloat16)
    qkv, gates = make_inputs(layer, 8, torch.bfloat16)
    cache = make_cache(layer, 2, num_drafts)

    def call() -> None:
        ours.gated_delta_rule(qkv, gates, layer, cache, [0, 1], [0, 7, 8], [7, 30])

    launches = record(call)
    assert {launch.kernel.name for launch in launches} == {"_convolve", "_advance", "_keep_inputs"}
    for resources in compile_for(launches):
        assert resources.stack_bytes == 0
