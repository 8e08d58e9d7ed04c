"""Unpack the blocks of GGUF's quantised types into codes, scales and minimums.

A block holds neighbouring numbers of a row. The layouts are those of ggml (ggml-common.h). In the "K" types a block of
256 numbers has scales for its parts, which are small integers times a float16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serve_llm.engine.quantization.gguf_grids import read_grid
from serve_llm.kernels.linear_grouped import GroupQuantWeight, build_e2m1_table

LOWER = 8  # added to the code of a number that is negative or, in IQ1, in the lower half
IQ2_MAGNITUDES = (8, 25, 43)
IQ3_XXS_MAGNITUDES = (4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_MAGNITUDES = (1, 3, 5, 7, 9, 11, 13, 15)
IQ1_DELTA = 0.125  # numbers are -1, 0 or 1, plus or minus this
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def unpack_blocks(blocks: Tensor, kind: str) -> GroupQuantWeight:
    """blocks: (rows, blocks, bytes) uint8. kind: such as "Q4_K"."""
    return _UNPACK[kind](blocks)


def _group(
    codes: Tensor, bits: int, scales: Tensor, minimums: Tensor | None = None, table: Tensor | None = None
) -> GroupQuantWeight:
    """codes: (rows, blocks, numbers of a block). scales, minimums: (rows, blocks, groups of a block)."""
    codes = codes.to(torch.uint8)
    return GroupQuantWeight(
        codes.flatten(1),
        bits,
        scales.flatten(1),
        codes.shape[2] // scales.shape[2],
        minimums=None if minimums is None else minimums.flatten(1),
        table=table,
    )


def _half(two_bytes: Tensor) -> Tensor:
    """(..., 2) uint8 -> (..., 1) float32."""
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, size: int) -> Tensor:
    """Unpack `size` numbers from the lower halves of each `size` bytes, then as many from the upper halves."""
    runs = packed.reshape(*packed.shape[:-1], -1, size)
    return torch.stack((runs & 0xF, runs >> 4), -2).flatten(-3)


def _bits(packed: Tensor, size: int, count: int, width: int) -> Tensor:
    """Unpack `count` times `size` numbers of `width` bits from each `size` bytes, the first in the lowest bits."""
    runs = packed.reshape(*packed.shape[:-1], -1, size)
    mask = 2**width - 1
    return torch.stack([(runs >> (width * index)) & mask for index in range(count)], -2).flatten(-3)


def _fifth_bits(packed: Tensor) -> Tensor:
    """(..., 4) uint8 -> (..., 32): bit i is the fifth bit of number i; the results are 16 times it."""
    return torch.stack([(packed >> bit) & 1 for bit in range(8)], -1).flatten(-2) << 4


def _split(blocks: Tensor, *sizes: int) -> list[Tensor]:
    return list(torch.split(blocks, list(sizes), -1))


def _unpack_q4_0(blocks: Tensor) -> GroupQuantWeight:
    scale, numbers = _split(blocks, 2, 16)
    return _group(_nibbles(numbers, 16), 4, _half(scale))


def _unpack_q4_1(blocks: Tensor) -> GroupQuantWeight:
    scale, lowest, numbers = _split(blocks, 2, 2, 16)
    scales = _half(scale)
    return _group(_nibbles(numbers, 16), 4, scales, -_half(lowest) - 8 * scales)


def _unpack_q5_0(blocks: Tensor) -> GroupQuantWeight:
    scale, fifth, numbers = _split(blocks, 2, 4, 16)
    return _group((_nibbles(numbers, 16) | _fifth_bits(fifth)) + (128 - 16), 8, _half(scale))


def _unpack_q5_1(blocks: Tensor) -> GroupQuantWeight:
    scale, lowest, fifth, numbers = _split(blocks, 2, 2, 4, 16)
    return _group((_nibbles(numbers, 16) | _fifth_bits(fifth)) + 128, 8, _half(scale), -_half(lowest))


def _unpack_q8_0(blocks: Tensor) -> GroupQuantWeight:
    scale, numbers = _split(blocks, 2, 32)
    return _group(numbers ^ 128, 8, _half(scale))


def _unpack_q2_k(blocks: Tensor) -> GroupQuantWeight:
    factors, numbers, scale, lowest = _split(blocks, 16, 64, 2, 2)
    scales = _half(scale) * (factors & 0xF)
    return _group(_bits(numbers, 32, 4, 2) + 8, 4, scales, _half(lowest) * (factors >> 4))


def _unpack_q3_k(blocks: Tensor) -> GroupQuantWeight:
    third, numbers, factors, scale = _split(blocks, 32, 64, 12, 2)
    lower = _nibbles(factors[..., :8], 8)
    upper = _bits(factors[..., 8:], 4, 4, 2)
    scales = _half(scale) * ((lower | upper << 4).float() - 32)
    codes = _bits(numbers, 32, 4, 2) | _bits(third, 32, 8, 1) << 2  # the number plus 4
    return _group(codes + 4, 4, scales)


def _six_bit_factors(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 12) uint8 -> the factors of eight scales and of eight minimums."""
    first, second, rest = _split(packed, 4, 4, 4)
    scales = torch.cat((first & 0x3F, rest & 0xF | first >> 2 & 0x30), -1)
    minimums = torch.cat((second & 0x3F, rest >> 4 | second >> 2 & 0x30), -1)
    return scales, minimums


