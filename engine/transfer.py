"""Asynchronous copies between host and device, in stream order.

Pinned memory comes from torch's caching host allocator, which reuses a block only when the copies under way have ended,
so buffers need not be kept alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PendingWork:
    """Work on the device, in progress."""

    event: torch.cuda.Event | None  # None if it is done

    @property
    def is_ready(self) -> bool:
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True)
class PendingCopy:
    """A copy to the host, in progress."""

    tensor: Tensor
    work: PendingWork

    @property
    def is_ready(self) -> bool:
        return self.work.is_ready

    def wait(self) -> Tensor:
        """Wait for the copy and return the values."""
        self.work.wait()
        return self.tensor


class DeviceCopier:
    """Copies to and from one device. On a CPU, nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, array: np.ndarray) -> Tensor:
        """Copy the array to the device. The array must not change afterwards."""
        return self._pin(array).to(self.device, non_blocking=True)

    def fill(self, target: Tensor, array: np.ndarray) -> None:
        """Overwrite a tensor on the device with values of the same dtype, after all work launched so far. The array
        must not change afterwards."""
        target.copy_(self._pin(array), non_blocking=True)

    def _pin(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cpu":
            return tensor
        # `Tensor.pin_memory` asks the driver about the tensor first, which takes longer than a small copy.
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)

    def to_host(self, tensor: Tensor) -> PendingCopy:
        """Start a copy after all work launched so far. Later changes to the tensor do not affect it."""
        if self.device.type == "cpu":
            return PendingCopy(tensor.clone(), self.record())
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        target.copy_(tensor, non_blocking=True)
        return PendingCopy(target, self.record())

    def record(self) -> PendingWork:
        """All work launched so far."""
        if self.device.type == "cpu":
            return PendingWork(None)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return PendingWork(event)
