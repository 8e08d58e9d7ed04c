"""Process groups and links of CPU ranks on one host, through rings in shared memory.

Each rank of a group has a ring that all others read: to exchange tensors, a rank writes its own ring and reads the
others, in pieces if a tensor is larger than a ring. Every rank computes sums itself, in rank order, so all get the same
bits. The compiled library uses the memory of the same rings with its own protocol (`kernels/cpu/collectives.cpp`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from serve_llm.common.errors import PeerLost
from serve_llm.engine.parallel.groups import ProcessGroup
from serve_llm.engine.parallel.shm import CLOSED_MESSAGE, ChannelClosed
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.collectives import Collectives, RankTimeout, WindowClosed

PEER_SECONDS = 900.0  # limit for a peer to answer within a step; the executor's limit is shorter and names the rank
SUM_BYTES = 1 << 16  # elements added at a time, to stay in a core's cache


def build_shm_group(rings: Sequence[ShmRingBuffer], rank: int) -> ProcessGroup:
    """Build the fastest implementation that works here. All ranks of a host choose the same one, because they share an
    installation."""
    path = library.find()
    if path is not None:
        with contextlib.suppress(OSError):  # `kernels.registry` logs a warning
            return CompiledGroup(path, rings, rank)
    return ShmGroup(rings, rank)


class CompiledGroup:
    """A `ProcessGroup` of the compiled library."""

    def __init__(self, path: Path, rings: Sequence[ShmRingBuffer], rank: int, seconds: float = PEER_SECONDS) -> None:
        """path: of the compiled library. rings: one per rank of the group, equally large, used for nothing else.
        seconds: limit for another rank to answer. Raises OSError if the library cannot be loaded."""
        self.rank = rank
        self.size = len(rings)
        self._rings = rings  # keeps the memory alive
        self._seconds = seconds
        memories = [ring.memory for ring in rings]
        addresses = [memory.address for memory in memories]
        self._collectives = Collectives(path, addresses, memories[0].handle.size, rank, seconds)

    def all_reduce(self, x: Tensor) -> Tensor:
        exact = x if x.dtype in library.DTYPES else x.float()
        try:
            self._collectives.all_reduce(exact)
        except (WindowClosed, RankTimeout) as error:
            raise self._build_loss_error(error) from None
        return x if exact is x else x.copy_(exact)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        try:
            return list(self._collectives.all_gather(x.contiguous()).unbind())
        except (WindowClosed, RankTimeout) as error:
            raise self._build_loss_error(error) from None

    def _build_loss_error(self, error: WindowClosed | RankTimeout) -> PeerLost:
        if isinstance(error, RankTimeout):
            return _build_silence_error(f"rank {error.rank} of its tensor-parallel group", self._seconds)
        return ChannelClosed(CLOSED_MESSAGE)


class ShmGroup:
    """A `ProcessGroup` and `AllToAllGroup` in Python, for machines without the compiled library and for expert
    parallelism."""

    def __init__(self, rings: Sequence[ShmRingBuffer], rank: int) -> None:
        """rings: one per rank of the group, of at least 16 bytes, with as many readers as there are other ranks."""
        self.rank = rank
        self.size = len(rings)
        self._writer = rings[rank].writer()
        self._readers = {other: ring.reader(rank - (rank > other)) for other, ring in enumerate(rings) if other != rank}
        # Half a ring, so that this rank writes the next piece while others still read the previous one.
        self._piece = rings[rank].capacity // 2
        # Reused, because clearing the pages of new memory takes the kernel longer than a sum.
        self._part = torch.empty(SUM_BYTES, dtype=torch.uint8)
        self._part_bytes = _bytes(self._part)
        self._total = torch.empty(SUM_BYTES, dtype=torch.float32)

    def all_reduce(self, x: Tensor) -> Tensor:
        flat = x.view(-1)
        data = _bytes(flat)
        for piece in _pieces(0, len(data), self._piece):
            self._write(data[piece])
            for part in _pieces(piece.start, piece.stop, SUM_BYTES):
                self._add(flat[part.start // flat.itemsize : part.stop // flat.itemsize])
        return x

    def _add(self, x: Tensor) -> None:
        """Replace `x` by the sum over ranks: read the same number of elements from every other rank."""
        total = self._total[: len(x)]
        size = x.nbytes
        for other in range(self.size):
            part = x
            if other != self.rank:
                self._read(other, self._part_bytes[:size])
                part = self._part[:size].view(x.dtype)
            total = total.copy_(part) if other == 0 else total.add_(part)
        x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        contiguous = x.contiguous()
        parts = [
            contiguous.clone() if other == self.rank else torch.empty_like(contiguous) for other in range(self.size)
        ]
        views = [_bytes(part) for part in parts]
        for piece in _pieces(0, contiguous.nbytes, self._piece):
            self._write(views[self.rank][piece])
            for other in self._readers:
                self._read(other, views[other][piece])
        return parts

    def all_to_all(self, x: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
        """See `AllToAllGroup`. A ring carries what its rank sends to all others; each reader skips what is not for
        it."""
        received = [sent[self.rank] for sent in rows]
        result = x.new_empty((sum(received), *x.shape[1:]))
        parts = torch.split(result, received)
        outgoing = torch.split(x, list(rows[self.rank]))
        parts[self.rank].copy_(outgoing[self.rank])
        unit = x.itemsize * math.prod(x.shape[1:])
        start = sum(map(len, outgoing[: self.rank])) * unit
        before = _bytes(x)[:start]
        behind = _bytes(x)[start + len(outgoing[self.rank]) * unit :]
        spans = {other: _RowRange.from_counts(rows[other], other, self.rank, unit) for other in self._readers}
        views = {other: _bytes(parts[other]) for other in self._readers}
        longest = max(len(before) + len(behind), *(span.length for span in spans.values()))
        for piece in _pieces(0, longest, self._piece):
            self._write(before[piece])
            self._write(behind[max(0, piece.start - start) : max(0, piece.stop - start)])
            for other, span in spans.items():
                passed, wanted, left = span.clip(piece)
                self._skip(other, passed)
                self._read(other, views[other][wanted])
                self._skip(other, left)
        return result

    def _skip(self, other: int, count: int) -> None:
        try:
            self._readers[other].skip(count, PEER_SECONDS)
        except TimeoutError:
            raise _build_silence_error(f"rank {other} of its group") from None

    def _write(self, data: memoryview) -> None:
        try:
            self._writer.write(data, PEER_SECONDS)
        except TimeoutError:
            raise _build_silence_error("another rank of its tensor-parallel group") from None

    def _read(self, other: int, target: memoryview) -> None:
        try:
            self._readers[other].read_into(target, PEER_SECONDS)
        except TimeoutError:
            raise _build_silence_error(f"rank {other} of its tensor-parallel group") from None


class _RowRange(NamedTuple):
    """The bytes of a rank's stream that are for one reader."""

    start: int
    stop: int
    length: int  # bytes of the whole stream

    @classmethod
    def from_counts(cls, rows: Sequence[int], writer: int, reader: int, unit: int) -> _RowRange:
        """rows: number that the writer sends to each rank; those to itself are not in the stream. unit: bytes of a
        row."""
        sent = [0 if rank == writer else count for rank, count in enumerate(rows)]
        start = sum(sent[:reader])
        return cls(start * unit, (start + sent[reader]) * unit, sum(sent) * unit)

    def clip(self, piece: slice) -> tuple[int, slice, int]:
        """For a piece of the stream, return the bytes to skip, the following slice of the reader's bytes, and the bytes
        to skip after it."""
        first = min(piece.start, self.length)
        last = min(piece.stop, self.length)
        start, stop = (min(max(border, first), last) for border in (self.start, self.stop))
        return start - first, slice(start - self.start, stop - self.start), last - stop


def _pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


class ShmLink:
    """A `PipelineLink` through one ring: one process sends, another one receives."""

    def __init__(self, ring: ShmRingBuffer, dtype: torch.dtype) -> None:
        """dtype: of what is received."""
        self._writer = ring.writer()
        self._reader = ring.reader(0)
        self._dtype = dtype

    def send(self, x: Tensor) -> None:
        try:
            self._writer.write(_bytes(x.contiguous()), PEER_SECONDS)
        except TimeoutError:
            raise _build_silence_error("the next stage") from None

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.empty(shape, dtype=self._dtype)
        try:
            self._reader.read_into(_bytes(x), PEER_SECONDS)
        except TimeoutError:
            raise _build_silence_error("the stage before") from None
        return x


def _bytes(x: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return x.view(-1).view(torch.uint8).numpy().data


def _build_silence_error(who: str, seconds: float = PEER_SECONDS) -> PeerLost:
    return PeerLost(f"heard nothing from {who} for {seconds:.0f} s")
