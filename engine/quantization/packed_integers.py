"""Matrices of weights as codes of a few bits, and unpacking integers of 2, 3, 4 or 8 bits from int32 words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.kernels.linear_grouped import GroupQuantWeight

WORD_BITS = 32
CHUNK = 1024  # outputs dequantised at a time, to keep temporary memory small
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which 4 bits of a word, lowest first, hold its columns 0, 1, 2, ...


@dataclass(frozen=True)
class QuantizedMatrix:
    """weight[n, k] = value[n, k] * scales[n, groups[k]] / divisors[n]. value is codes[n, k] - zeros[n, groups[k]] with
    zero points, table[codes[n, k]] with a table, and else the float8_e4m3fn number of these bits."""

    codes: Tensor  # (outputs, inputs) uint8
    bits: int
    scales: Tensor  # (outputs, number of groups), as in `GroupQuantWeight`
    groups: Tensor  # (inputs,) int64, 0 for the first group of which the matrix has a part
    group_size: int  # inputs of a whole group
    zeros: Tensor | None = None  # shape as scales, float32
    divisors: Tensor | None = None  # (outputs,) float32
    table: Tensor | None = None  # (16,) float32
    rounds_inputs: bool = False  # as in `GroupQuantWeight`, and the next one
    input_scale: Tensor | None = None

    def dequantise(self) -> Tensor:
        """(outputs, inputs) float32."""
        weight = torch.empty(self.codes.shape, device=self.codes.device)
        for start in range(0, len(weight), CHUNK):
            rows = slice(start, start + CHUNK)
            weight[rows] = self._dequantise_rows(rows)
        return weight

    def _dequantise_rows(self, rows: slice) -> Tensor:
        codes = self.codes[rows]
        scales = self.scales[rows].float()
        if self.zeros is not None:
            weight = codes.float()
            weight -= self.zeros[rows][:, self.groups]
        elif self.table is not None:
            weight = self.table[codes.int()]
        else:
            weight = codes.contiguous().view(torch.float8_e4m3fn).float()
        if self.divisors is not None:
            scales = scales / self.divisors[rows].unsqueeze(1)
        weight *= scales[:, self.groups]
        return weight


def build_grouped_weight(matrix: QuantizedMatrix, first: int) -> GroupQuantWeight | None:
    """Return the form in which the matrix is multiplied; None if its groups cannot be brought into order.

    first: the number of the matrix's first input in the module.
    """
    inputs = matrix.codes.shape[1]
    group_size = matrix.group_size
    positions = torch.arange(inputs)
    groups = matrix.groups.cpu()
    offset = first % group_size
    codes = matrix.codes
    order = None
    if not torch.equal((positions + offset) // group_size, groups):
        order = groups.argsort(stable=True)
        offset = 0
        if not torch.equal(positions // group_size, groups[order]):
            return None
        codes = codes[:, order]
    if matrix.zeros is None:
        return GroupQuantWeight(
            codes,
            matrix.bits,
            matrix.scales,
            group_size,
            divisors=matrix.divisors,
            table=matrix.table,
            is_float8=matrix.table is None,
            offset=offset,
            order=order,
            rounds_inputs=matrix.rounds_inputs,
            input_scale=matrix.input_scale,
        )
    bits = 8 if matrix.bits == 8 else 4
    middle = 2 ** (bits - 1)
    zeros = matrix.zeros - middle
    if zeros.numel() and (zeros == zeros[0, 0]).all():
        shift = int(-zeros[0, 0])
        if 0 <= shift < 2**bits - 2**matrix.bits + 1:  # codes without zero points can represent the same numbers
            codes = codes + shift
            return GroupQuantWeight(codes, bits, matrix.scales, group_size, offset=offset, order=order)
    return GroupQuantWeight(codes, bits, matrix.scales, group_size, zeros=zeros, offset=offset, order=order)


def count_words(values: int, bits: int) -> int:
    """The number of 32-bit words that hold `values` numbers; numbers of 3 bits fill three words at a time."""
    words = 3 if bits == 3 else 1
    return -(-values // (words * WORD_BITS // bits)) * words


def find_words(values: range, bits: int) -> tuple[range, int]:
    """Return the words that hold a range of values, and how many values they hold before these."""
    words = 3 if bits == 3 else 1
    per_unit = words * WORD_BITS // bits
    first = values.start // per_unit
    last = -(-values.stop // per_unit)
    return range(first * words, last * words), values.start - first * per_unit


def unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """words: (rows, words) int32 -> (rows, values) uint8: a stream of bits, the lowest of each word first.

    order: which value of a word comes first, second, ... in the result; None: as they are.
    """
    rows, count = words.shape
    if bits == 3:
        return _unpack_3_bits(words)
    per_word = WORD_BITS // bits
    values = torch.empty((rows, count, per_word), dtype=torch.uint8, device=words.device)
    mask = 2**bits - 1
    for position, index in enumerate(order or range(per_word)):
        values[:, :, position] = (words >> (index * bits)) & mask
    return values.view(rows, count * per_word)


def _unpack_3_bits(words: Tensor) -> Tensor:
    """32 values take three words; two of the values cross from one word to the next."""
    rows, count = words.shape
    triples = (words.long() & 0xFFFFFFFF).view(rows, count // 3, 3)
    values = torch.empty((rows, count // 3, WORD_BITS), dtype=torch.uint8, device=words.device)
    for position in range(WORD_BITS):
        word, shift = divmod(3 * position, WORD_BITS)
        stream = triples[:, :, word]
        if shift + 3 > WORD_BITS:
            stream = stream | triples[:, :, word + 1] << WORD_BITS
        values[:, :, position] = (stream >> shift) & 7
    return values.view(rows, count // 3 * WORD_BITS)
