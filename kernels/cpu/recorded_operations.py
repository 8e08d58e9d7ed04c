"""Compiled kernels that replace torch operations in recorded steps and compute the same bits.

In a one-token step, a torch operation takes 10 to 50 us, because reading the weights evicts its code from the
processor's caches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Call = tuple[Callable[..., object], Sequence[Any]]


class RecordedOperations:
    def __init__(self, compiled: CDLL) -> None:
        self._gather_rows = compiled["serve_llm_gather_rows"]
        self._gather_rows.argtypes = (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int)
        self._add_rows = compiled["serve_llm_add_rows"]
        self._add_rows.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int)

    def find(self, operation: object, arguments: Sequence[Any], result: Tensor) -> Call | None:
        """Return a call that computes `result`, which an operation has returned for these positional arguments; None if
        there is none. It reads and writes the same memory."""
        if not result.numel():
            return None
        if operation is aten.embedding.default:
            return self._gather(arguments[0], arguments[1], result)
        if operation is aten.index.Tensor and len(arguments[1]) == 1:
            return self._gather(arguments[0], arguments[1][0], result)
        if operation is aten.add.Tensor and isinstance(arguments[1], Tensor):
            return self._add(arguments[0], arguments[1], result)
        return None

    def _gather(self, table: Tensor, ids: Tensor, result: Tensor) -> Call | None:
        is_simple = ids.dtype == torch.int64 and ids.dim() == 1 and table.dim() == 2
        if not (is_simple and ids.is_contiguous() and table.is_contiguous() and result.is_contiguous()):
            return None
        rows = (table.data_ptr(), len(table), table.shape[1] * table.element_size())
        return self._gather_rows, (*rows, ids.data_ptr(), len(ids), result.data_ptr(), torch.get_num_threads())

    def _add(self, x: Tensor, y: Tensor, result: Tensor) -> Call | None:
        """x: (rows, width). y: the same, or (width,)."""
        is_alike = x.dim() == 2 and y.shape in (x.shape, x.shape[1:])
        has_type = x.dtype in (torch.bfloat16, torch.float32) and x.dtype == y.dtype
        if not (is_alike and has_type and all(one.is_contiguous() for one in (x, y, result))):
            return None
        y_row = 0 if y.dim() == 1 else y.shape[1]
        addresses = (x.data_ptr(), y.data_ptr(), y_row, result.data_ptr())
        return self._add_rows, (x.dtype == torch.bfloat16, *addresses, *x.shape, torch.get_num_threads())
