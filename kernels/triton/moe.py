"""Mixture of experts on a GPU: sort the tokens by expert, then compute each layer of all experts in one launch.

Contract: `kernels.moe`, which also computes experts with 8-bit layers, one expert at a time. For all others the host
never waits for the device and all shapes follow from those of the arguments, so a step can be captured as a graph. A
program computes some columns for up to ROWS sorted rows of one expert. The host does not know the number of rows of
each expert, so it launches the most programs that may be needed, and surplus programs return at once. With
`batch_invariant` all blocks have one size, so that a row's result depends on that row alone.

    pairs (token, choice)   0:e2  1:e0  2:e2  3:e1  4:e2
    order                   1 | 3 | 0 2 4          starts 0 1 2 5        blocks of ROWS = 2: e0  e1  e2  e2
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels import moe
from serve_llm.kernels.linear import Functional, Linear
from serve_llm.kernels.moe import Activation, Experts
from serve_llm.kernels.triton.linear import Invariant
from serve_llm.kernels.triton.product import dot

UNQUANTISED = (Functional, Invariant)  # layers with a plain weight tensor


@triton.jit
def _multiply_experts(
    x,
    weight,
    bias,
    y,
    order,
    starts,
    experts,
    top_k,
    inputs,
    outputs,
    BY_TOKEN: tl.constexpr,  # x is by token and y by sorted position; otherwise x is by sorted position and y by pair
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    block = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    count = tl.load(starts + number + 1, number < experts, 0) - tl.load(starts + number, number < experts, 0)
    ends = tl.cumsum((count + ROWS - 1) // ROWS, 0)  # one past each expert's last block
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    if expert >= experts:
        return
    first_block = tl.max(tl.where(ends <= block, ends, 0), 0)
    position = tl.load(starts + expert) + (block - first_block) * ROWS + tl.arange(0, ROWS)
    is_valid = position < tl.load(starts + expert + 1)
    pair = tl.load(order + position, is_valid, 0)
    source, target = position.to(tl.int64), pair
    if BY_TOKEN:
        source, target = pair // top_k, position.to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    weight += expert.to(tl.int64) * outputs * inputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inputs, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_depth = depth < inputs
        left = tl.load(x + source[:, None] * inputs + depth[None, :], is_valid[:, None] & is_depth[None, :], 0.0)
        right = tl.load(weight + column[None, :] * inputs + depth[:, None], is_column[None, :] & is_depth[:, None], 0.0)
        total = dot(left, right, total)
    if bias is not None:
        total += tl.load(bias + expert * outputs + column, is_column, 0.0).to(tl.float32)[None, :]
    tl.store(y + target[:, None] * outputs + column[None, :], total, is_valid[:, None] & is_column[None, :])


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
    *,
    batch_invariant: bool = False,
) -> Experts:
    """See `kernels.moe.pack_experts`. Releases each layer once it is copied into the stack of all experts."""
    first, last = _ExpertStack(len(local_experts)), _ExpertStack(len(local_experts))
    remaining = iter(pairs)
    for index, (up, down) in enumerate(remaining):
        if not isinstance(up, UNQUANTISED) or not isinstance(down, UNQUANTISED):
            assert index == 0, "all experts of a layer have the same kind of linear layer"
            return moe.pack_experts(chain([(up, down)], remaining), activation, local_experts)
        first.put(index, up)
        last.put(index, down)
    return _GroupedExperts(first, last, activation, local_experts, _Tile(64) if batch_invariant else None)


class _ExpertStack:
    """One layer of all experts: weight (experts, outputs, inputs), bias (experts, outputs) or None."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self.weight = torch.empty((experts, 0, 0))
        self.bias: Tensor | None = None

    def put(self, index: int, linear: Functional | Invariant) -> None:
        """Copy the layer of expert `index`; the first call allocates the stack."""
        if index == 0:
            self.weight = linear.weight.new_empty((self._experts, *linear.weight.shape))
            self.bias = None if linear.bias is None else linear.bias.new_empty((self._experts, *linear.bias.shape))
        self.weight[index] = linear.weight
        if self.bias is not None and linear.bias is not None:
            self.bias[index] = linear.bias


@dataclass(frozen=True)
class _Tile:
    rows: int

    @property
    def num_warps(self) -> int:
        return 8 if self.rows == 128 else 4

    @classmethod
    def for_load(cls, pairs: int, experts: int) -> _Tile:
        """About as many rows as an expert has on average, since each block reads all weights of its expert."""
        return cls(min(128, max(16, triton.next_power_of_2(-(-pairs // experts)))))


class _GroupedExperts:
    def __init__(
        self,
        first: _ExpertStack,
        last: _ExpertStack,
        activation: Activation,
        local_experts: range,
        tile: _Tile | None,
    ) -> None:
        """tile: None to choose it by the number of rows."""
        self._first = first
        self._last = last
        self._activation = activation
        self._local_experts = local_experts
        self._tile = tile
        # `searchsorted` of these in the sorted experts gives each local expert's first row, and the end of the last
        self._expert_bounds = torch.arange(
            local_experts.start, local_experts.stop + 1, dtype=torch.int16, device=first.weight.device
        )

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, top_k = experts.shape
        total = torch.empty_like(x)
        if not self._local_experts or not tokens:
            return total.zero_()
        pairs, width = tokens * top_k, x.shape[1]
        sorted_experts, order = experts.flatten().to(torch.int16).sort(stable=True)
        starts = torch.searchsorted(sorted_experts, self._expert_bounds, out_int32=True)
        tile = self._tile or _Tile.for_load(pairs, len(self._local_experts))
        inner = x.new_empty((pairs, self._first.weight.shape[1]))
        self._multiply(x.contiguous(), self._first, inner, order, starts, top_k, tile, by_token=True)
        inner = self._activation(inner)
        pair_outputs = x.new_empty((pairs, width))
        self._multiply(inner, self._last, pair_outputs, order, starts, top_k, tile, by_token=False)
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

    def _multiply(
        self,
        x: Tensor,
        stack: _ExpertStack,
        y: Tensor,
        order: Tensor,
        starts: Tensor,
        top_k: int,
        tile: _Tile,
        by_token: bool,
    ) -> None:
        experts, outputs, inputs = stack.weight.shape
        blocks = min(len(order), len(order) // tile.rows + experts)
        columns = 128 if outputs > 64 else 64
        _multiply_experts[(blocks, triton.cdiv(outputs, columns))](
            x,
            stack.weight,
            stack.bias,
            y,
            order,
            starts,
            experts,
            top_k,
            inputs,
            outputs,
            BY_TOKEN=by_token,
            EXPERTS=triton.next_power_of_2(experts),
            ROWS=tile.rows,
            COLUMNS=columns,
            DEPTH=128 // x.element_size(),
            num_warps=tile.num_warps,
            num_stages=3,
        )
