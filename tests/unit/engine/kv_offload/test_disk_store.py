"""Blocks in files: other stores find them, damage is noticed, and their size never exceeds the limit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve_llm.engine.kv_offload.disk_store import HEADER, DiskBlockStore
from serve_llm.engine.parallel.shm import SharedMemory
from serve_llm.engine.scheduler.offload import FinishedTransfer
from serve_llm.engine.worker.kv_cache import SLOTS_OFFSET, HostMemory

SIZES = (24, 40)  # bytes of a block on two ranks
FILE_BYTES = HEADER.size + sum(SIZES)


class Host:
    """Two ranks with four slots, and a store."""

    def __init__(self, directory: Path, max_bytes: int = 10**6, identity: Callable[[], str] = lambda: "model") -> None:
        self.memories = [SharedMemory.create(SLOTS_OFFSET + 4 * size) for size in SIZES]
        ranks = [HostMemory(one.handle, 4, size, 0.0) for one, size in zip(self.memories, SIZES, strict=True)]
        self.store = DiskBlockStore(directory, identity, ranks, max_bytes)

    def fill(self, slot: int, byte: int) -> None:
        for memory, size in zip(self.memories, SIZES, strict=True):
            start = SLOTS_OFFSET + slot * size
            memory.bytes[start : start + size] = bytes([byte]) * size

    def content(self, slot: int) -> list[bytes]:
        return [
            bytes(memory.bytes[SLOTS_OFFSET + slot * size : SLOTS_OFFSET + (slot + 1) * size])
            for memory, size in zip(self.memories, SIZES, strict=True)
        ]

    def finish(self) -> FinishedTransfer:
        self.store.wait(60.0)
        [transfer] = self.store.take_finished()
        return transfer

    def write(self, byte: int, slot: int = 0) -> bool:
        self.fill(slot, byte)
        self.store.start_write(make_key(byte), slot)
        return self.finish().is_complete

    def read(self, byte: int, slot: int = 1) -> bool:
        self.store.start_read(make_key(byte), slot)
        return self.finish().is_complete


def list_warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def make_key(byte: int) -> tuple[int, bytes]:
    return (byte % 2, bytes([byte]) * 32)


Start = Callable[..., Host]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start_host(directory: Path = tmp_path, **options: object) -> Host:
            host = Host(directory, **options)  # type: ignore[arg-type]
            stack.callback(host.store.close)
            for thread in threading.enumerate():
                if thread.name == "kv-identity":
                    thread.join(60.0)
            return host

        yield start_host


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("*/??/*") if path.is_file())


def test_another_engine_finds_what_one_wrote(start: Start) -> None:
    first, second = start(), start()
    assert first.write(7) and not second.store.has(make_key(8))
    assert second.store.has(make_key(7)) and second.read(7, slot=3)
    assert second.content(3) == [bytes([7]) * size for size in SIZES]
    assert second.store.read_seconds is not None
    assert second.write(7, slot=2)  # it is already stored
    assert (first.store.stats.num_stored, second.store.stats.num_stored, second.store.stats.num_hits) == (1, 0, 1)
    assert second.store.stats.hit_bytes == sum(SIZES)


def test_another_model_finds_nothing(start: Start) -> None:
    assert start().write(7)
    other = start(identity=lambda: "another")
    assert not other.store.has(make_key(7)) and not other.read(7)
    assert other.store.stats.num_corrupt == other.store.stats.num_errors == 0


def cut(data: bytes) -> bytes:
    return data[:-1]


def cut_header(data: bytes) -> bytes:
    return data[:10]


def flip(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def rename(data: bytes) -> bytes:
    """Give the file the header of another block."""
    return data[:8] + bytes([9]) * 32 + data[40:]


@pytest.mark.parametrize("damage", [cut, cut_header, flip, rename])
def test_damage_is_noticed_once(
    damage: Callable[[bytes], bytes], start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = start()
    host.write(7)
    [path] = files(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.INFO, "serve_llm"):
        assert not host.read(7)
        assert not host.store.has(make_key(7)) and not host.read(7)
    assert host.store.stats.num_corrupt == 1 and len(list_warnings(caplog)) == 1
    assert str(path) in caplog.text
    assert host.write(7) and host.read(7)


def test_the_least_recently_used_blocks_are_deleted(start: Start, tmp_path: Path) -> None:
    first, second = start(max_bytes=10 * FILE_BYTES), start(max_bytes=10 * FILE_BYTES)
    for byte in range(10):
        assert (first, second)[byte % 2].write(byte)
    for age, path in enumerate(files(tmp_path)):
        os.utime(path, (1000.0 + age, 1000.0 + age))
    assert first.read(0)
    assert second.write(10)
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * FILE_BYTES
    assert first.store.has(make_key(0)) and first.store.has(make_key(10)) and not first.store.has(make_key(1))
    assert second.store.stats.num_evicted
    for byte in range(20, 60):
        assert first.write(byte)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * FILE_BYTES


def test_a_disk_that_fails_is_reported_once(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken, caplog.at_level(logging.INFO, "serve_llm"):
        broken.setattr(os, "rename", fail)
        assert not host.write(1) and not host.write(2)
    assert list_warnings(caplog) == ["A block of KV cache could not be written: [Errno 28] No space left on device"]
    assert host.store.stats.num_errors == 2 and not files(tmp_path)
    assert host.write(1)


def test_a_directory_that_cannot_be_used_is_an_error_in_the_log(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "model").write_text("a file")
    with caplog.at_level(logging.ERROR):
        host = start()
    assert not host.store.is_open and not host.store.has(make_key(1))
    assert "--kv-offload-dir: no blocks are kept on disk" in caplog.text
