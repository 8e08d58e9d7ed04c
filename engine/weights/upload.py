"""Uploading weights from mapped files to a GPU.

Files are read ahead from disk, and two pinned buffers alternate: one is filled while the other is copied. So loading
runs at the speed of the slowest of disk, memory and bus.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

BUFFER_BYTES = 64 << 20
ADVICE_BYTES = 32 << 20  # per call of posix_fadvise


class StagingBuffer(Protocol):
    """Host memory from which a device copies asynchronously."""

    memory: Tensor  # (bytes,) uint8

    def wait_until_free(self) -> Tensor:
        """Wait for the last copy from the memory, then return the memory."""

    def mark_copy_started(self) -> None:
        """Call after starting a copy from the memory."""


class PinnedBuffer:
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def wait_until_free(self) -> Tensor:
        self._event.synchronize()
        return self.memory

    def mark_copy_started(self) -> None:
        self._event.record()


class WeightUploader:
    """Copies tensors to a GPU. Create one per model load."""

    def __init__(self, device: torch.device, buffers: Iterable[StagingBuffer] | None = None) -> None:
        self._device = device
        self._buffers = cycle(buffers or [PinnedBuffer(BUFFER_BYTES) for _ in range(2)])

    def __call__(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor, of any strides, to the device. It may be freed afterwards."""
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.dim() == 0:
            return result.copy_(tensor)
        for rows in _split_rows(tensor):
            buffer = next(self._buffers)
            part = tensor[rows]
            staged = buffer.wait_until_free()[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
            staged.copy_(part)
            result[rows].copy_(staged, non_blocking=True)
            buffer.mark_copy_started()
        return result


def build_upload(device: torch.device) -> Callable[[Tensor], Tensor]:
    """The function that copies a tensor of a mapped file to the device; on a CPU it returns the tensor itself."""
    return (lambda tensor: tensor) if device.type == "cpu" else WeightUploader(device)


def _split_rows(tensor: Tensor) -> Iterator[slice]:
    """Ranges of rows that fit into a buffer. No model has rows that are larger than a buffer."""
    row_bytes = tensor[:1].numel() * tensor.element_size()
    if row_bytes == 0:
        return
    count = max(1, BUFFER_BYTES // row_bytes)
    for start in range(0, len(tensor), count):
        yield slice(start, start + count)


def read_ahead(files: Iterable[Path]) -> threading.Thread:
    """Ask the system, in a thread, to read the files into the page cache, in this order."""

    def advise() -> None:
        for path in files:
            with path.open("rb") as file:
                for start in range(0, path.stat().st_size, ADVICE_BYTES):
                    os.posix_fadvise(file.fileno(), start, ADVICE_BYTES, os.POSIX_FADV_WILLNEED)

    thread = threading.Thread(target=advise, daemon=True)
    thread.start()
    return thread
