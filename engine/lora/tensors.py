"""Tensors of an adapter file, without torch."""

from __future__ import annotations

import json
import math
from typing import NamedTuple

import numpy as np

from serve_llm.common.adapter_files import ADAPTER_WEIGHTS as WEIGHTS
from serve_llm.common.errors import AdapterError

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class AdapterTensor(NamedTuple):
    dtype: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    data: bytes | memoryview


def view_tensors(file: memoryview) -> dict[str, AdapterTensor]:
    """Return the tensors of a safetensors file, whose header was checked by `safetensors`, without copying them. Raises
    AdapterError if it is another file."""
    try:
        start = 8 + int.from_bytes(file[:8], "little")
        header = json.loads(bytes(file[8:start]))
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                data = file[start + begin : start + end]
                tensors[name] = AdapterTensor(str(entry["dtype"]), tuple(entry["shape"]), data)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise AdapterError(f"{WEIGHTS} cannot be read: {error}") from None
    return tensors


def check_tensor(name: str, tensor: AdapterTensor, shape: tuple[int, ...]) -> None:
    """Raise AdapterError, which names the tensor, if its type or shape is wrong."""
    if tensor.dtype not in ELEMENT_BYTES:
        raise AdapterError(f"{WEIGHTS}: {name} is stored as {tensor.dtype}, not as one of {', '.join(ELEMENT_BYTES)}")
    if tensor.shape != shape:
        raise AdapterError(f"{WEIGHTS}: {name} has shape {list(tensor.shape)}, but must have {list(shape)}")
    if len(tensor.data) != ELEMENT_BYTES[tensor.dtype] * math.prod(shape):
        raise AdapterError(f"{WEIGHTS}: {name} has {len(tensor.data):,} bytes")


def check_numbers(name: str, tensor: AdapterTensor) -> None:
    """Raise AdapterError, which names the tensor, if some numbers are not finite."""
    if not _is_finite(tensor):
        raise AdapterError(f"{WEIGHTS}: {name} contains numbers that are not finite")


def to_float32(dtype: str, data: bytes | memoryview) -> np.ndarray:
    """dtype: a key of ELEMENT_BYTES."""
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.float32 if dtype == "F32" else np.float16).astype(np.float32)


def _is_finite(tensor: AdapterTensor) -> bool:
    if tensor.dtype == "BF16":
        bits = np.frombuffer(tensor.data, np.uint16)
        return not bool(((bits & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(np.frombuffer(tensor.data, np.float32 if tensor.dtype == "F32" else np.float16)).all())
