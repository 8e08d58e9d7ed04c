"""Groups and links between ranks of one host, through rings in shared memory. For tensors of CPUs: GPUs use NCCL.

Every rank of a group has a ring that all others read, so an exchange is: write yours, read theirs. What is larger than
a ring goes in pieces. Sums are made by every rank for itself, in rank order, so all have the same bits. Where there is
the compiled library, it uses the memory of the same rings in its own way (`kernels/cpu/collectives.cpp`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.engine.errors import PeerLost
from serve_llm.engine.parallel.comm import Group
from serve_llm.engine.parallel.ring import Ring
from serve_llm.engine.parallel.shm import CLOSED_MESSAGE, Closed
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.collectives import Collectives, Silent, WindowClosed

PEER_SECONDS = 900.0  # silence of a peer in the middle of a step; the executor's limit is shorter and names the rank
SUM_BYTES = 1 << 16  # added at a time: so little stays in a core's cache


def shm_group(rings: Sequence[Ring], rank: int) -> Group:
    """The faster group that works here; the same one on every rank of a host, since they have the same installation."""
    path = library.find()
    if path is not None:
        with contextlib.suppress(OSError):  # `kernels.table` warns of it
            return CompiledGroup(path, rings, rank)
    return ShmGroup(rings, rank)


class CompiledGroup:
    """See `comm.Group`."""

    def __init__(self, path: Path, rings: Sequence[Ring], rank: int, seconds: float = PEER_SECONDS) -> None:
        """path: of the compiled library. rings: one per rank of the group, equally large, used for nothing else.
        seconds: that a rank may be silent. Raises OSError if the library cannot be loaded."""
        self.rank = rank
        self.size = len(rings)
        self._rings = rings  # kept in being
        self._seconds = seconds
        memories = [ring.memory for ring in rings]
        addresses = [memory.address for memory in memories]
        self._collectives = Collectives(path, addresses, memories[0].handle.size, rank, seconds)

    def all_reduce(self, x: Tensor) -> Tensor:
        exact = x if x.dtype in library.DTYPES else x.float()
        try:
            self._collectives.all_reduce(exact)
        except (WindowClosed, Silent) as error:
            raise self._lost(error) from None
        return x if exact is x else x.copy_(exact)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        try:
            return list(self._collectives.all_gather(x.contiguous()).unbind())
        except (WindowClosed, Silent) as error:
            raise self._lost(error) from None

    def _lost(self, error: WindowClosed | Silent) -> PeerLost:
        if isinstance(error, Silent):
            return _silent(f"rank {error.rank} of its tensor-parallel group", self._seconds)
        return Closed(CLOSED_MESSAGE)


class ShmGroup:
    """See `comm.Group`. In Python over torch, where there is no compiled library."""

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

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See `Exchange`. A ring holds what its rank sends to all others; each of them skips what is not for it."""
        received = [sent[self.rank] for sent in rows]
        found = x.new_empty((sum(received), *x.shape[1:]))
        parts = torch.split(found, received)
        own = torch.split(x, list(rows[self.rank]))
        parts[self.rank].copy_(own[self.rank])
        unit = x.itemsize * math.prod(x.shape[1:])
        start = sum(map(len, own[: self.rank])) * unit
        before, behind = _bytes(x)[:start], _bytes(x)[start + len(own[self.rank]) * unit :]
        spans = {other: _Span.of(rows[other], other, self.rank, unit) for other in self._readers}
        views = {other: _bytes(parts[other]) for other in self._readers}
        longest = max(len(before) + len(behind), *(span.length for span in spans.values()))
        for piece in _pieces(0, longest, self._piece):
            self._write(before[piece])
            self._write(behind[max(0, piece.start - start) : max(0, piece.stop - start)])
            for other, span in spans.items():
                passed, wanted, left = span.within(piece)
                self._skip(other, passed)
                self._read(other, views[other][wanted])
                self._skip(other, left)
        return found

    def _skip(self, other: int, count: int) -> None:
        try:
            self._readers[other].skip(count, PEER_SECONDS)
        except TimeoutError:
            raise _silent(f"rank {other} of its group") from None

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


class _Span(NamedTuple):
    """What of a rank's stream is for one reader, in bytes."""

    start: int
    stop: int
    length: int  # of the stream

    @classmethod
    def of(cls, rows: Sequence[int], writer: int, reader: int, unit: int) -> _Span:
        """rows: that the writer sends to each rank; its own are not in the stream. unit: bytes of a row."""
        sent = [0 if rank == writer else count for rank, count in enumerate(rows)]
        start = sum(sent[:reader])
        return cls(start * unit, (start + sent[reader]) * unit, sum(sent) * unit)

    def within(self, piece: slice) -> tuple[int, slice, int]:
        """Of a piece of the stream: how much to skip, which part of what is for the reader follows, how much to skip
        after it."""
        first, last = min(piece.start, self.length), min(piece.stop, self.length)
        start, stop = (min(max(border, first), last) for border in (self.start, self.stop))
        return start - first, slice(start - self.start, stop - self.start), last - stop


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


def _silent(who: str, seconds: float = PEER_SECONDS) -> PeerLost:
    return PeerLost(f"heard nothing from {who} for {seconds:.0f} s")
