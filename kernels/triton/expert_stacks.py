"""One linear layer of all experts, and its product by rows that are sorted by expert, in one launch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.linear import Linear, TorchLinear
from serve_llm.kernels.triton.grouped import GroupQuantTensors, finish, sum_products
from serve_llm.kernels.triton.linear import BatchInvariantLinear
from serve_llm.kernels.triton.linear_grouped import GroupQuantLinear, Tile
from serve_llm.kernels.triton.product import dot

UNQUANTISED = (TorchLinear, BatchInvariantLinear)  # layers with a plain weight tensor


@dataclass(frozen=True)
class SortedPairs:
    """Pairs of a token and one of its experts, sorted by expert."""

    order: Tensor  # (pairs,) int64: the number of each pair, token * top_k + choice
    starts: Tensor  # (local experts + 1,) int32: the first pair of each expert, and the end of the last
    top_k: int


class ExpertStack:
    """A linear layer of all local experts. Rows of x are by token, and those of y by sorted position, or the other way
    round: rows of x by sorted position and those of y by pair."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._plain: _PlainStack | None = None
        self._packed: _PackedStack | None = None

    def put(self, index: int, layer: Linear) -> bool:
        """Copy the layer of expert `index`; the first call allocates the stack. Returns False if the layer cannot be
        stacked: it is of an unknown kind, or of another kind than earlier layers."""
        if index == 0 and isinstance(layer, UNQUANTISED):
            self._plain = _PlainStack.allocate(self._experts, layer)
        elif index == 0 and isinstance(layer, GroupQuantLinear):
            self._packed = _PackedStack(self._experts, layer)
        if self._plain is not None and isinstance(layer, UNQUANTISED):
            self._plain.put(index, layer)
            return True
        return self._packed is not None and isinstance(layer, GroupQuantLinear) and self._packed.put(index, layer)

    def get(self, index: int) -> Linear:
        """Return the layer that was put there."""
        stack = self._packed or self._plain
        assert stack is not None
        return stack.get(index)

    @property
    def form(self) -> str:
        """A value that is equal for stacks that differ only in the contents of their tensors."""
        if self._packed is None:
            return "plain"
        weight = self._packed.weight
        values = {one.name: getattr(weight, one.name) for one in fields(weight)}
        return str({name: value for name, value in values.items() if not isinstance(value, Tensor)})

    def list_tensors(self, index: int) -> list[Tensor]:
        """Return the weights of the layer that was put there, in the stack."""
        stack = self._packed or self._plain
        assert stack is not None
        return [tensor[index] for tensor in stack.list_stacked() if tensor is not None]

    @property
    def outputs(self) -> int:
        if self._packed is not None:
            return self._packed.weight.outputs
        return 0 if self._plain is None else self._plain.weight.shape[1]

    @property
    def device(self) -> torch.device:
        if self._packed is not None:
            return self._packed.weight.codes.device
        return torch.device("cpu") if self._plain is None else self._plain.weight.device

    def multiply(self, x: Tensor, y: Tensor, pairs: SortedPairs, block_rows: int, *, by_token: bool) -> None:
        """Compute y, (pairs, outputs). x: dense; its rows are by token if `by_token`, else by sorted position.
        block_rows: rows of an expert that a program computes: 16 to 128."""
        stack = self._packed or self._plain
        assert stack is not None
        stack.multiply(x, y, pairs, block_rows, by_token)


