"""The compiled kernels of lora.cpp. `kernels.lora.LoRAKernels` states the contract."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.cpu.library import DTYPES, Library
from serve_llm.kernels.huge_pages import use_huge_pages
from serve_llm.kernels.lora import ExpansionWeight

PANEL = 32  # as in lora.cpp
EXPANSION_NUMBERS = 7  # 64-bit numbers in an `Expansion`
LINE_BYTES = 64


class CompiledProduct:
    """An adapter's weights for one layer, and their addresses as lora.cpp reads them (`Product`, `Expansion`)."""

    def __init__(self, down: Tensor, expansions: Sequence[ExpansionWeight]) -> None:
        self._weights = [down, *(_to_panels(expansion.up) for expansion in expansions)]
        self._scales: list[Tensor] = []
        self._numbers = array("q")
        for expansion in expansions:
            columns = expansion.columns
            outputs = expansion.outputs
            self._numbers.extend((0, columns.start, columns.stop - columns.start))
            self._numbers.extend((outputs.start, outputs.stop - outputs.start))
            for scale in (None, None) if expansion.scale is None else (expansion.scale.factor, expansion.scale.offset):
                self._numbers.append(0 if scale is None else self._keep(scale))
        self._product = array("q", (0, down.shape[0], len(expansions), self._numbers.buffer_info()[0]))
        self._set_addresses()
        self.address = self._product.buffer_info()[0]
        self.num_bytes = sum(_fill_line(weight.nbytes) for weight in self._weights)

    def move_into(self, block: Tensor) -> None:
        """Move the weights into a block of `num_bytes` bytes that begins with a cache line."""
        first = 0
        for index, weight in enumerate(self._weights):
            moved = block[first : first + weight.nbytes].view(weight.dtype).view(weight.shape)
            self._weights[index] = moved.copy_(weight)
            first += _fill_line(weight.nbytes)
        self._set_addresses()

    def _set_addresses(self) -> None:
        self._product[0] = self._weights[0].data_ptr()
        for index, up in enumerate(self._weights[1:]):
            self._numbers[index * EXPANSION_NUMBERS] = up.data_ptr()

    def _keep(self, scale: Tensor) -> int:
        scale = scale.to(torch.float32).contiguous()
        self._scales.append(scale)
        return scale.data_ptr()


def _fill_line(num_bytes: int) -> int:
    return -(-num_bytes // LINE_BYTES) * LINE_BYTES


def _to_panels(up: Tensor) -> Tensor:
    """(outputs, columns) -> (panels, columns, PANEL), filled up with zeros."""
    outputs, columns = up.shape
    num_panels = -(-outputs // PANEL)
    filled = up if outputs % PANEL == 0 else functional.pad(up, (0, 0, 0, num_panels * PANEL - outputs))
    return filled.view(num_panels, PANEL, columns).transpose(1, 2).contiguous()


class CompiledGroups:
    """Products of a layer with their rows, as lora.cpp reads them (`Group`)."""

    def __init__(self, groups: Sequence[tuple[CompiledProduct, Tensor | None]]) -> None:
        self._kept = groups
        self._has_all_rows = len(groups) == 1 and groups[0][1] is None
        self._numbers = array("q")
        for product, rows in groups:
            address, count = (0, 0) if rows is None else (rows.data_ptr(), len(rows))
            self._numbers.extend((product.address, address, count))
        self.count = len(groups)
        self._address = self._numbers.buffer_info()[0]

    def find_address(self, num_rows: int) -> int:
        """The address of the groups. num_rows: of this call."""
        if self._has_all_rows:
            self._numbers[2] = num_rows
        return self._address


class CompiledLoRA:
    """Kernels for CPU tensors of the dtypes in library.DTYPES; y, x and an adapter's weights have the same one."""

    def __init__(self, library: Library) -> None:
        matrices = (c_int, c_void_p, c_int64, c_void_p, c_int64, c_int)
        self._add = library.function("add_lora", *matrices, c_void_p, c_int, c_int)

    def pack(self, down: Tensor, expansions: Sequence[ExpansionWeight]) -> CompiledProduct:
        if down.dtype not in DTYPES:
            raise TypeError(f"adapters are float32 or bfloat16, not {down.dtype}")
        return CompiledProduct(down.contiguous(), expansions)

    def join(self, products: Sequence[CompiledProduct]) -> None:
        block = torch.empty(sum(product.num_bytes for product in products) + LINE_BYTES, dtype=torch.uint8)
        use_huge_pages(block)
        first = -block.data_ptr() % LINE_BYTES
        for product in products:
            product.move_into(block[first : first + product.num_bytes])
            first += product.num_bytes

    def prepare(self, groups: Sequence[tuple[CompiledProduct, Tensor | None]]) -> CompiledGroups:
        return CompiledGroups(groups)

    def add(self, y: Tensor, x: Tensor, groups: CompiledGroups) -> None:
        assert y.dtype == x.dtype and (y.stride(1) == 1 or y.shape[1] == 1), "the result would go into a copy"
        if x.stride(1) != 1:
            x = x.contiguous()
        num_rows, num_inputs = x.shape
        self._add(
            x.dtype == torch.bfloat16,
            y.data_ptr(),
            y.stride(0),
            x.data_ptr(),
            x.stride(0),
            num_inputs,
            groups.find_address(num_rows),
            groups.count,
            torch.get_num_threads(),
        )
