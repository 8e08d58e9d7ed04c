"""Groups and links between ranks of one host, through rings in shared memory. For tensors of CPUs: GPUs use NCCL.

Every rank of a group has a ring that all others read, so an exchange is: write yours, read theirs. What is larger than
a ring goes in pieces. Sums are made by every rank for itself, in rank order, so all have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from serve_llm.engine.errors import PeerLost
from serve_llm.engine.parallel.ring import Ring

PEER_SECONDS = 900.0  # silence of a peer in the middle of a step; the executor's limit is shorter and names the rank
SUM_BYTES = 1 << 16  # added at a time: so little stays in a core's cache


class ShmGroup:
    """See `comm.Group`."""

    def __init__(self, rings: Sequence[Ring], rank: int) -> None:
        """rings: one per rank of the group, of at least 16 bytes, with as many readers as there are other ranks."""
        self.rank = rank
        self.size = len(rings)
        self._writer = rings[rank].writer()
        self._readers = {other: ring.reader(rank - (rank > other)) for other, ring in enumerate(rings) if other != rank}
        # Half a ring, so that the next piece can be written while others still read this one.
        self._piece = rings[rank].capacity // 2
        # Kept, because the system clears the pages of fresh memory, which takes longer than a sum.
        self._part = torch.empty(SUM_BYTES, dtype=torch.uint8)
        self._part_bytes = _bytes(self._part)
        self._total = torch.empty(SUM_BYTES, dtype=torch.float32)

    def all_reduce(self, x: Tensor) -> Tensor:
        own = x.view(-1)
        data = _bytes(own)
        for piece in _pieces(0, len(data), self._piece):
            self._write(data[piece])
            for part in _pieces(piece.start, piece.stop, SUM_BYTES):
                self._add(own[part.start // own.itemsize : part.stop // own.itemsize])
        return x

    def _add(self, own: Tensor) -> None:
        """The next numbers of all ranks: `own`, which becomes their sum, and as many of each other one's."""
        total, size = self._total[: len(own)], own.nbytes
        for other in range(self.size):
            part = own
            if other != self.rank:
                self._read(other, self._part_bytes[:size])
                part = self._part[:size].view(own.dtype)
            total = total.copy_(part) if other == 0 else total.add_(part)
        own.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        own = x.contiguous()
        parts = [own.clone() if other == self.rank else torch.empty_like(own) for other in range(self.size)]
        views = [_bytes(part) for part in parts]
        for piece in _pieces(0, own.nbytes, self._piece):
            self._write(views[self.rank][piece])
            for other in self._readers:
                self._read(other, views[other][piece])
        return parts

    def _write(self, data: memoryview) -> None:
        try:
            self._writer.write(data, PEER_SECONDS)
        except TimeoutError:
            raise _silent("another rank of its tensor-parallel group") from None

    def _read(self, other: int, target: memoryview) -> None:
        try:
            self._readers[other].read_into(target, PEER_SECONDS)
        except TimeoutError:
            raise _silent(f"rank {other} of its tensor-parallel group") from None


def _pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


class ShmLink:
    """See `comm.Link`. One process sends, another one receives."""

    def __init__(self, ring: Ring, dtype: torch.dtype) -> None:
        """dtype: of what is received."""
        self._writer, self._reader = ring.writer(), ring.reader(0)
        self._dtype = dtype

    def send(self, x: Tensor) -> None:
        try:
            self._writer.write(_bytes(x.contiguous()), PEER_SECONDS)
        except TimeoutError:
            raise _silent("the next stage") from None

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(shape, dtype=self._dtype)
        try:
            self._reader.read_into(_bytes(x), PEER_SECONDS)
        except TimeoutError:
            raise _silent("the stage before") from None
        return x


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return x.view(-1).view(torch.uint8).numpy().data


def _silent(who: str) -> PeerLost:
    return PeerLost(f"heard nothing from {who} for {PEER_SECONDS:.0f} s")
