"""Linear layers with weights packed for the compiled kernels (linear.cpp). `kernels.linear.pack` and
`kernels.linear_int8.pack_int8` state the contracts.

One packed copy serves any number of rows: few rows are bound by reading the weight once, many by arithmetic. A row's
bits do not depend on the other rows, so rows are never padded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.cpu.library import Library, check_sources
from serve_llm.kernels.embedding_table import EmbeddingTable
from serve_llm.kernels.huge_pages import use_huge_pages
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_int8 import ZERO_POINT, Quantise, quantise_rows

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # `Kind` in linear.h
UNIT = 4  # bytes
CODES = 16  # upper bytes that a panel's codes stand for, with the sign: see compressed.h
QUAD_INPUTS = 8  # inputs that are compressed together, into three words of 32 bits
OUTPUT_QUAD_WORDS = 3  # words of 32 bits that one output's quad takes
RARE_PART = 256  # one weight of so many may have no code
MAX_INPUTS = 1 << 19  # that a compressed weight can have: bytes of a panel are numbered by 24 bits


class Product(ctypes.Structure):
    """`Product` in linear.h."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("rows", ctypes.c_int),
        ("weight", ctypes.c_void_p),
        ("upper_bytes", ctypes.c_void_p),
        ("rare_starts", ctypes.c_void_p),
        ("rare", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("weight_scale", ctypes.c_void_p),
        ("start", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_row", ctypes.c_int64),
        ("y_bf16", ctypes.c_bool),
        ("units", ctypes.c_int),
        ("outputs", ctypes.c_int),
    )


class CompressedWeight(NamedTuple):
    """A weight in bfloat16 with 12 bits a number, without loss: see compressed.h."""

    packed: Tensor  # (panels * quads * 3 * columns,) int32
    upper_bytes: Tensor  # (panels, 16) uint8; an even number of panels
    rare_starts: Tensor  # (panels + 1,) int32
    rare: Tensor  # (rare_room(outputs, inputs),) int32


class Packer:
    """Packs weights for one variant of the library."""

    def __init__(self, library: Library) -> None:
        """Raises OSError if the library was compiled from other sources."""
        self.compiled = library.compiled
        self.variant_index = library.variant_index
        check_sources(self.compiled, "product", ctypes.sizeof(Product))
        self.columns: int = self.compiled.serve_llm_panel_columns(self.variant_index)  # outputs of a panel
        self.compresses = bool(self.compiled.serve_llm_compresses(self.variant_index))  # weights in bfloat16
        self.multiply = library.shared_function("linear", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        batch = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int,) * 3)
        self.multiply_batch = library.shared_function("linear_batch", *batch)
        rows = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._pack = library.shared_function("pack", *rows, ctypes.c_void_p, ctypes.c_int)
        self._choose_codes = library.shared_function("choose_codes", *rows, *(ctypes.c_void_p,) * 2, ctypes.c_int)
        self._pack_compressed = library.shared_function("pack_compressed", *rows, *(ctypes.c_void_p,) * 4, ctypes.c_int)
        table = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)
        self.look_up = library.shared_function("look_up_int8", *table, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        arguments = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
        self._sum_int8 = library.function("sum_int8", *arguments)

    def pack(self, weight: Tensor, bias: Tensor | None = None, merged: Sequence[Tensor] = ()) -> Linear:
        weights = [one for one in (weight, *merged) if one.numel()]
        if not weights:
            return partial(_constant, sum(one.shape[0] for one in (weight, *merged)), bias)
        return CompiledLinear(self, weights, bias)

    def pack_int8(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, quantise: Quantise = quantise_rows
    ) -> Linear:
        if weight.numel() == 0:
            return partial(_constant, weight.shape[0], bias)
        return CompiledInt8Linear(self, weight, scale, bias, quantise)

    def pack_rows(self, rows: Tensor, row_bytes: int) -> Tensor:
        """rows: (outputs,) addresses. Returns (panels * units * columns,) int32."""
        units = -(-row_bytes // UNIT)
        packed = _empty_words(-(-len(rows) // self.columns) * self.columns * units)
        self._pack(
            self.variant_index, rows.data_ptr(), row_bytes, len(rows), packed.data_ptr(), torch.get_num_threads()
        )
        return packed

    def compress(self, rows: Tensor, inputs: int) -> CompressedWeight | None:
        """rows: (outputs,) addresses of bfloat16 numbers.

        Returns None if this variant does not compress, or if too many numbers have no code."""
        if not self.compresses or inputs > MAX_INPUTS:
            return None
        panels = -(-len(rows) // (2 * self.columns)) * 2
        threads = torch.get_num_threads()
        upper_bytes = torch.zeros(panels, CODES, dtype=torch.uint8)
        counts = torch.zeros(panels, dtype=torch.int32)
        arguments = (self.variant_index, rows.data_ptr(), 2 * inputs, len(rows), upper_bytes.data_ptr())
        self._choose_codes(*arguments, counts.data_ptr(), threads)
        room = rare_room(len(rows), inputs)
        if int(counts.sum()) > room:  # added up in 64 bits
            return None
        starts = functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        quads = -(-inputs // QUAD_INPUTS)
        packed = _empty_words(panels * quads * OUTPUT_QUAD_WORDS * self.columns)
        rare = torch.empty(room, dtype=torch.int32)
        tensors = (starts, rare, packed)
        self._pack_compressed(*arguments, *(tensor.data_ptr() for tensor in tensors), threads)
        return CompressedWeight(packed, upper_bytes, starts, rare)

    def sum_rows(self, weight: Tensor) -> Tensor:
        """weight: (outputs, inputs) int8, with any row stride -> (outputs,) int32. torch takes longer than rounding."""
        sums = torch.empty(len(weight), dtype=torch.int32)
        outputs, inputs = weight.shape
        self._sum_int8(weight.data_ptr(), weight.stride(0), outputs, inputs, sums.data_ptr(), torch.get_num_threads())
        return sums

    def pack_int8_table(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype, quantise: Quantise
    ) -> EmbeddingTable:
        """See `kernels.embedding_table.pack_int8_table`. There must be rows."""
        packed = CompiledInt8Linear(self, weight, scale, bias, quantise)
        return EmbeddingTable(packed, partial(packed.look_up, dtype))


class CompiledLinear:
    def __init__(self, packer: Packer, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """weights: (outputs, inputs) each, of one dtype, with any row stride; their outputs are concatenated."""
        weights = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in weights]
        rows = torch.cat([weight.data_ptr() + torch.arange(len(weight)) * _row_bytes(weight) for weight in weights])
        outputs = len(rows)
        inputs = weights[0].shape[1]
        dtype = weights[0].dtype
        self.multiply_batch: Callable[..., None] = packer.multiply_batch
        self._multiply = packer.multiply
        self.variant_index = packer.variant_index
        self._outputs = outputs
        self._columns = packer.columns
        row_bytes = inputs * dtype.itemsize
        units = -(-row_bytes // UNIT)
        self._missing = units * UNIT // dtype.itemsize - inputs  # padding up to whole units
        compressed = packer.compress(rows, inputs) if dtype == torch.bfloat16 else None
        if compressed is None:
            self._tensors = [packer.pack_rows(rows, row_bytes)]
        else:
            self._tensors = list(compressed)
        self.product = Product(
            kind=KINDS[dtype],
            weight=self._tensors[0].data_ptr(),
            bias=None if bias is None else self._by_panel(bias.float()),
            y_row=outputs,
            units=units,
            outputs=outputs,
        )
        if compressed is not None:
            self.product.upper_bytes = compressed.upper_bytes.data_ptr()
            self.product.rare_starts = compressed.rare_starts.data_ptr()
            self.product.rare = compressed.rare.data_ptr()
        self._reference = ctypes.byref(self.product)

    def _by_panel(self, values: Tensor) -> int:
        """Address of one value per output, padded with zeros to a whole panel."""
        self._tensors.append(functional.pad(values, (0, -len(values) % self._columns)))
        return self._tensors[-1].data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty((x.shape[0], self._outputs))
        read = self.describe_rows(self.product, x, y)
        self._multiply(self._reference, self.variant_index, torch.get_num_threads())
        del read
        return y

    def describe_rows(self, product: Product, x: Tensor, y: Tensor) -> list[Tensor]:
        """Describe x, (rows, inputs), and the result y to the kernel, which reads the returned tensors."""
        row_bytes = x.stride(0) * x.element_size()
        if self._missing or x.stride(1) != 1 or row_bytes % UNIT:
            x = functional.pad(x, (0, self._missing)).contiguous()
            row_bytes = x.stride(0) * x.element_size()
        product.x = x.data_ptr()
        product.x_row = row_bytes
        product.rows = x.shape[0]
        product.y = y.data_ptr()
        product.y_bf16 = y.dtype == torch.bfloat16
        return [x]


class CompiledInt8Linear(CompiledLinear):
    def __init__(self, packer: Packer, weight: Tensor, scale: Tensor, bias: Tensor | None, quantise: Quantise) -> None:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        super().__init__(packer, [weight], bias)
        self._quantise = quantise
        self._inputs = weight.shape[1]
        self._look_up = packer.look_up
        self.product.weight_scale = self._by_panel(scale.flatten())
        self.product.start = self._by_panel(packer.sum_rows(weight) * -ZERO_POINT)

    def describe_rows(self, product: Product, x: Tensor, y: Tensor) -> list[Tensor]:
        numbers, scales = self._quantise(x)
        product.x_scale = scales.data_ptr()
        return [scales, *super().describe_rows(product, numbers, y)]

    def look_up(self, dtype: torch.dtype, ids: Tensor) -> Tensor:
        """Return rows of the weight: (rows, inputs) of `dtype`."""
        ids = ids.contiguous()
        rows = torch.empty((len(ids), self._inputs), dtype=dtype)
        self._look_up(
            self._reference,
            self._columns,
            self._inputs,
            ids.data_ptr(),
            len(ids),
            rows.data_ptr(),
            dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        return rows


def rare_room(outputs: int, inputs: int) -> int:
    """Return the room for weights without a code. It depends on the shape alone, so that experts are alike."""
    return max(64, outputs * inputs // RARE_PART)


def _empty_words(count: int) -> Tensor:
    words = torch.empty(count, dtype=torch.int32)
    use_huge_pages(words)
    return words


def _row_bytes(weight: Tensor) -> int:
    """Return the stride between rows."""
    return weight.stride(0) * weight.element_size()


def _constant(outputs: int, bias: Tensor | None, x: Tensor) -> Tensor:
    """Return the result of a layer without inputs or without outputs."""
    y = x.new_zeros(x.shape[0], outputs)
    return y if bias is None else y.add_(bias)