def _unpack_q4_k(blocks: Tensor) -> GroupQuantWeight:
    scale, lowest, factors, numbers = _split(blocks, 2, 2, 12, 128)
    of_scales, of_minimums = _six_bit_factors(factors)
    scales = _half(scale) * of_scales
    return _group(_nibbles(numbers, 32), 4, scales, _half(lowest) * of_minimums - 8 * scales)


def _unpack_q5_k(blocks: Tensor) -> GroupQuantWeight:
    scale, lowest, factors, fifth, numbers = _split(blocks, 2, 2, 12, 32, 128)
    of_scales, of_minimums = _six_bit_factors(factors)
    codes = _nibbles(numbers, 32) | _bits(fifth, 32, 8, 1) << 4
    return _group(codes + 128, 8, _half(scale) * of_scales, _half(lowest) * of_minimums)


def _unpack_q6_k(blocks: Tensor) -> GroupQuantWeight:
    lower, upper, factors, scale = _split(blocks, 128, 64, 16, 2)
    codes = _nibbles(lower, 64) | _bits(upper, 32, 4, 2) << 4
    return _group(codes + (128 - 32), 8, _half(scale) * factors.view(torch.int8))


def _unpack_iq4_nl(blocks: Tensor) -> GroupQuantWeight:
    scale, numbers = _split(blocks, 2, 16)
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=blocks.device)
    return _group(_nibbles(numbers, 16), 4, _half(scale), table=table)


