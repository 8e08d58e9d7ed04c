"""Numbers between host and device without waiting: the host goes on while they are copied, in the order of the stream.

Pinned memory comes from torch's caching host allocator. It knows the copies that are under way and gives a block out
again only when they have ended, so that nobody has to keep a buffer alive.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Arriving:
    """A copy to the host, under way."""

    tensor: Tensor
    event: torch.cuda.Event | None

    @property
    def is_there(self) -> bool:
        return self.event is None or self.event.query()  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """The numbers, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensor


class Transfer:
    """For one device. On a CPU everything is there already."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, array: np.ndarray) -> Tensor:
        """The array's numbers; the array is not to be changed afterwards."""
        return self._staged(array).to(self.device, non_blocking=True)

    def fill(self, target: Tensor, array: np.ndarray) -> None:
        """Overwrite a tensor on the device, or a part of one, with numbers of the same type, behind all that has been
        launched; the array is not to be changed afterwards."""
        target.copy_(self._staged(array), non_blocking=True)

    def _staged(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.pin_memory()

    def to_host(self, tensor: Tensor) -> Arriving:
        """Begins behind all that has been launched; what comes later does not change what arrives."""
        if self.device.type == "cpu":
            return Arriving(tensor.clone(), None)
        arriving = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        arriving.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return Arriving(arriving, event)