@dataclass(frozen=True)
class _PlainStack:
    weight: Tensor  # (experts, outputs, inputs)
    bias: Tensor | None  # (experts, outputs)

    @classmethod
    def allocate(cls, experts: int, layer: TorchLinear | BatchInvariantLinear) -> _PlainStack:
        weight = layer.weight.new_empty((experts, *layer.weight.shape))
        return cls(weight, None if layer.bias is None else layer.bias.new_empty((experts, *layer.bias.shape)))

    def put(self, index: int, layer: TorchLinear | BatchInvariantLinear) -> None:
        self.weight[index] = layer.weight
        if self.bias is not None and layer.bias is not None:
            self.bias[index] = layer.bias

    def get(self, index: int) -> Linear:
        return TorchLinear(self.weight[index], None if self.bias is None else self.bias[index])

    def list_stacked(self) -> list[Tensor | None]:
        return [self.weight, self.bias]

    def multiply(self, x: Tensor, y: Tensor, pairs: SortedPairs, block_rows: int, by_token: bool) -> None:
        experts, outputs, inputs = self.weight.shape
        columns = 128 if outputs > 64 else 64
        _multiply_experts[(_count_blocks(pairs, block_rows), triton.cdiv(outputs, columns))](
            x,
            self.weight,
            self.bias,
            y,
            pairs.order,
            pairs.starts,
            experts,
            pairs.top_k,
            inputs,
            outputs,
            BY_TOKEN=by_token,
            EXPERTS=triton.next_power_of_2(experts),
            ROWS=block_rows,
            COLUMNS=columns,
            DEPTH=128 // x.element_size(),
            num_warps=8 if block_rows == 128 else 4,
            num_stages=3,
        )


