"""Experts of a mixture on a GPU: tokens are sorted by expert, and one launch for each product computes all experts.

The same contract as `kernels.moe`, where layers in 8 bits are computed one by one. For all others nothing waits for the
device and all shapes follow from those of the arguments, so a step can be captured as a graph. A program takes some
columns of one expert and up to ROWS of its places in the sorted order; as it is not known on the host how many places
each expert has, there are as many programs as there can be, and those left over end at once. With `batch_invariant`
blocks are of one size, so that a row's result depends on that row alone.

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

PLAIN = (Functional, Invariant)  # layers that have their weight as it is


@triton.jit
def _product(
    x,
    weight,
    bias,
    y,
    order,
    starts,
    experts,
    chosen,
    inputs,
    outputs,
    BY_TOKEN: tl.constexpr,  # x has a row for each token and y for each place in the order; else: places, pairs
    EXPERTS: tl.constexpr,  # a power of two, at least `experts`
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    block = tl.program_id(0)
    number = tl.arange(0, EXPERTS)
    count = tl.load(starts + number + 1, number < experts, 0) - tl.load(starts + number, number < experts, 0)
    ends = tl.cumsum((count + ROWS - 1) // ROWS, 0)  # blocks up to each expert's last
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    if expert >= experts:
        return
    before = tl.max(tl.where(ends <= block, ends, 0), 0)
    place = tl.load(starts + expert) + (block - before) * ROWS + tl.arange(0, ROWS)
    is_row = place < tl.load(starts + expert + 1)
    pair = tl.load(order + place, is_row, 0)
    source, target = place.to(tl.int64), pair
    if BY_TOKEN:
        source, target = pair // chosen, place.to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    weight += expert.to(tl.int64) * outputs * inputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inputs, DEPTH):
        depth = start + tl.arange(0, DEPTH)
        is_depth = depth < inputs
        left = tl.load(x + source[:, None] * inputs + depth[None, :], is_row[:, None] & is_depth[None, :], 0.0)
        right = tl.load(weight + column[None, :] * inputs + depth[:, None], is_column[None, :] & is_depth[:, None], 0.0)
        total = dot(left, right, total)
    if bias is not None:
        total += tl.load(bias + expert * outputs + column, is_column, 0.0).to(tl.float32)[None, :]
    tl.store(y + target[:, None] * outputs + column[None, :], total, is_row[:, None] & is_column[None, :])


@triton.jit
def _sum(made, weights, experts, total, width, first, last, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(CHOSEN):
        pair = token * CHOSEN + choice
        expert = tl.load(experts + pair)
        held = tl.where((expert >= first) & (expert < last), width, 0)  # else nothing was made of it
        row = tl.load(made + pair.to(tl.int64) * width + column, column < held, 0.0)
        sums += tl.load(weights + pair) * row.to(tl.float32)
    tl.store(total + token.to(tl.int64) * width + column, sums, column < width)


def pack_experts(
    pairs: Iterable[tuple[Linear, Linear]], activation: Activation, own: range, *, batch_invariant: bool = False
) -> Experts:
    """See `kernels.moe.pack_experts`. Each layer is let go of when it has been copied into a stack with the others."""
    first, last = _Stack(len(own)), _Stack(len(own))
    rest = iter(pairs)
    for index, (before, behind) in enumerate(rest):
        if not isinstance(before, PLAIN) or not isinstance(behind, PLAIN):
            assert index == 0, "the experts of a layer are alike"
            return moe.pack_experts(chain([(before, behind)], rest), activation, own)
        first.put(index, before)
        last.put(index, behind)
    return _Grouped(first, last, activation, own, _Tile(64) if batch_invariant else None)


class _Stack:
    """One product of each expert: weight (experts, outputs, inputs), bias (experts, outputs) or None."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self.weight = torch.empty((experts, 0, 0))  # of no experts
        self.bias: Tensor | None = None

    def put(self, index: int, linear: Functional | Invariant) -> None:
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
    def warps(self) -> int:
        return 8 if self.rows == 128 else 4

    @classmethod
    def of(cls, pairs: int, experts: int) -> _Tile:
        """About as many rows as an expert has on average, since each block reads all of its weights."""
        return cls(min(128, max(16, triton.next_power_of_2(-(-pairs // experts)))))


class _Grouped:
    def __init__(self, first: _Stack, last: _Stack, activation: Activation, own: range, tile: _Tile | None) -> None:
        """tile: for any number of rows; None: by their number."""
        self._first, self._last, self._activation, self._own, self._tile = first, last, activation, own, tile
        # where a sorted list passes from one expert to the next
        self._borders = torch.arange(own.start, own.stop + 1, dtype=torch.int16, device=first.weight.device)

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        tokens, chosen = experts.shape
        total = torch.empty_like(x)
        if not self._own or not tokens:
            return total.zero_()
        pairs, width = tokens * chosen, x.shape[1]
        numbers, order = experts.flatten().to(torch.int16).sort(stable=True)
        starts = torch.searchsorted(numbers, self._borders, out_int32=True)
        tile = self._tile or _Tile.of(pairs, len(self._own))
        inner = x.new_empty((pairs, self._first.weight.shape[1]))
        self._multiply(x.contiguous(), self._first, inner, order, starts, chosen, tile, by_token=True)
        inner = self._activation(inner)
        made = x.new_empty((pairs, width))
        self._multiply(inner, self._last, made, order, starts, chosen, tile, by_token=False)
        columns = min(1024, triton.next_power_of_2(width))
        _sum[(tokens, triton.cdiv(width, columns))](
            made, weights, experts, total, width, self._own.start, self._own.stop, CHOSEN=chosen, COLUMNS=columns
        )
        return total

    def _multiply(
        self,
        x: Tensor,
        stack: _Stack,
        y: Tensor,
        order: Tensor,
        starts: Tensor,
        chosen: int,
        tile: _Tile,
        by_token: bool,
    ) -> None:
        experts, outputs, inputs = stack.weight.shape
        blocks = min(len(order), len(order) // tile.rows + experts)
        columns = 128 if outputs > 64 else 64
        _product[(blocks, triton.cdiv(outputs, columns))](
            x,
            stack.weight,
            stack.bias,
            y,
            order,
            starts,
            experts,
            chosen,
            inputs,
            outputs,
            BY_TOKEN=by_token,
            EXPERTS=triton.next_power_of_2(experts),
            ROWS=tile.rows,
            COLUMNS=columns,
            DEPTH=128 // x.element_size(),
            num_warps=tile.warps,
            num_stages=3,
        )
