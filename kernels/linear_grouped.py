"""Low-bit weights with a scale per group of inputs, multiplied in floating point.

The definition converts such a weight to the dtype of the model once, which is exact up to rounding and takes as much
memory as a weight of that dtype. `kernels.cpu.linear_grouped` and `kernels.triton.linear_grouped` keep it packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from serve_llm.kernels import linear
from serve_llm.kernels.linear import Linear

FLOAT8_NAN = 0x7F  # float8_e4m3fn without its sign
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # 4-bit floats by their lower three bits; the fourth is the sign
ROWWISE = ("codes", "scales", "zeros", "minimums", "divisors")  # tensors of a weight with one row for each output


@dataclass(frozen=True)
class GroupQuantWeight:
    """A matrix (outputs, inputs) of codes, of which `group_size` neighbouring inputs share a scale.

    weight[n, k] = (value[n, k] - zeros[n, g]) * scales[n, g] / divisors[n] - minimums[n, g], where
    g = (k + offset) // group_size. value is codes[n, k] - 2 ** (bits - 1); with a table, table[codes[n, k]]; of 8-bit
    floats, the number whose bits are codes[n, k].
    """

    codes: Tensor  # (outputs, inputs) uint8, below 2 ** bits
    bits: int  # 4 or 8
    scales: Tensor  # (outputs, groups) float32, or of 8 bits: float8_e8m0fnu or float8_e4m3fn
    group_size: int
    zeros: Tensor | None = None  # (outputs, groups) float32; None: all zero
    minimums: Tensor | None = None  # the same
    divisors: Tensor | None = None  # (outputs,) float32; None: all one. Not together with minimums
    table: Tensor | None = None  # (16,) float32, with 4 bits
    is_float8: bool = False  # codes are float8_e4m3fn, with 8 bits
    offset: int = 0  # inputs of the first group that precede this part of a matrix
    order: Tensor | None = None  # (inputs,) int64: column k multiplies number order[k] of the input; None: number k
    # The checkpoint's authors rounded inputs to 8-bit floats: see `kernels.linear_fp8_stored`.
    rounds_inputs: bool = False
    input_scale: Tensor | None = None  # () float32, for all inputs; None: chosen by the inputs

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def map_rows(self, select: Callable[[Tensor], Tensor]) -> GroupQuantWeight:
        """Return the weight with rows that `select` picks from the tensors that have one row per output."""
        rowwise = {name: getattr(self, name) for name in ROWWISE}
        picked: dict[str, Any] = {name: None if one is None else select(one) for name, one in rowwise.items()}
        return replace(self, **picked)

    def to(self, device: torch.device) -> GroupQuantWeight:
        tensors = {one.name: getattr(self, one.name) for one in fields(self)}
        moved: dict[str, Any] = {name: one.to(device) for name, one in tensors.items() if isinstance(one, Tensor)}
        return replace(self, **moved)

    def narrow_columns(self, start: int, count: int) -> GroupQuantWeight:
        """Return the weight with `count` columns from `start` on. It must have neither an offset nor an order."""
        groups = slice(start // self.group_size, -(-(start + count) // self.group_size))
        scales, zeros, minimums = (
            None if one is None else one[:, groups] for one in (self.scales, self.zeros, self.minimums)
        )
        assert scales is not None
        codes = self.codes[:, start : start + count]
        offset = start % self.group_size
        return replace(self, codes=codes, scales=scales, zeros=zeros, minimums=minimums, offset=offset)

    def is_like(self, other: GroupQuantWeight) -> bool:
        """Return whether the rows of both can be concatenated to one weight."""
        for one in fields(self):
            if one.name == "input_scale":
                continue
            mine = getattr(self, one.name)
            theirs = getattr(other, one.name)
            if one.name in ROWWISE:
                same = (mine is None) == (theirs is None) and (mine is None or mine.dtype == theirs.dtype)
            elif isinstance(mine, Tensor) and isinstance(theirs, Tensor):
                same = torch.equal(mine, theirs)
            else:
                same = mine is None and theirs is None if isinstance(mine, Tensor | None) else mine == theirs
            if not same:
                return False
        return True

    def dequantise(self) -> Tensor:
        """Return the weight in the order of the inputs: (outputs, inputs) float32."""
        inputs = self.codes.shape[1]
        groups = (torch.arange(inputs, device=self.codes.device) + self.offset) // self.group_size
        weight = self.find_values(self.codes)
        if self.zeros is not None:
            weight -= self.zeros[:, groups]
        scales = self.scales.float()
        if self.divisors is not None:
            scales = scales / self.divisors.unsqueeze(1)
        weight *= scales[:, groups]
        if self.minimums is not None:
            weight -= self.minimums[:, groups]
        if self.order is None:
            return weight
        result = torch.empty_like(weight)
        result[:, self.order] = weight
        return result

    def find_values(self, codes: Tensor) -> Tensor:
        """Return the values of codes of this weight: float32, of the same shape."""
        if self.is_float8:
            return codes.contiguous().view(torch.float8_e4m3fn).float()
        return codes.float() - 2 ** (self.bits - 1) if self.table is None else self.table[codes.int()]


def build_e2m1_table(device: torch.device) -> Tensor:
    """The 4-bit floats (one sign bit, two exponent bits, one mantissa bit) of all codes: (16,) float32."""
    return torch.tensor([*E2M1, *(-magnitude for magnitude in E2M1)], device=device)


def spread_nan(weight: GroupQuantWeight) -> Tensor:
    """The scales of a weight for kernels that treat every code as a number: NaN for groups that contain a NaN code."""
    if not weight.is_float8:
        return weight.scales
    is_nan = (weight.codes & FLOAT8_NAN) == FLOAT8_NAN
    if not is_nan.any():
        return weight.scales
    scales = weight.scales.to(torch.float32, copy=True)  # those of one tensor may be one number, expanded
    rows, columns = is_nan.nonzero(as_tuple=True)
    scales[rows, (columns + weight.offset) // weight.group_size] = torch.nan
    return scales


def find_scale_dtype(tensors: Sequence[Tensor | None]) -> torch.dtype:
    """The narrowest dtype that holds scales, zero points and minimums exactly; 8 bits only if they are stored in 8
    bits."""
    present = [one for one in tensors if one is not None]
    first = present[0]
    if len(present) == 1 and first.dtype == torch.float8_e8m0fnu:
        return first.dtype
    if len(present) == 1 and first.dtype == torch.float8_e4m3fn and not first.float().isnan().any():
        return first.dtype  # the kernels do not support NaN of this type
    for dtype in (torch.float16, torch.bfloat16):
        if all(_fits(one.float(), dtype) for one in present):
            return dtype
    return torch.float32


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the dtype holds the values exactly."""
    if values.numel() == 0:
        return True
    low, high = values.aminmax()  # NaN if there is one
    is_finite = bool(low.isfinite() & high.isfinite())  # two numbers suffice: all take as long as rounding
    return is_finite and torch.equal(values.to(dtype).float(), values)


def merge_rows(weights: Sequence[GroupQuantWeight]) -> GroupQuantWeight:
    """Concatenate the rows of the weights, which must be alike. The largest of their scales of inputs fits all."""
    first = weights[0]
    if len(weights) == 1:
        return first

    def merge(parts: Sequence[Tensor | None]) -> Tensor | None:
        tensors = [part for part in parts if part is not None]
        return torch.cat(tensors) if tensors else None

    merged = {name: merge([getattr(one, name) for one in weights]) for name in ROWWISE}
    input_scales = [one.input_scale for one in weights if one.input_scale is not None]
    input_scale = torch.stack(input_scales).amax() if len(input_scales) == len(weights) else None
    return replace(first, **merged, input_scale=input_scale)  # type: ignore[arg-type]


def pack_grouped(
    weight: GroupQuantWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    pack: Callable[[Tensor, Tensor | None], Linear] = linear.pack,
) -> Linear:
    """Build the layer x @ weight.T + bias; x and the result have `dtype`. There may be no outputs or no inputs."""
    return pack(weight.dequantise().to(dtype), bias)
