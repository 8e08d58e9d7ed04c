"""The compiled kernels of lora.cpp. `kernels.lora.LoRAKernels` states the contract."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.cpu.library import DTYPES, Library
from serve_llm.kernels.lora import ExpansionWeight

PANEL = 32  # as in lora.cpp


class CompiledProduct:
    """An adapter's weights for one layer, and their addresses as lora.cpp reads them (`Product`, `Expansion`)."""

    def __init__(self, down: Tensor, expansions: Sequence[ExpansionWeight]) -> None:
        self._kept: list[Tensor | array[int]] = [down]
        numbers = array("q")
        for expansion in expansions:
            up = _to_panels(expansion.up)
            self._kept.append(up)
            columns = expansion.columns
            outputs = expansion.outputs
            numbers.extend((up.data_ptr(), columns.start, columns.stop - columns.start))
            numbers.extend((outputs.start, outputs.stop - outputs.start))
            for scale in (None, None) if expansion.scale is None else (expansion.scale.factor, expansion.scale.offset):
                numbers.append(0 if scale is None else self._keep(scale))
        product = array("q", (down.data_ptr(), down.shape[0], len(expansions), numbers.buffer_info()[0]))
        self._kept += (numbers, product)
        self.address = product.buffer_info()[0]

    def _keep(self, scale: Tensor) -> int:
        scale = scale.to(torch.float32).contiguous()
        self._kept.append(scale)
        return scale.data_ptr()


def _to_panels(up: Tensor) -> Tensor:
    """(outputs, columns) -> (panels, columns, PANEL), filled up with zeros."""
    outputs, columns = up.shape
    num_panels = -(-outputs // PANEL)
    filled = functional.pad(up, (0, 0, 0, num_panels * PANEL - outputs))
    return filled.view(num_panels, PANEL, columns).transpose(1, 2).contiguous()


class CompiledLoRA:
    """Kernels for CPU tensors of the dtypes in library.DTYPES; y, x and an adapter's weights have the same one."""

    def __init__(self, library: Library) -> None:
        matrices = (c_int, c_void_p, c_int64, c_void_p, c_int64, c_int)
        self._add = library.function("add_lora", *matrices, c_void_p, c_int, c_int)

    def pack(self, down: Tensor, expansions: Sequence[ExpansionWeight]) -> CompiledProduct:
        if down.dtype not in DTYPES:
            raise TypeError(f"adapters are float32 or bfloat16, not {down.dtype}")
        return CompiledProduct(down.contiguous(), expansions)

    def add(self, y: Tensor, x: Tensor, groups: Sequence[tuple[CompiledProduct, Tensor | None]]) -> None:
        assert y.dtype == x.dtype and (y.stride(1) == 1 or y.shape[1] == 1), "the result would go into a copy"
        if x.stride(1) != 1:
            x = x.contiguous()
        numbers = array("q")
        for product, rows in groups:
            count, address = (len(x), 0) if rows is None else (len(rows), rows.data_ptr())
            numbers.extend((product.address, address, count))
        self._add(
            x.dtype == torch.bfloat16,
            y.data_ptr(),
            y.stride(0),
            x.data_ptr(),
            x.stride(0),
            x.shape[1],
            numbers.buffer_info()[0],
            len(groups),
            torch.get_num_threads(),
        )