def _unpack_iq4_xs(blocks: Tensor) -> GroupQuantWeight:
    scale, high, low, numbers = _split(blocks, 2, 2, 4, 128)
    lower = torch.stack((low & 0xF, low >> 4), -1).flatten(-2)
    upper = torch.stack([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(-2)
    scales = _half(scale) * ((lower | upper << 4).float() - 32)
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=blocks.device)
    return _group(_nibbles(numbers, 16), 4, scales, table=table)


def _unpack_mxfp4(blocks: Tensor) -> GroupQuantWeight:
    scale, numbers = _split(blocks, 1, 16)
    exponents = scale.contiguous().view(torch.float8_e8m0fnu)  # ggml halves the scale and doubles the table
    return _group(_nibbles(numbers, 16), 4, exponents, table=build_e2m1_table(blocks.device))


def _integers(stored: Tensor, size: int) -> Tensor:
    """Read little-endian integers of `size` bytes: (..., count * size) uint8 -> (..., count) int64."""
    parts = stored.reshape(*stored.shape[:-1], -1, size).long()
    return sum((parts[..., place] << (8 * place) for place in range(size)), torch.zeros_like(parts[..., 0]))


def _spread(numbers: Tensor, width: int, count: int) -> Tensor:
    """Return `count` numbers of `width` bits from each, the first in the lowest bits, with the same dtype: (..., n) ->
    (..., n * count)."""
    shifts = torch.arange(count, device=numbers.device, dtype=numbers.dtype) * width
    return torch.bitwise_and(numbers.unsqueeze(-1) >> shifts, 2**width - 1).flatten(-2)


def _signs(packed: Tensor) -> Tensor:
    """Return the signs of 8 numbers, 1 for negative ones, from 7 bits: the last makes their number even. uint8."""
    bits = _spread(packed.to(torch.uint8), 1, 7).view(*packed.shape, 7)
    return torch.cat((bits, bits.sum(-1, keepdim=True, dtype=torch.uint8) & 1), -1).flatten(-2)


def _points(kind: str, indices: Tensor, lower: Tensor, scales: Tensor, magnitudes: tuple[int, ...]) -> GroupQuantWeight:
    """indices: (rows, blocks, points of the grid). lower: (rows, blocks, 256) uint8, 1 where `LOWER` is added.
    magnitudes: of numbers that have signs; empty for IQ1."""
    codes = read_grid(kind).to(indices.device)[indices].flatten(-2) | lower * LOWER
    table = torch.zeros(2 * LOWER, device=indices.device)
    if magnitudes:
        upper_half = torch.tensor(magnitudes, dtype=torch.float32, device=indices.device)
        lower_half = -upper_half
    else:
        numbers = torch.arange(-1, 2, dtype=torch.float32, device=indices.device)
        upper_half, lower_half = numbers + IQ1_DELTA, numbers - IQ1_DELTA
    table[: len(upper_half)] = upper_half
    table[LOWER : LOWER + len(lower_half)] = lower_half
    return _group(codes, 4, scales, table=table)


def _unpack_iq2_xxs(blocks: Tensor) -> GroupQuantWeight:
    scale, rest = _split(blocks, 2, 64)
    groups = rest.reshape(*rest.shape[:-1], 8, 8)
    words = _integers(groups[..., 4:].flatten(-2), 4)
    scales = _half(scale) * ((words >> 28) + 0.5) * 0.25
    indices = groups[..., :4].flatten(-2).int()
    return _points("IQ2_XXS", indices, _signs(_spread(words, 7, 4)), scales, IQ2_MAGNITUDES)


def _unpack_iq2_xs(blocks: Tensor) -> GroupQuantWeight:
    scale, rest, factors = _split(blocks, 2, 64, 8)
    words = _integers(rest, 2)
    scales = _half(scale) * (_spread(factors, 4, 2) + 0.5) * 0.25
    return _points("IQ2_XS", words & 511, _signs(words >> 9), scales, IQ2_MAGNITUDES)


def _unpack_iq2_s(blocks: Tensor) -> GroupQuantWeight:
    scale, low, signs, high, factors = _split(blocks, 2, 32, 32, 8, 8)
    scales = _half(scale) * (_spread(factors, 4, 2) + 0.5) * 0.25
    indices = low.int() | _spread(high, 2, 4).int() << 8
    return _points("IQ2_S", indices, _spread(signs, 1, 8), scales, IQ2_MAGNITUDES)


def _unpack_iq3_xxs(blocks: Tensor) -> GroupQuantWeight:
    scale, indices, rest = _split(blocks, 2, 64, 32)
    words = _integers(rest, 4)
    scales = _half(scale) * ((words >> 28) + 0.5) * 0.5
    return _points("IQ3_XXS", indices.int(), _signs(_spread(words, 7, 4)), scales, IQ3_XXS_MAGNITUDES)


def _unpack_iq3_s(blocks: Tensor) -> GroupQuantWeight:
    scale, low, high, signs, factors = _split(blocks, 2, 64, 8, 32, 4)
    scales = _half(scale) * (2 * _spread(factors, 4, 2) + 1)
    indices = low.int() | _spread(high, 1, 8).int() << 8
    return _points("IQ3_S", indices, _spread(signs, 1, 8), scales, IQ3_S_MAGNITUDES)


def _unpack_iq1_s(blocks: Tensor) -> GroupQuantWeight:
    scale, low, rest = _split(blocks, 2, 32, 16)
    words = _integers(rest, 2)
    scales = _half(scale) * (2 * (words >> 12 & 7) + 1)
    indices = low.int() | _spread(words, 3, 4).int() << 8
    return _points("IQ1_S", indices, (words >> 15).to(torch.uint8).repeat_interleave(32, -1), scales, ())


def _unpack_iq1_m(blocks: Tensor) -> GroupQuantWeight:
    """The scale of the block is in the highest 4 bits of four words, whose others hold factors."""
    low, rest, factors = _split(blocks, 32, 16, 8)
    words = _integers(factors, 2)
    shifts = torch.arange(0, 16, 4, device=blocks.device)
    bits = (words >> 12 << shifts).sum(-1, keepdim=True)
    scale = bits.to(torch.int32).to(torch.int16).view(torch.float16).float()
    scales = scale * (2 * _spread(words, 3, 4) + 1)
    high = _spread(rest, 4, 2)
    return _points("IQ1_M", low.int() | (high & 7).int() << 8, (high >> 3).repeat_interleave(8, -1), scales, ())


_UNPACK: dict[str, Callable[[Tensor], GroupQuantWeight]] = {
    "Q4_0": _unpack_q4_0,
    "Q4_1": _unpack_q4_1,
    "Q5_0": _unpack_q5_0,
    "Q5_1": _unpack_q5_1,
    "Q8_0": _unpack_q8_0,
    "Q2_K": _unpack_q2_k,
    "Q3_K": _unpack_q3_k,
    "Q4_K": _unpack_q4_k,
    "Q5_K": _unpack_q5_k,
    "Q6_K": _unpack_q6_k,
    "IQ4_NL": _unpack_iq4_nl,
    "IQ4_XS": _unpack_iq4_xs,
    "MXFP4": _unpack_mxfp4,
    "IQ2_XXS": _unpack_iq2_xxs,
    "IQ2_XS": _unpack_iq2_xs,
    "IQ2_S": _unpack_iq2_s,
    "IQ3_XXS": _unpack_iq3_xxs,
    "IQ3_S": _unpack_iq3_s,
    "IQ1_S": _unpack_iq1_s,
    "IQ1_M": _unpack_iq1_m,
}
