"""Weights from mapped files to a GPU: read ahead from the disk, and copied by way of two pinned buffers, one of which
is filled while the other is on its way. So the slowest of disk, memory and bus is what loading waits for.
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
ADVICE_BYTES = 32 << 20  # asked for at a time


class Buffer(Protocol):
    """Host memory that a device copies from by itself."""

    memory: Tensor  # (bytes,) uint8

    def free(self) -> Tensor:
        """The memory, once nothing is copied from it any more."""

    def used(self) -> None:
        """A copy from it has been begun."""


class PinnedBuffer:
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def free(self) -> Tensor:
        self._event.synchronize()
        return self.memory

    def used(self) -> None:
        self._event.record()


class Upload:
    """One for a device and the time of loading."""

    def __init__(self, device: torch.device, buffers: Iterable[Buffer] | None = None) -> None:
        self._device = device
        self._buffers = cycle(buffers or [PinnedBuffer(BUFFER_BYTES) for _ in range(2)])

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; on the host it may be strided, and it is not needed any more afterwards."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if tensor.dim() == 0:
            return found.copy_(tensor)
        for rows in _pieces(tensor):
            buffer = next(self._buffers)
            part = tensor[rows]
            staged = buffer.free()[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
            staged.copy_(part)
            found[rows].copy_(staged, non_blocking=True)
            buffer.used()
        return found


def way_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    """What brings a tensor of a mapped file to the device; on a CPU it is there already."""
    return (lambda tensor: tensor) if device.type == "cpu" else Upload(device)


def _pieces(tensor: Tensor) -> Iterator[slice]:
    """Rows that fit into a buffer. A single row of more than a buffer is none that a model has."""
    row_bytes = tensor[:1].numel() * tensor.element_size()
    if row_bytes == 0:
        return
    count = max(1, BUFFER_BYTES // row_bytes)
    for start in range(0, len(tensor), count):
        yield slice(start, start + count)


def read_ahead(files: Iterable[Path]) -> threading.Thread:
    """Ask the system, in a thread, to bring the files into its cache, in this order."""

    def advise() -> None:
        for path in files:
            with path.open("rb") as file:
                for start in range(0, path.stat().st_size, ADVICE_BYTES):
                    os.posix_fadvise(file.fileno(), start, ADVICE_BYTES, os.POSIX_FADV_WILLNEED)

    thread = threading.Thread(target=advise, daemon=True)
    thread.start()
    return thread
