"""Mixture of experts on a GPU: sort the tokens by expert, then compute each layer of all experts in one launch.

Contract: `kernels.moe`, which computes experts whose layers differ in their form, one expert at a time. For all others
the host never waits for the device and all shapes follow from those of the arguments, so a step can be captured as a
graph. A program computes some columns for a block of sorted rows of one expert. The host does not know the number of
rows of each expert, so it launches the most programs that may be needed, and surplus programs return at once. With
`batch_invariant` all blocks have one size, so that a row's result depends on that row alone.

    pairs (token, choice)   0:e2  1:e0  2:e2  3:e1  4:e2
    order                   1 | 3 | 0 2 4          starts 0 1 2 5        blocks of 2 rows: e0  e1  e2  e2
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels import moe
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.moe import Activation, ExpertAdapters, LocalExpert, PackedExperts
from serve_llm.kernels.triton.expert_stacks import ExpertStack, SortedPairs

INVARIANT_ROWS = 64


@triton.jit
def _sum_choices(pair_outputs, weights, experts, total, width, first, last, TOP_K: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(TOP_K):
        pair = token * TOP_K + choice
        expert = tl.load(experts + pair)
        num_columns = tl.where((expert >= first) & (expert < last), width, 0)  # other experts have no output here
        row = tl.load(pair_outputs + pair.to(tl.int64) * width + column, column < num_columns, 0.0)
        sums += tl.load(weights + pair) * row.to(tl.float32)
    tl.store(total + token.to(tl.int64) * width + column, sums, column < width)


def pack_experts(
    pairs: Iterable[tuple[Linear, Linear]],
    activation: Activation,
    local_experts: range,
    adapters: ExpertAdapters | None = None,
    *,
    batch_invariant: bool = False,
) -> PackedExperts:
    """See `kernels.moe.pack_experts`. Releases each layer once it is copied into the stack of all experts."""
    first = ExpertStack(len(local_experts))
    last = ExpertStack(len(local_experts))
    remaining = iter(pairs)
    for index, (up, down) in enumerate(remaining):
        if not (first.put(index, up) and last.put(index, down)):
            before = [(first.get(number), last.get(number)) for number in range(index)]
            joined = chain(before, [(up, down)], remaining)
            return moe.pack_experts(joined, activation, local_experts, adapters)
    block_rows = INVARIANT_ROWS if batch_invariant else None
    return _GroupedExperts(first, last, activation, local_experts, adapters, block_rows)


def choose_block_rows(pairs: int, experts: int) -> int:
    """Return about as many rows as an expert has on average, since each block reads all weights of its expert."""
    rows: int = triton.next_power_of_2(-(-pairs // experts))
    return min(128, max(16, rows))


class _GroupedExperts:
    reads_back = False

    def __init__(
        self,
        first: ExpertStack,
        last: ExpertStack,
        activation: Activation,
        local_experts: range,
        adapters: ExpertAdapters | None,
        block_rows: int | None,
    ) -> None:
        """block_rows: None to choose it by the number of rows."""
        self._first = first
        self._last = last
        self._activation = activation
        self._local_experts = local_experts
        self._adapters = adapters
        self._block_rows = block_rows
        # `searchsorted` of these in the sorted experts gives each local expert's first row, and the end of the last
        self._expert_bounds = torch.arange(
            local_experts.start, local_experts.stop + 1, dtype=torch.int16, device=first.device
        )

    def list_local_experts(self) -> list[LocalExpert]:
        """See `kernels.moe.PackedExperts`."""
        form = f"{self._first.form}, {self._last.form}"
        return [
            LocalExpert(self._first.list_tensors(index) + self._last.list_tensors(index), form, is_compiled=True)
            for index in range(len(self._local_experts))
        ]

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        total = torch.empty_like(x)
        if not self._local_experts or not tokens:
            return total.zero_()
        count = tokens * top_k
        width = x.shape[1]
        sorted_experts, order = experts.flatten().to(torch.int16).sort(stable=True)
        starts = torch.searchsorted(sorted_experts, self._expert_bounds, out_int32=True)
        pairs = SortedPairs(order, starts, top_k)
        block_rows = self._block_rows or choose_block_rows(count, len(self._local_experts))
        inner = x.new_empty((count, self._first.outputs))
        self._first.multiply(x.contiguous(), inner, pairs, block_rows, by_token=True)
        adapters = self._adapters if self._adapters is not None and self._adapters.is_used else None
        own_rows: list[tuple[int, int]] = []
        if adapters is not None:  # the host waits for the device; steps with adapters are not captured
            own_rows = list(pairwise(starts.tolist()))
            for index, (start, stop) in enumerate(own_rows):
                tokens_of_expert = order[start:stop] // top_k
                adapters.add_to_first(index, inner[start:stop], x[tokens_of_expert], tokens_of_expert)
        inner = self._activation(inner)
        pair_outputs = x.new_empty((count, width))
        self._last.multiply(inner, pair_outputs, pairs, block_rows, by_token=False)
        if adapters is not None:
            for index, (start, stop) in enumerate(own_rows):
                rows = pair_outputs[order[start:stop]]
                adapters.add_to_last(index, rows, inner[start:stop], order[start:stop] // top_k)
                pair_outputs[order[start:stop]] = rows
        columns = min(1024, triton.next_power_of_2(width))
        _sum_choices[(tokens, triton.cdiv(width, columns))](
            pair_outputs,
            weights,
            experts,
            total,
            width,
            self._local_experts.start,
            self._local_experts.stop,
            TOP_K=top_k,
            COLUMNS=columns,
        )
        return total
