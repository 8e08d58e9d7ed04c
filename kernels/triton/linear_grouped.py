"""Linear layers with weights of 4 or 8 bits in Triton. The contract is that of `kernels.linear_grouped.pack_grouped`.

A decode step has few rows, and so few tiles that they would not keep a GPU busy: the sum over the inputs is then split
among several programs, and a second kernel adds their parts in order. A single row needs no tensor cores, and so no
weights in their layout. More rows use larger tiles and no splits. Each tile of rows unpacks the weight again, so for
the many rows of a prompt it is unpacked once, into temporary memory, and torch multiplies. With `batch_invariant`,
there is one kernel for all numbers of rows, and tiles and splits depend only on the weight, so that a row's result
depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.linear_int8 import ConstantLinear
from serve_llm.kernels.triton.grouped import GroupQuantTensors, arrange, finish, load_codes, sum_products, unpack_slab

PROGRAMS = 256  # target for a step
FEW_ROWS = 64  # a step of at most this many gets more programs, as their partial sums take little memory
FEW_ROWS_PROGRAMS = 1024
MIN_STEPS = 4  # per split, so that loads overlap with products
UNROLLED_STEPS = 2  # per iteration of a single row's loop, whose loads Triton would not overlap
INVARIANT_ROWS = 64
ADDED_COLUMNS = 256  # per program that adds the parts of sums
UNPACKED_COLUMNS = 128  # per program that unpacks
MAX_ROWS = 1024  # per call with splits, whose parts take memory
UNPACKED_ROWS = 513  # rows from which a weight is unpacked first; captured steps that contain prompts have fewer


def pack_grouped(
    weight: GroupQuantWeight, bias: Tensor | None, dtype: torch.dtype, *, batch_invariant: bool = False
) -> Linear:
    """See `kernels.linear_grouped.pack_grouped`."""
    if weight.codes.numel() == 0:
        return ConstantLinear(weight.shape[0], bias)
    return GroupQuantLinear(arrange(weight), weight.order, bias, batch_invariant)


def pack_int8(weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, batch_invariant: bool = False) -> Linear:
    """See `kernels.linear_int8.pack_int8`, but x is not rounded to 8 bits."""
    codes = weight.view(torch.uint8) ^ 128  # minus the middle of the range it is the number
    grouped = GroupQuantWeight(codes, 8, scale, max(weight.shape[1], 1))
    return pack_grouped(grouped, bias, torch.bfloat16, batch_invariant=batch_invariant)


@dataclass(frozen=True)
class GroupQuantLinear:
    weight: GroupQuantTensors
    order: Tensor | None  # (inputs,): see `GroupQuantWeight`
    bias: Tensor | None
    batch_invariant: bool

    def __call__(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[:, self.order]
        x = x if x.stride(1) == 1 else x.contiguous()
        if len(x) >= UNPACKED_ROWS and not self.batch_invariant:
            weight = unpack(self.weight, x.dtype)
            return x @ weight if self.bias is None else torch.addmm(self.bias.to(x.dtype), x, weight)
        y = x.new_empty((len(x), self.weight.outputs))
        if self.batch_invariant:
            tile = Tile.for_rows(INVARIANT_ROWS)
            splits = choose_splits(self.weight, tile, 1, PROGRAMS)
        else:
            tile = Tile.for_rows(len(x))
            splits = choose_splits(self.weight, tile, len(x), FEW_ROWS_PROGRAMS if len(x) <= FEW_ROWS else PROGRAMS)
        at_once = max(len(x), 1) if splits == 1 else MAX_ROWS
        for start in range(0, len(x), at_once):
            self._multiply(x[start : start + at_once], y[start : start + at_once], tile, splits)
        return y

    def _multiply(self, x: Tensor, y: Tensor, tile: Tile, splits: int) -> None:
        rows, outputs = y.shape
        columns = triton.cdiv(outputs, tile.columns)
        is_whole = splits == 1
        sums = y if is_whole else torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
        arguments = self.weight.arguments()
        steps = self.weight.steps, triton.cdiv(self.weight.steps, splits)
        if rows == 1 and not self.batch_invariant:
            _multiply_row[(columns, splits)](
                x,
                sums,
                self.bias,
                *steps,
                **arguments,
                IS_WHOLE=is_whole,
                COLUMNS=tile.columns,
                UNROLLED=UNROLLED_STEPS,
            )
        else:
            _multiply_grouped[(triton.cdiv(rows, tile.rows), columns, splits)](
                x,
                sums,
                self.bias,
                rows,
                *steps,
                x.stride(0),
                **arguments,
                IS_WHOLE=is_whole,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                num_warps=tile.num_warps,
                num_stages=3,
            )
        if not is_whole:
            names = ("scales", "divisors", "outputs", "SCALE", "SCALES_LAST")
            _add_splits[(rows, triton.cdiv(outputs, ADDED_COLUMNS))](
                sums,
                y,
                self.bias,
                rows,
                **{name: arguments[name] for name in names},
                SPLITS=splits,
                COLUMNS=ADDED_COLUMNS,
            )


def unpack(weight: GroupQuantTensors, dtype: torch.dtype) -> Tensor:
    """Unpack the weight as (inputs, outputs)."""
    arguments = weight.arguments()
    unpacked = torch.empty((weight.inputs, weight.outputs), dtype=dtype, device=weight.codes.device)
    grid = (triton.cdiv(weight.outputs, UNPACKED_COLUMNS), weight.steps)
    _unpack[grid](unpacked, **arguments | {"SCALES_LAST": False}, COLUMNS=UNPACKED_COLUMNS)
    return unpacked


@dataclass(frozen=True)
class Tile:
    rows: int
    columns: ClassVar[int] = 64

    @property
    def num_warps(self) -> int:
        return 8 if self.rows == 128 else 4

    @classmethod
    def for_rows(cls, rows: int) -> Tile:
        return cls(min(128, max(16, triton.next_power_of_2(rows))))


def choose_splits(weight: GroupQuantTensors, tile: Tile, rows: int, programs: int) -> int:
    """Return the number of programs among which a sum is split: enough for `programs` in total, if each has MIN_STEPS
    steps."""
    tiles = -(-rows // tile.rows) * -(-weight.outputs // tile.columns)
    splits = max(1, min(programs // max(tiles, 1), weight.steps // MIN_STEPS))
    steps_of_split = -(-weight.steps // splits)
    return -(-weight.steps // steps_of_split)  # no split is empty


@triton.jit(do_not_specialize=["rows"])
def _multiply_grouped(
    x,
    y,
    bias,
    rows,
    steps,
    split_steps,
    x_row,
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
    IS_WHOLE: tl.constexpr,  # y is (rows, outputs); otherwise (splits, rows, outputs) float32, of unfinished sums
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute one tile of y, or of one split. Consecutive programs share their columns, so that weights are read
    once."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    is_row = row < rows
    is_column = column < outputs
    total = sum_products(
        tl.zeros((ROWS, COLUMNS), tl.float32),
        x + row.to(tl.int64) * x_row,
        is_row,
        None,
        column,
        is_column,
        split * split_steps,
        tl.minimum((split + 1) * split_steps, steps),
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
    if IS_WHOLE:
        total = finish(total, column, is_column, scales, divisors, bias, SCALE, SCALES_LAST)
    target = (split * rows + row).to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(y + target, total.to(y.dtype.element_ty), is_row[:, None] & is_column[None, :])


@triton.jit
def _multiply_row(
    x,
    y,
    bias,
    steps,
    split_steps,
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
    IS_WHOLE: tl.constexpr,  # y is (outputs,); otherwise (splits, outputs) float32, of unfinished sums
    COLUMNS: tl.constexpr,
    UNROLLED: tl.constexpr,
):
    """Compute some columns of the product of a single row, or of one split. Weights are not rounded."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    split = tl.program_id(1)
    place = tl.arange(0, SLAB_SIZE // UNIT)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    parts = tl.zeros((SLAB_SIZE // UNIT, UNIT, COLUMNS), tl.float32)
    end = tl.minimum((split + 1) * split_steps, steps)
    for step in tl.range(split * split_steps, end, loop_unroll_factor=UNROLLED):
        packed = load_codes(codes, step, column, is_column, outputs, UNIT, SLAB_SIZE)
        for half in tl.static_range(8 // BITS):
            first = (step * (8 // BITS) + half) * SLAB_SIZE
            value = unpack_slab(
                packed,
                first,
                column,
                is_column,
                scales,
                zeros,
                minimums,
                table,
                outputs,
                groups,
                group_size,
                half,
                BITS,
                CODING,
                SCALE,
                SCALES_LAST,
                UNIT,
                SLAB_SIZE,
            )
            source = first + place - offset
            left = tl.load(x + source, (source >= 0) & (source < inputs), 0.0).to(tl.float32)
            parts += value * left[:, :, None]
    total = tl.sum(tl.sum(parts, 0), 0)[None, :]
    if IS_WHOLE:
        total = finish(total, column, is_column, scales, divisors, bias, SCALE, SCALES_LAST)
    tl.store(y + split * outputs + column[None, :], total.to(y.dtype.element_ty), is_column[None, :])


@triton.jit(do_not_specialize=["rows"])
def _add_splits(
    sums,
    y,
    bias,
    rows,
    scales,
    divisors,
    outputs,
    SCALE: tl.constexpr,
    SCALES_LAST: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    total = tl.zeros((1, COLUMNS), tl.float32)
    for split in range(SPLITS):
        source = (split * rows + row).to(tl.int64) * outputs + column
        total += tl.load(sums + source, is_column, 0.0)[None, :]
    total = finish(total, column, is_column, scales, divisors, bias, SCALE, SCALES_LAST)
    target = row.to(tl.int64) * outputs + column
    tl.store(y + target[None, :], total.to(y.dtype.element_ty), is_column[None, :])


@triton.jit
def _unpack(
    unpacked,
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
    COLUMNS: tl.constexpr,
):
    """Unpack one step of some columns."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < outputs
    step = tl.program_id(1)
    packed = load_codes(codes, step, column, is_column, outputs, UNIT, SLAB_SIZE)
    place = tl.arange(0, SLAB_SIZE // UNIT)[:, None] * UNIT + tl.arange(0, UNIT)[None, :]
    for half in tl.static_range(8 // BITS):
        first = (step * (8 // BITS) + half) * SLAB_SIZE
        value = unpack_slab(
            packed,
            first,
            column,
            is_column,
            scales,
            zeros,
            minimums,
            table,
            outputs,
            groups,
            group_size,
            half,
            BITS,
            CODING,
            SCALE,
            SCALES_LAST,
            UNIT,
            SLAB_SIZE,
        )
        if divisors is not None:
            divisor = tl.load(divisors + column, is_column, 1.0)[None, None, :]
            value = tl.div_rn(value, tl.zeros_like(value) + divisor)
        source = first + place - offset
        is_input = (source >= 0) & (source < inputs)
        target = source.to(tl.int64)[:, :, None] * outputs + column[None, None, :]
        tl.store(
            unpacked + target, value.to(unpacked.dtype.element_ty), is_input[:, :, None] & is_column[None, None, :]
        )
