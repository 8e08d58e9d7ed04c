"""Copies of the base model's tensors in adapters: PEFT stores the whole embedding or LM head next to its adapter.

They are accepted only if they equal the checkpoint's own, so that they need not be loaded. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serve_llm.common.errors import AdapterError
from serve_llm.engine.lora.tensors import AdapterTensor, to_float32

CHUNK_BYTES = 1 << 24  # numbers compared at a time


class BaseCopy(NamedTuple):
    name: str  # the tensor's name in the adapter
    stored: tuple[str, ...]  # possible names in the checkpoint
    tensor: AdapterTensor


class _CheckpointTensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int  # offset in the file


def check_base_copies(copies: Iterable[BaseCopy], directory: Path) -> None:
    """Raise AdapterError if a copy differs from the tensor in the checkpoint `directory`. A copy in another dtype is
    equal if the checkpoint's numbers, rounded to that dtype, are equal."""
    copies = list(copies)
    if not copies:
        return
    stored = _list_tensors(directory)
    for copy in copies:
        base = next((stored[name] for name in copy.stored if name in stored), None)
        if base is None or base.shape != copy.tensor.shape:
            raise AdapterError(f"{copy.name} cannot be compared with the base model's: {directory} has no such tensor")
        if not _is_equal(base, copy.tensor):
            raise AdapterError(
                f"{copy.name} is not the base model's: modules that are stored whole are not supported; or the adapter "
                "is of another model"
            )


def _list_tensors(directory: Path) -> dict[str, _CheckpointTensor]:
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
        except (OSError, ValueError) as error:
            raise AdapterError(f"{path} cannot be read: {error}") from None
        for name, entry in header.items():
            if name != "__metadata__":
                start = 8 + length + entry["data_offsets"][0]
                tensors[name] = _CheckpointTensor(entry["dtype"], tuple(entry["shape"]), path, start)
    return tensors


def _is_equal(base: _CheckpointTensor, copy: AdapterTensor) -> bool:
    if base.dtype not in ("F32", "F16", "BF16"):
        return False
    with base.path.open("rb") as file:
        file.seek(base.start)
        for numbers in _read_copy(copy):
            width = 4 if base.dtype == "F32" else 2
            expected = to_float32(base.dtype, file.read(numbers.size * width))
            if not np.array_equal(_round(expected, copy.dtype), numbers):
                return False
    return True


def _read_copy(copy: AdapterTensor) -> Iterator[np.ndarray]:
    """Yield the tensor's numbers as float32, in pieces."""
    data = memoryview(copy.data)
    for start in range(0, len(data), CHUNK_BYTES):
        yield to_float32(copy.dtype, data[start : start + CHUNK_BYTES])


def _round(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Round to the nearest numbers of dtype, returned as float32."""
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return numbers.astype(np.float16).astype(np.float32)
    if dtype == "BF16":
        bits = numbers.view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # round ties to even
        return rounded.astype(np.uint32).view(np.float32)
    return numbers
