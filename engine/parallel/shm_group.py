"""Groups and links between ranks of one host, through rings in shared memory. Tensors may lie on any device.

Every rank of a group has a ring that all others read, so an exchange is: write yours, read theirs. What is larger than
a ring goes in pieces. Sums are made by every rank for itself, in rank order, so all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from serve_llm.engine.errors import PeerLost
from serve_llm.engine.parallel.ring import Reader, Ring

PEER_SECONDS = 900.0  # silence of a peer in the middle of a step; the executor's limit is shorter and names the rank


class ShmGroup:
    """See `comm.Group`."""

    def __init__(self, rings: Sequence[Ring], rank: int) -> None:
        """rings: one per rank of the group, with as many readers as there are other ranks."""
        self.rank = rank
        self.size = len(rings)
        self._writer = rings[rank].writer()
        self._readers: list[Reader | None] = [
            None if other == rank else ring.reader(rank - (rank > other)) for other, ring in enumerate(rings)
        ]
        # Half a ring, so that the next piece can be written while others still read this one.
        self._piece = max(rings[rank].capacity // 2, 1)

    def all_reduce(self, x: Tensor) -> Tensor:
        parts = self.all_gather(x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous().cpu()
        parts = [own.clone() if other == self.rank else torch.empty_like(own) for other in range(self.size)]
        views = [_bytes(part) for part in parts]
        for start in range(0, len(views[self.rank]), self._piece):
            piece = slice(start, start + self._piece)
            try:
                self._writer.write(views[self.rank][piece], PEER_SECONDS)
                for reader, view in zip(self._readers, views, strict=True):
                    if reader is not None:
                        reader.read_into(view[piece], PEER_SECONDS)
            except TimeoutError:
                raise _silent("another rank of its tensor-parallel group") from None
        return [part.to(x.device) for part in parts]


class ShmLink:
    """See `comm.Link`. One process sends, another one receives."""

    def __init__(self, ring: Ring, dtype: torch.dtype, device: torch.device) -> None:
        """dtype, device: of what is received."""
        self._writer, self._reader = ring.writer(), ring.reader(0)
        self._dtype, self._device = dtype, device

    def send(self, x: Tensor) -> None:
        try:
            self._writer.write(_bytes(x.contiguous().cpu()), PEER_SECONDS)
        except TimeoutError:
            raise _silent("the next stage") from None

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(shape, dtype=self._dtype)
        try:
            self._reader.read_into(_bytes(x), PEER_SECONDS)
        except TimeoutError:
            raise _silent("the stage before") from None
        return x.to(self._device)


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return x.view(-1).view(torch.uint8).numpy().data


def _silent(who: str) -> PeerLost:
    return PeerLost(f"heard nothing from {who} for {PEER_SECONDS:.0f} s")
