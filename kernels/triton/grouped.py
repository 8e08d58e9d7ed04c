"""Codes of 4 and 8 bits on a GPU: their layout in memory, and the products of rows by them inside Triton kernels.

Inputs are cut into slabs of SLAB. Row k of the codes has a byte of every output, so that neighbouring threads read
neighbouring bytes. With 8 bits it is the code of input k. With 4 bits a row serves two slabs: the lower halves of its
bytes are for an input of the first slab, the upper halves for the same input of the second:

    rows of codes   0 .. SLAB - 1                       SLAB .. 2 * SLAB - 1
    lower halves    inputs 0 .. SLAB - 1                inputs 2 * SLAB .. 3 * SLAB - 1
    upper halves    inputs SLAB .. 2 * SLAB - 1         inputs 3 * SLAB .. 4 * SLAB - 1

Inputs that the first group lacks (`GroupQuantWeight.offset`) and those of the last slab have codes too, but no rows of
x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.linear_grouped import GroupQuantWeight, build_e2m1_table, find_scale_dtype, spread_nan
from serve_llm.kernels.triton.product import dot

SLAB = 64
INTEGER, TABLE, E2M1, E4M3 = range(4)  # what a code is: less the middle of its range a number, an index, a float
FLOAT_SCALE, E8M0_SCALE, E4M3_SCALE = range(3)
_SCALE_KINDS = {torch.float8_e8m0fnu: E8M0_SCALE, torch.float8_e4m3fn: E4M3_SCALE}


@dataclass(frozen=True)
class GroupQuantTensors:
    """A `GroupQuantWeight` in the layout of this module; or a stack of such, with one more dimension in front."""

    codes: Tensor  # (rows of codes, outputs) uint8
    scales: Tensor  # (groups, outputs)
    zeros: Tensor | None  # as the scales
    minimums: Tensor | None  # as the scales
    divisors: Tensor | None  # (outputs,) float32
    table: Tensor | None  # (16,) float32
    inputs: int
    bits: int
    coding: int
    group_size: int
    offset: int

    @property
    def outputs(self) -> int:
        return self.codes.shape[-1]

    @property
    def steps(self) -> int:
        """The number of steps of a sum over all inputs, each over as many inputs as share rows of codes."""
        return self.codes.shape[-2] // SLAB

    def arguments(self) -> dict[str, Any]:
        """The arguments for `sum_products`, by name."""
        num_groups = self.scales.shape[-2]
        scale_kind = _SCALE_KINDS.get(self.scales.dtype, FLOAT_SCALE)
        size = self.steps * SLAB * 8 // self.bits if num_groups == 1 else self.group_size
        return {
            "codes": self.codes,
            "scales": self.scales if scale_kind == FLOAT_SCALE else self.scales.view(torch.uint8),
            "zeros": self.zeros,
            "minimums": self.minimums,
            "table": self.table,
            "divisors": self.divisors,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "offset": self.offset,
            "groups": num_groups,
            "group_size": size,
            "BITS": self.bits,
            "CODING": self.coding,
            "SCALE": scale_kind,
            "SCALES_LAST": num_groups == 1 and self.minimums is None,
            "UNIT": min(SLAB, size & -size),
            "SLAB_SIZE": SLAB,
        }


def arrange(weight: GroupQuantWeight) -> GroupQuantTensors:
    """Return the weight in the layout of this module, without its order of inputs. It has outputs and inputs."""
    scales = spread_nan(weight)
    dtype = find_scale_dtype((scales, weight.zeros, weight.minimums))

    def by_group(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).t().contiguous()

    coding = _find_coding(weight)
    return GroupQuantTensors(
        codes=_arrange_codes(weight),
        scales=by_group(scales),
        zeros=None if weight.zeros is None else by_group(weight.zeros),
        minimums=None if weight.minimums is None else by_group(weight.minimums),
        divisors=None if weight.divisors is None else weight.divisors.float().contiguous(),
        table=weight.table.float().contiguous() if weight.table is not None and coding == TABLE else None,
        inputs=weight.shape[1],
        bits=weight.bits,
        coding=coding,
        group_size=weight.group_size,
        offset=weight.offset,
    )


def _find_coding(weight: GroupQuantWeight) -> int:
    if weight.table is None:
        return E4M3 if weight.is_float8 else INTEGER
    return E2M1 if torch.equal(weight.table, build_e2m1_table(weight.table.device)) else TABLE


def _arrange_codes(weight: GroupQuantWeight) -> Tensor:
    outputs, inputs = weight.shape
    step = SLAB * 8 // weight.bits
    end = weight.offset + inputs
    codes = functional.pad(weight.codes, (weight.offset, -end % step))
    if weight.bits == 4:
        slabs = codes.view(outputs, -1, 2, SLAB)
        codes = (slabs[:, :, 0] | slabs[:, :, 1] << 4).flatten(1)
    return codes.t().contiguous()


@triton.jit
def _e4m3(code):
    """Convert codes. Shifted to float16's bits, they are the number divided by 256. Does not support NaN."""
    half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 256.0


