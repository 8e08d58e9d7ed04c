"""A ring buffer in shared memory: one process writes, every reader reads all bytes, in order.

It is a byte stream: data longer than the ring is passed in pieces while the readers read, so message size is unlimited.
No torch.

    words: | closed | capacity | readers |...   one cache line
           | written, writer asleep      |...   one line; counts are bytes modulo 2**32
           | read, reader asleep         |...   one line per reader
    bytes: capacity of them, a power of two
"""

from __future__ import annotations

import time
from collections.abc import Callable

from serve_llm.engine.parallel.shm import LINE, SharedMemory, ShmHandle

_CAPACITY, _READERS = 1, 2  # words of the first line
_MASK = 2**32 - 1
_LENGTH = 8  # bytes of the length before each message
MEANWHILE_SECONDS = 0.005


class ShmRingBuffer:
    """The memory of a ring; `writer` and `reader` are its ends."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.capacity = memory.words[_CAPACITY]
        self.num_readers = memory.words[_READERS]
        start = 4 * LINE * (2 + self.num_readers)
        self.data = memory.bytes[start : start + self.capacity]

    @classmethod
    def create(cls, num_readers: int, capacity: int) -> ShmRingBuffer:
        """capacity: bytes, rounded up to a power of two."""
        capacity = 1 << max(capacity - 1, 1).bit_length()
        memory = SharedMemory.create(4 * LINE * (2 + num_readers) + capacity)
        memory.words[_CAPACITY] = capacity
        memory.words[_READERS] = num_readers
        return cls(memory)

    @classmethod
    def open(cls, handle: ShmHandle) -> ShmRingBuffer:
        return cls(SharedMemory.open(handle))

    def writer(self) -> RingWriter:
        return RingWriter(self)

    def reader(self, index: int) -> RingReader:
        return RingReader(self, index)

    def close(self) -> None:
        self.memory.close()


def _line(party: int) -> int:
    """Index of the byte count of the writer (0) or of reader party - 1; the next word is 1 while that process
    sleeps."""
    return LINE * (1 + party)


def _deadline(seconds: float | None) -> float | None:
    return None if seconds is None else time.monotonic() + seconds


class RingWriter:
    """The one writing end."""

    def __init__(self, ring: ShmRingBuffer) -> None:
        self._ring = ring
        self._words = ring.memory.words
        self._lines = [_line(1 + index) for index in range(ring.num_readers)]
        self._written = 0

    def send(self, message: bytes, seconds: float | None = None, meanwhile: Callable[[], None] | None = None) -> None:
        """Send one message for `RingReader.receive`. Raises as `write` does."""
        self.write(len(message).to_bytes(_LENGTH, "little") + message, seconds, meanwhile)

    def write(
        self, data: bytes | memoryview, seconds: float | None = None, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Write bytes for `RingReader.read_into`. Waits while the ring is full.

        meanwhile: called repeatedly while waiting, to do work that a reader may be waiting for. Raises TimeoutError if
        a reader frees no space for `seconds`, ChannelClosed if the ring is closed.
        """
        source = memoryview(data)
        ring = self._ring
        capacity = self._ring.capacity
        done = 0
        while done < len(source):
            # at most a quarter at a time, so that readers copy while the next piece is written
            size = min(len(source) - done, self._wait_for_room(seconds, meanwhile), max(capacity // 4, 1))
            place = self._written % capacity
            first = min(size, capacity - place)
            ring.data[place : place + first] = source[done : done + first]
            ring.data[: size - first] = source[done + first : done + size]
            done += size
            self._publish(size)

    def _wait_for_room(self, seconds: float | None, meanwhile: Callable[[], None] | None) -> int:
        """Wait for free bytes; returns their number, at least one."""
        words = self._words
        capacity = self._ring.capacity
        deadline = _deadline(seconds)
        while True:
            used, slowest = max((self._written - words[line] & _MASK, line) for line in self._lines)
            if used < capacity:
                return capacity - used
            soon = deadline
            if meanwhile is not None:
                meanwhile()
                soon = time.monotonic() + MEANWHILE_SECONDS
            try:
                self._ring.memory.wait(slowest, self._written - used & _MASK, _line(0) + 1, soon)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def _publish(self, size: int) -> None:
        memory = self._ring.memory
        self._written = self._written + size & _MASK
        memory.fence()
        self._words[_line(0)] = self._written
        if any(self._words[line + 1] for line in self._lines):
            memory.wake(_line(0))


class RingReader:
    """One reading end. The writer waits for the slowest reader."""

    def __init__(self, ring: ShmRingBuffer, index: int) -> None:
        if not 0 <= index < ring.num_readers:
            raise ValueError(f"a ring with {ring.num_readers} readers has no reader {index}")
        self._ring = ring
        self._words = ring.memory.words
        self._line = _line(1 + index)
        self._read = 0

    @property
    def ready(self) -> bool:
        """Whether there is something to read."""
        return self._words[_line(0)] != self._read

    def receive(self, seconds: float | None = None) -> bytes:
        """Wait for the next message. Raises as `read_into` does."""
        length = bytearray(_LENGTH)
        self.read_into(memoryview(length), seconds)
        message = bytearray(int.from_bytes(length, "little"))
        self.read_into(memoryview(message), seconds)
        return bytes(message)

    def read_into(self, target: memoryview, seconds: float | None = None) -> None:
        """Fill `target` (bytes) with the next bytes.

        Raises TimeoutError if nothing arrives for `seconds` (None: no limit), ChannelClosed when the ring is closed.
        """
        ring = self._ring
        capacity = self._ring.capacity
        done = 0
        while done < len(target):
            size = min(len(target) - done, self._available(seconds))
            place = self._read % capacity
            first = min(size, capacity - place)
            target[done : done + first] = ring.data[place : place + first]
            target[done + first : done + size] = ring.data[: size - first]
            done += size
            self._advance(size)

    def skip(self, count: int, seconds: float | None = None) -> None:
        """Skip the next `count` bytes. Raises as `read_into` does."""
        while count:
            size = min(count, self._available(seconds))
            count -= size
            self._advance(size)

    def _available(self, seconds: float | None) -> int:
        """Wait for bytes to read; returns their number, at least one."""
        memory = self._ring.memory
        if self._words[_line(0)] == self._read:
            memory.wait(_line(0), self._read, self._line + 1, _deadline(seconds))
        memory.fence()
        return self._words[_line(0)] - self._read & _MASK

    def _advance(self, size: int) -> None:
        memory = self._ring.memory
        self._read = self._read + size & _MASK
        memory.fence()
        self._words[self._line] = self._read
        if self._words[_line(0) + 1]:
            memory.wake(self._line)
