"""Linear layers with weights of 4 or 8 bits by the compiled kernels (grouped_linear.cpp). The contract is that of
`kernels.linear_grouped.pack_grouped`.

Weights stay packed in memory: 4 or 8 bits a number, and a scale per group. Scales of 8 bits stay as they are; others
are float16 or bfloat16 where that is exact, else float32.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.cpu.library import Library, check_sources
from serve_llm.kernels.embedding_table import EmbeddingTable
from serve_llm.kernels.huge_pages import use_huge_pages
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_grouped import GroupQuantWeight, find_scale_dtype, spread_nan

FOUR_BITS, TABLE, EIGHT_BITS, FLOAT8 = range(4)  # `Coding` in grouped.h
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e8m0fnu, torch.float8_e4m3fn)  # `ScaleType`
WORD_BITS = 32


class GroupedProduct(ctypes.Structure):
    """`GroupedProduct` in grouped.h."""

    _fields_ = (
        ("coding", ctypes.c_int),
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("x_bf16", ctypes.c_bool),
        ("rows", ctypes.c_int),
        ("inputs", ctypes.c_int),
        ("outputs", ctypes.c_int),
        ("weight", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("minimum", ctypes.c_void_p),
        ("scale_type", ctypes.c_int),
        ("divisor", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_row", ctypes.c_int64),
        ("y_bf16", ctypes.c_bool),
        ("units", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("first_units", ctypes.c_int),
        ("group_units", ctypes.c_int),
    )


class GroupQuantPacker:
    """Packs weights for one variant of the library."""

    def __init__(self, library: Library) -> None:
        """Raises OSError if the library was compiled from other sources."""
        self.compiled = library.compiled
        self.variant_index = library.variant_index
        check_sources(self.compiled, "groupedproduct", ctypes.sizeof(GroupedProduct))
        self.multiply = library.shared_function("grouped_linear", ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        batch = (*(ctypes.c_void_p,) * 3, *(ctypes.c_int,) * 3)
        self.multiply_batch = library.shared_function("grouped_linear_batch", *batch)
        numbers = (ctypes.c_void_p, ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_int64)
        self.look_up = library.shared_function("look_up_grouped", *numbers, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        self.columns: int = self.compiled.serve_llm_grouped_columns(self.variant_index)
        self._pack_codes = self.compiled.serve_llm_pack_codes
        self._pack_codes.argtypes = (
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_int64,
            *(ctypes.c_int,) * 3,
            ctypes.c_void_p,
            ctypes.c_int,
        )
        self._pack_codes.restype = None

    def packs(self, weight: GroupQuantWeight) -> bool:
        """Return whether the weight can be packed: not if groups begin in the middle of words."""
        per_word = WORD_BITS // weight.bits
        num_groups = weight.scales.shape[1]
        is_aligned = num_groups == 1 or (weight.group_size % per_word == 0 and weight.offset % per_word == 0)
        return weight.codes.numel() > 0 and is_aligned

    def pack(self, weight: GroupQuantWeight, bias: Tensor | None) -> Linear:
        """Build the layer, for a weight that `packs` accepts. x may be bfloat16 or float32."""
        return CompiledGroupedLinear(self, weight, bias)

    def pack_codes(self, weight: GroupQuantWeight, units: int) -> Tensor:
        """(panels, units, columns) int32; the first code of a unit in its lowest bits."""
        outputs, inputs = weight.shape
        codes = weight.codes if weight.codes.stride(1) == 1 else weight.codes.contiguous()
        words = torch.empty((-(-outputs // self.columns), units, self.columns), dtype=torch.int32)
        use_huge_pages(words)
        self._pack_codes(
            weight.bits,
            codes.data_ptr(),
            codes.stride(0),
            outputs,
            inputs,
            self.columns,
            words.data_ptr(),
            torch.get_num_threads(),
        )
        return words

    def pack_table(self, weight: GroupQuantWeight, bias: Tensor | None, dtype: torch.dtype) -> EmbeddingTable:
        """See `kernels.embedding_table.pack_grouped_table`, for a weight that `packs` accepts."""
        packed = CompiledGroupedLinear(self, weight, bias)
        values = array("f", weight.find_values(torch.arange(2**weight.bits, dtype=torch.uint8)).tolist())
        return EmbeddingTable(packed, partial(packed.look_up, values, dtype))


class CompiledGroupedLinear:
    def __init__(self, packer: GroupQuantPacker, weight: GroupQuantWeight, bias: Tensor | None) -> None:
        outputs, inputs = weight.shape
        self.multiply_batch: Callable[..., None] = packer.multiply_batch
        self._multiply = packer.multiply
        self._look_up = packer.look_up
        self.variant_index = packer.variant_index
        self._outputs = outputs
        self._order = weight.order
        columns = packer.columns
        per_word = WORD_BITS // weight.bits
        is_one_group = weight.scales.shape[1] == 1
        units = -(-inputs // per_word)
        group_units = units if is_one_group else weight.group_size // per_word
        first_units = units if is_one_group else group_units - weight.offset // per_word
        words = packer.pack_codes(weight, units)
        numbers = (spread_nan(weight), weight.zeros, weight.minimums)
        dtype = find_scale_dtype(numbers)
        scales = [None if one is None else _by_panel(one.to(dtype), columns) for one in numbers]
        table = None if weight.table is None else weight.table.float().contiguous()
        divisors, floats = (
            None if one is None else functional.pad(one.float(), (0, -outputs % columns), value=1.0)
            for one in (weight.divisors, bias)
        )
        self._tensors = (words, *scales, table, divisors, floats)
        scale, zero, minimum = scales
        self.product = GroupedProduct(
            coding=_find_coding(weight),
            inputs=inputs,
            outputs=outputs,
            weight=words.data_ptr(),
            table=_address(table),
            scale=_address(scale),
            zero=_address(zero),
            minimum=_address(minimum),
            scale_type=SCALE_DTYPES.index(dtype),
            divisor=_address(divisors),
            bias=_address(floats),
            y_row=outputs,
            units=units,
            groups=weight.scales.shape[1],
            first_units=first_units,
            group_units=group_units,
        )
        self._reference = ctypes.byref(self.product)
        self._columns = columns
        self._inputs = inputs

    def look_up(self, values: array[float], dtype: torch.dtype, ids: Tensor) -> Tensor:
        """Return rows of the weight: (rows, inputs) of `dtype`. values: float32, of all codes."""
        ids = ids.contiguous()
        rows = torch.empty((len(ids), self._inputs), dtype=dtype)
        self._look_up(
            self._reference,
            self._columns,
            values.buffer_info()[0],
            ids.data_ptr(),
            len(ids),
            rows.data_ptr(),
            dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        if self._order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self._order, rows)

    def __call__(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x[:, self._order]
        y = x.new_empty((x.shape[0], self._outputs))
        read = self.describe_rows(self.product, x, y)
        self._multiply(self._reference, self.variant_index, torch.get_num_threads())
        del read
        return y

    @property
    def reorders_inputs(self) -> bool:
        return self._order is not None

    def describe_rows(self, product: GroupedProduct, x: Tensor, y: Tensor) -> Tensor:
        """Describe x, (rows, inputs), and the result y to the kernel, which reads the returned tensor."""
        if x.stride(1) != 1:
            x = x.contiguous()
        product.x = x.data_ptr()
        product.x_row = x.stride(0) * x.element_size()
        product.rows = x.shape[0]
        product.x_bf16 = product.y_bf16 = x.dtype == torch.bfloat16
        product.y = y.data_ptr()
        return x


def _find_coding(weight: GroupQuantWeight) -> int:
    if weight.bits == 8:
        return FLOAT8 if weight.is_float8 else EIGHT_BITS
    return FOUR_BITS if weight.table is None else TABLE


def _by_panel(values: Tensor, columns: int) -> Tensor:
    """(outputs, groups) -> (panels, groups, columns), zero bytes up to a whole panel."""
    missing = values.new_empty((-len(values) % columns, values.shape[1]))
    missing.view(torch.uint8).zero_()
    return torch.cat((values, missing)).view(-1, columns, values.shape[1]).transpose(1, 2).contiguous()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