@triton.jit
def _e2m1(code):
    """Convert codes. Shifted to float16's bits, they are the number divided by 2 ** 14."""
    half = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@triton.jit
def _e8m0(code):
    """Return 2 ** (code - 127), or NaN."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _load_scales(scales, cell, is_cell, SCALE: tl.constexpr):
    value = tl.load(scales + cell, is_cell, 0)
    if SCALE == 1:
        return _e8m0(value.to(tl.int32))
    elif SCALE == 2:
        return _e4m3(value.to(tl.int32))
    else:
        return value.to(tl.float32)


@triton.jit
def _find_values(code, table, BITS: tl.constexpr, CODING: tl.constexpr):
    """Return the values of codes, float32."""
    if CODING == 1:
        return tl.load(table + code)
    elif CODING == 2:
        return _e2m1(code)
    elif CODING == 3:
        return _e4m3(code)
    else:  # the code becomes the end of the mantissa of 2 ** 23 + code: GPUs convert integers at half the usual rate
        return (code | 0x4B000000).to(tl.float32, bitcast=True) - ((1 << 23) + (1 << (BITS - 1)))


@triton.jit
def load_codes(codes, step, column, is_column, outputs, UNIT: tl.constexpr, SLAB_SIZE: tl.constexpr):
    """Load the bytes of one step, (SLAB_SIZE // UNIT, UNIT, columns) int32."""
    unit = tl.arange(0, SLAB_SIZE // UNIT)
    inner = tl.arange(0, UNIT)
    place = (unit[:, None, None] * UNIT + inner[None, :, None]) * outputs + column[None, None, :]
    step_size = tl.full((), SLAB_SIZE, tl.int64) * outputs
    return tl.load(codes + step * step_size + place, is_column[None, None, :], 0).to(tl.int32)


@triton.jit
def unpack_slab(
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
    half: tl.constexpr,
    BITS: tl.constexpr,
    CODING: tl.constexpr,
    SCALE: tl.constexpr,
    SCALES_LAST: tl.constexpr,
    UNIT: tl.constexpr,
    SLAB_SIZE: tl.constexpr,
):
    """Unpack the weights in these bits of `load_codes`' bytes, in its shape, float32. first: input of the first one."""
    unit = tl.arange(0, SLAB_SIZE // UNIT)
    value = _find_values((packed >> (half * BITS)) & ((1 << BITS) - 1), table, BITS, CODING)
    group = (first + unit * UNIT) // group_size
    cell = group[:, None, None].to(tl.int64) * outputs + column[None, None, :]
    is_cell = (group < groups)[:, None, None] & is_column[None, None, :]
    if zeros is not None:
        value -= tl.load(zeros + cell, is_cell, 0.0).to(tl.float32)
    if not SCALES_LAST:
        value *= _load_scales(scales, cell, is_cell, SCALE)
    if minimums is not None:
        value -= tl.load(minimums + cell, is_cell, 0.0).to(tl.float32)
    return value


@triton.jit
def sum_products(
    total,
    x_rows,
    is_row,
    order,
    column,
    is_column,
    first_step,
    end_step,
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
    BITS: tl.constexpr,
    CODING: tl.constexpr,
    SCALE: tl.constexpr,  # kind of the scales
    SCALES_LAST: tl.constexpr,  # `finish` applies the scales
    UNIT: tl.constexpr,  # a power of two that divides the group size: inputs that share a scale
    SLAB_SIZE: tl.constexpr,
):
    """Add to the total, (rows, columns) float32, the products of some steps, in ascending order.

    x_rows: (rows,) pointers to the first input of each row. order: see `GroupQuantWeight`. Weights are rounded to x's
    dtype.
    """
    depth = tl.arange(0, SLAB_SIZE)
    for step in range(first_step, end_step):
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
            right = tl.reshape(value, (SLAB_SIZE, column.shape[0])).to(x_rows.dtype.element_ty)
            source = first + depth - offset
            is_input = (source >= 0) & (source < inputs)
            if order is not None:
                source = tl.load(order + source, is_input, 0)
            left = tl.load(x_rows[:, None] + source[None, :], is_row[:, None] & is_input[None, :], 0.0)
            total = dot(left, right, total)
    return total


@triton.jit
def finish(total, column, is_column, scales, divisors, bias, SCALE: tl.constexpr, SCALES_LAST: tl.constexpr):
    """Apply to whole sums, (rows, columns), what belongs to outputs, such as scales."""
    if SCALES_LAST:
        total *= _load_scales(scales, column, is_column, SCALE)[None, :]
    if divisors is not None:
        total = tl.div_rn(total, tl.zeros_like(total) + tl.load(divisors + column, is_column, 1.0)[None, :])
    if bias is not None:
        total += tl.load(bias + column, is_column, 0.0).to(tl.float32)[None, :]
    return total
