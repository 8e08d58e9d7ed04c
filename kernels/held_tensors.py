"""Finds the tensors that an object holds, whatever its class."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType

from torch import Tensor


def find_tensors(model: object, without: Iterable[object] = ()) -> Iterator[Tensor]:
    """Yield each tensor that is reachable from `model` other than through `without`."""
    seen = {id(item) for item in without}
    todo = [model]
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, ModuleType | type):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, FunctionType):  # its closure, not its globals
            todo += [cell.cell_contents for cell in item.__closure__ or ()]
        else:
            todo += gc.get_referents(item)
