"""Tensors of an adapter file, without torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serve_llm.common.adapter_files import ADAPTER_WEIGHTS as WEIGHTS
from serve_llm.common.errors import AdapterError

ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


class AdapterTensor(NamedTuple):
    dtype: str  # a key of ELEMENT_BYTES
    shape: tuple[int, ...]
    data: bytes


def check_tensor(name: str, tensor: AdapterTensor, shape: tuple[int, ...]) -> None:
    """Raise AdapterError, which names the tensor, if its shape is wrong or some numbers are not finite."""
    if tensor.dtype not in ELEMENT_BYTES:
        raise AdapterError(f"{WEIGHTS}: {name} is stored as {tensor.dtype}, not as one of {', '.join(ELEMENT_BYTES)}")
    if tensor.shape != shape:
        raise AdapterError(f"{WEIGHTS}: {name} has shape {list(tensor.shape)}, but must have {list(shape)}")
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
