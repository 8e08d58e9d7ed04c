"""Finds the tensors that an object of any class holds in memory."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

from torch import Tensor

# Fields that are set by each call to describe its rows.
PER_CALL = {"x", "x_row", "x_scale", "x_bf16", "rows", "y", "y_bf16"}


def find_tensors(model: object, without: Iterable[object] = ()) -> Iterator[Tensor]:
    """Yield each tensor that is reachable from `model` other than through `without`."""
    return (item for item in _walk(model, without) if isinstance(item, Tensor))


def describe_structures(model: object) -> str:
    """Describe the arguments of compiled kernels reachable from `model`, without addresses and per-call fields, so that
    layers that differ only in the contents of their tensors are equal. Empty if there are none."""
    return ", ".join(_describe(item) for item in _walk(model) if isinstance(item, ctypes.Structure))


def _walk(model: object, without: Iterable[object] = ()) -> Iterator[object]:
    """Yield each tensor and each structure of C that is reachable."""
    seen = {id(item) for item in without}
    todo = [model]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, ModuleType | type):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor | ctypes.Structure):
            yield item
        elif isinstance(item, FunctionType):  # its closure, not its globals
            todo += [cell.cell_contents for cell in item.__closure__ or ()]
        else:
            todo += gc.get_referents(item)


def _describe(structure: ctypes.Structure) -> str:
    values = {
        name: bool(getattr(structure, name)) if kind is ctypes.c_void_p else getattr(structure, name)
        for name, kind, *_ in structure._fields_
        if name not in PER_CALL
    }
    return f"{type(structure).__name__}({values})"