class _PackedStack:
    """Scales have the widest type of all experts."""

    def __init__(self, experts: int, layer: GroupQuantLinear) -> None:
        def allocate(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.new_empty((experts, *tensor.shape))

        stacked = {name: allocate(getattr(layer.weight, name)) for name in _STACKED}
        self.weight = replace(layer.weight, **stacked)  # type: ignore[arg-type]
        self.order = allocate(layer.order)
        self.bias = allocate(layer.bias)

    def put(self, index: int, layer: GroupQuantLinear) -> bool:
        """Like `ExpertStack.put`. Returns False if it has another form."""
        if not _is_alike(self.weight, layer.weight) or (layer.order is None) != (self.order is None):
            return False
        widest = _promote(self.weight.scales.dtype, layer.weight.scales.dtype)
        if widest != self.weight.scales.dtype:
            by_group = {name: getattr(self.weight, name) for name in ("scales", "zeros", "minimums")}
            wide = {name: None if one is None else one.to(widest) for name, one in by_group.items()}
            self.weight = replace(self.weight, **wide)  # type: ignore[arg-type]
        for name in _STACKED:
            _put(getattr(self.weight, name), index, getattr(layer.weight, name))
        _put(self.order, index, layer.order)
        _put(self.bias, index, layer.bias)
        return True

    def get(self, index: int) -> Linear:
        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[index]

        picked = {name: pick(getattr(self.weight, name)) for name in _STACKED}
        weight = replace(self.weight, **picked)  # type: ignore[arg-type]
        return GroupQuantLinear(weight, pick(self.order), pick(self.bias), batch_invariant=False)

    def list_stacked(self) -> list[Tensor | None]:
        return [*(getattr(self.weight, name) for name in _STACKED), self.order, self.bias]

    def multiply(self, x: Tensor, y: Tensor, pairs: SortedPairs, block_rows: int, by_token: bool) -> None:
        tile = Tile(block_rows)
        weight = self.weight
        experts = weight.codes.shape[0]
        _multiply_packed_experts[(_count_blocks(pairs, block_rows), triton.cdiv(weight.outputs, tile.columns))](
            x,
            self.bias,
            y,
            pairs.order,
            pairs.starts,
            experts,
            pairs.top_k,
            self.order,
            weight.steps,
            **weight.arguments(),
            BY_TOKEN=by_token,
            EXPERTS=triton.next_power_of_2(experts),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            num_warps=tile.num_warps,
            num_stages=3,
        )


_STACKED = ("codes", "scales", "zeros", "minimums", "divisors")  # the table is that of all experts


def _put(stack: Tensor | None, index: int, tensor: Tensor | None) -> None:
    if stack is not None and tensor is not None:
        stack[index] = tensor.to(stack.dtype)


def _promote(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    return one if one == other else torch.float32


def _is_alike(stack: GroupQuantTensors, weight: GroupQuantTensors) -> bool:
    for one in fields(stack):
        mine = getattr(stack, one.name)
        theirs = getattr(weight, one.name)
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            is_same = mine.shape[1:] == theirs.shape if one.name in _STACKED else torch.equal(mine, theirs)
        else:
            is_same = type(mine) is type(theirs) and mine == theirs
        if not is_same:
            return False
    return True


def _count_blocks(pairs: SortedPairs, block_rows: int) -> int:
    """Return the maximum number of programs along the rows: the host does not know how many rows each expert has."""
    return min(len(pairs.order), len(pairs.order) // block_rows + len(pairs.starts) - 1)


@triton.jit
def _find_expert(block, starts, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Find the expert of a block of rows, `experts` for a surplus block, and the first block of this expert."""
    number = tl.arange(0, EXPERTS)
    count = tl.load(starts + number + 1, number < experts, 0) - tl.load(starts + number, number < experts, 0)
    ends = tl.cumsum((count + ROWS - 1) // ROWS, 0)  # one past each expert's last block
    expert = tl.sum((ends <= block).to(tl.int32), 0)
    return expert, tl.max(tl.where(ends <= block, ends, 0), 0)


@triton.jit
def _find_rows(block, first_block, expert, order, starts, top_k, BY_TOKEN: tl.constexpr, ROWS: tl.constexpr):
    """Find the rows of x and of y, int64, and which of them exist."""
    position = tl.load(starts + expert) + (block - first_block) * ROWS + tl.arange(0, ROWS)
    is_valid = position < tl.load(starts + expert + 1)
    pair = tl.load(order + position, is_valid, 0)
    source = position.to(tl.int64)
    target = pair
    if BY_TOKEN:
        source = pair // top_k
        target = position.to(tl.int64)
    return source, target, is_valid


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
    expert, first_block = _find_expert(block, starts, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    source, target, is_valid = _find_rows(block, first_block, expert, order, starts, top_k, BY_TOKEN, ROWS)
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
def _multiply_packed_experts(
    x,
    bias,
    y,
    order,
    starts,
    experts,
    top_k,
    input_order,
    steps,
    codes,
    scales,
    zeros,
    minimums,
    table,
    divisors,
    inputs,
    outputs,
    offset,
    groups,
    group_size,
    BITS: tl.constexpr,
    CODING: tl.constexpr,
    SCALE: tl.constexpr,
    SCALES_LAST: tl.constexpr,
    UNIT: tl.constexpr,
    SLAB_SIZE: tl.constexpr,
    BY_TOKEN: tl.constexpr,  # as of `_multiply_experts`
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    block = tl.program_id(0)
    expert, first_block = _find_expert(block, starts, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    source, target, is_valid = _find_rows(block, first_block, expert, order, starts, top_k, BY_TOKEN, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    expert = expert.to(tl.int64)
    codes += expert * steps * SLAB_SIZE * outputs
    scales += expert * groups * outputs
    if zeros is not None:
        zeros += expert * groups * outputs
    if minimums is not None:
        minimums += expert * groups * outputs
    if divisors is not None:
        divisors += expert * outputs
    if bias is not None:
        bias += expert * outputs
    if input_order is not None:
        input_order += expert * inputs
    total = sum_products(
        tl.zeros((ROWS, COLUMNS), tl.float32),
        x + source * inputs,
        is_valid,
        input_order,
        column,
        is_column,
        0,
        steps,
        codes,
        scales,
        zeros,
        minimums,
        table,
        inputs,
        outputs,
        offset,
        groups,
        group_size,
        BITS,
        CODING,
        SCALE,
        SCALES_LAST,
        UNIT,
        SLAB_SIZE,
    )
    total = finish(total, column, is_column, scales, divisors, bias, SCALE, SCALES_LAST)
    tl.store(y + target[:, None] * outputs + column[None, :], total, is_valid[:, None] & is_column[None, :])
