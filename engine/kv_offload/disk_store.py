"""Blocks of KV cache in files: one file for each block, with the parts of all ranks.

    DIRECTORY/IDENTITY/ab/abcd...-0    a block whose hash begins with ab, of KV group 0
    DIRECTORY/lock, DIRECTORY/used     the writers' lock, and the bytes that all blocks take

The identity covers everything besides its tokens that determines the content of a block (`identity`), so that engines
of one host share blocks where possible, both at the same time and one after another. A file gets its final name when it
is complete. Its header contains the block's hash and a checksum, so a truncated or changed file is detected.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import queue
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from serve_llm.common.types import OffloadStats
from serve_llm.engine.parallel.shm import SharedMemory
from serve_llm.engine.scheduler.block_pool import BlockKey
from serve_llm.engine.scheduler.offload import FinishedTransfer
from serve_llm.engine.worker.kv_cache import SLOTS_OFFSET, HostMemory

MAGIC = b"SLLMKV01"
HEADER = struct.Struct("<8s32sIIQI4x")  # magic, hash, group, parts, bytes of all parts, CRC-32 of all parts
NUM_READERS = 4  # threads
SHARE_KEPT = 0.95  # share of the limit to which deletion reduces the blocks
SPEED_WEIGHT = 0.5  # weight of the latest measurement
STALE_SECONDS = 600.0  # an unfinished file is abandoned after this time

logger = logging.getLogger(__name__)


class _TransferOutcome(Enum):
    READ = "read"
    WRITTEN = "written"
    KNOWN = "known"  # not written, because it already exists
    MISSING = "missing"  # not read: another engine has deleted it
    CORRUPT = "corrupt"
    FAILED = "failed"


class _Result(NamedTuple):
    key: BlockKey
    is_read: bool
    outcome: _TransferOutcome
    ended_at: float


class CorruptBlock(Exception):
    """A file does not contain the block that its name promises."""


class DiskBlockStore:
    """See `scheduler.offload.BlockStore`. Use it only in the engine's thread."""

    def __init__(
        self,
        directory: Path,
        find_identity: Callable[[], str],
        memory: Sequence[HostMemory],
        max_bytes: int,
    ) -> None:
        """find_identity: called in another thread; there are no blocks until it returns. memory: the slots of all ranks
        that hold KV. max_bytes: the limit on the blocks in the directory, of all engines and models."""
        self.stats = OffloadStats()
        self.read_seconds: float | None = None
        self._directory = directory
        self._max_bytes = max_bytes
        self._ranks = [_open_slots(one) for one in memory]
        self._num_bytes = sum(one.block_bytes for one in memory)
        self._folder = ""  # holds the identity; empty until it is known
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        self._arrived: list[_Result] = []
        self._num_reading = 0
        self._began_reading = 0.0  # the last time at which no block was being read
        self._num_read = 0  # blocks read since then
        self._has_warned = False
        self._readers = ThreadPoolExecutor(NUM_READERS, "kv-read")
        self._writer = ThreadPoolExecutor(1, "kv-write")
        # It may read all weights, which must not delay the exit of the process.
        threading.Thread(target=self._open, args=(find_identity,), name="kv-identity", daemon=True).start()

    def _open(self, find_identity: Callable[[], str]) -> None:
        began = time.perf_counter()
        try:
            folder = self._directory / find_identity()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._locked():
                self._write_used(sum(size for _, size, _ in self._list_files()))
        except OSError as error:
            logger.error("--kv-offload-dir: no blocks are kept on disk: %s", error)
            return
        logger.info("Blocks of KV cache are kept in %s, after %.1f s", folder, time.perf_counter() - began)
        self._folder = str(folder)

    def close(self) -> None:
        """Cancel the transfers that have not started."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)

    # Called in the engine's thread

    @property
    def is_open(self) -> bool:
        return bool(self._folder)

    def has(self, key: BlockKey) -> bool:
        return self.is_open and os.path.exists(self._path(key))

    def start_read(self, key: BlockKey, slot: int) -> None:
        if not self._num_reading:
            self._began_reading = time.perf_counter()
            self._num_read = 0
        self._num_reading += 1
        self._readers.submit(self._run, self._read, key, slot, True)

    def start_write(self, key: BlockKey, slot: int) -> None:
        self._writer.submit(self._run, self._write, key, slot, False)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until a transfer has ended."""
        with contextlib.suppress(queue.Empty):
            self._arrived.append(self._results.get(timeout=seconds))

    def take_finished(self) -> list[FinishedTransfer]:
        with contextlib.suppress(queue.Empty):
            while True:
                self._arrived.append(self._results.get_nowait())
        arrived = self._arrived
        self._arrived = []
        return [self._count(result) for result in arrived]

    def _count(self, result: _Result) -> FinishedTransfer:
        stats = self.stats
        outcome = result.outcome
        if result.is_read:
            self._measure(result)
        if outcome is _TransferOutcome.READ:
            stats.num_hits += 1
            stats.hit_bytes += self._num_bytes
        elif outcome is _TransferOutcome.WRITTEN:
            stats.num_stored += 1
            stats.stored_bytes += self._num_bytes
        elif outcome is _TransferOutcome.CORRUPT:
            stats.num_corrupt += 1
        elif outcome is _TransferOutcome.FAILED:
            stats.num_errors += 1
        is_complete = outcome in (_TransferOutcome.READ, _TransferOutcome.WRITTEN, _TransferOutcome.KNOWN)
        return FinishedTransfer(result.key, result.is_read, is_complete)

    def _measure(self, result: _Result) -> None:
        """Update the time per block once the last of several overlapping reads has ended."""
        self._num_reading -= 1
        self._num_read += result.outcome is _TransferOutcome.READ
        if self._num_reading or not self._num_read:
            return
        seconds = (result.ended_at - self._began_reading) / self._num_read
        old = seconds if self.read_seconds is None else self.read_seconds
        self.read_seconds = old + SPEED_WEIGHT * (seconds - old)

    # Called in other threads

    def _run(
        self, transfer: Callable[[BlockKey, int], _TransferOutcome], key: BlockKey, slot: int, is_read: bool
    ) -> None:
        try:
            outcome = transfer(key, slot)
            self._has_warned = self._has_warned and outcome is _TransferOutcome.FAILED
        except OSError as error:
            outcome = _TransferOutcome.FAILED
            if not self._has_warned:
                logger.warning("A block of KV cache could not be %s: %s", "read" if is_read else "written", error)
            self._has_warned = True
        self._results.put(_Result(key, is_read, outcome, time.perf_counter()))

    def _path(self, key: BlockKey) -> str:
        group, block_hash = key
        name = block_hash.hex()
        return f"{self._folder}/{name[:2]}/{name}-{group}"

    def _parts(self, slot: int) -> Iterator[memoryview]:
        for slots, size in self._ranks:
            yield slots[slot * size : (slot + 1) * size]

    def _read(self, key: BlockKey, slot: int) -> _TransferOutcome:
        path = self._path(key)
        try:
            with open(path, "rb", buffering=0) as file:
                self._fill(file.readinto, file.read(HEADER.size), key, slot)
                os.utime(file.fileno())  # deletion starts with the least recently used blocks
        except FileNotFoundError:
            return _TransferOutcome.MISSING
        except CorruptBlock as error:
            logger.warning("A block of KV cache is computed again, since its file %s %s", path, error)
            self._delete(path)
            return _TransferOutcome.CORRUPT
        return _TransferOutcome.READ

    def _fill(self, read_into: Callable[[memoryview], int | None], header: bytes, key: BlockKey, slot: int) -> None:
        """Fill a slot from a file that must begin with `header`. Raises CorruptBlock."""
        if len(header) < HEADER.size:
            raise CorruptBlock("is cut off")
        magic, block_hash, group, num_parts, num_bytes, expected = HEADER.unpack(header)
        found = (magic, (group, block_hash), num_parts, num_bytes)
        if found != (MAGIC, key, len(self._ranks), self._num_bytes):
            raise CorruptBlock("has the header of another block")
        checksum = 0
        for part in self._parts(slot):
            done = 0
            while done < len(part):
                count = read_into(part[done:])
                if not count:
                    raise CorruptBlock("is cut off")
                done += count
            checksum = zlib.crc32(part, checksum)
        if checksum != expected:
            raise CorruptBlock("has a wrong checksum")

    def _write(self, key: BlockKey, slot: int) -> _TransferOutcome:
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return _TransferOutcome.KNOWN
        parts = list(self._parts(slot))
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        header = HEADER.pack(MAGIC, key[1], key[0], len(parts), self._num_bytes, checksum)
        self._make_room(HEADER.size + self._num_bytes)
        unfinished = f"{path}.{os.getpid()}"
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        try:
            with open(unfinished, "wb") as file:
                file.write(header)
                for part in parts:
                    file.write(part)
            os.rename(unfinished, path)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise
        return _TransferOutcome.WRITTEN

    # The limit

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock that protects the byte count."""
        descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, num_bytes: int) -> None:
        """Reserve bytes for a new file, and delete the least recently used files if there is no room."""
        with self._locked():
            used = self._read_used()
            if used + num_bytes > self._max_bytes:
                used = self._delete_oldest(int(SHARE_KEPT * self._max_bytes) - num_bytes)
            self._write_used(used + num_bytes)

    def _delete_oldest(self, wanted: int) -> int:
        """Delete files until they take at most `wanted` bytes. Returns the bytes that remain."""
        files = sorted(self._list_files())
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used <= wanted:
                break
            self._delete(path)
            self.stats.num_evicted += 1
            used -= size
        return used

    def _list_files(self) -> list[tuple[float, int, str]]:
        """Return time of last use, bytes and path of each block of any identity. Deletes abandoned unfinished files."""
        files = []
        for path in self._directory.glob("*/[0-9a-f][0-9a-f]/*"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix and status.st_mtime < time.time() - STALE_SECONDS:
                    self._delete(str(path))
                else:
                    files.append((status.st_mtime, status.st_size, str(path)))
        return files

    def _delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def _read_used(self) -> int:
        try:
            return int((self._directory / "used").read_text())
        except (OSError, ValueError):
            return sum(size for _, size, _ in self._list_files())

    def _write_used(self, num_bytes: int) -> None:
        (self._directory / "used").write_text(str(num_bytes))


def _open_slots(memory: HostMemory) -> tuple[memoryview, int]:
    """Return the slots of a rank, and the bytes of each."""
    return SharedMemory.open(memory.handle).bytes[SLOTS_OFFSET:], memory.block_bytes
