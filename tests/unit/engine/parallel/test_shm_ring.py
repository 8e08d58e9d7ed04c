"""The ring of bytes: order, sizes, several readers, and interrupted waits. Readers are threads, or real processes."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from serve_llm.common.errors import EngineError
from serve_llm.engine.parallel.shm import ChannelClosed, SharedMemory, ShmHandle
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer

LIMIT = 120.0  # seconds; far more than any test takes


def test_messages_of_all_sizes_reach_every_reader_in_order() -> None:
    ring = ShmRingBuffer.create(num_readers=3, capacity=64)
    random.seed(0)
    messages = [random.randbytes(random.choice([0, 1, 7, 55, 56, 57, 63, 64, 65, 200, 5000])) for _ in range(200)]
    writer = ring.writer()
    with ThreadPoolExecutor(4) as pool:
        readers = [pool.submit(read_all, ring, index, len(messages)) for index in range(3)]
        for message in messages:
            writer.send(message, LIMIT)
        for reader in readers:
            assert reader.result() == messages


def read_all(ring: ShmRingBuffer, index: int, count: int) -> list[bytes]:
    reader = ring.reader(index)
    return [reader.receive(LIMIT) for _ in range(count)]


def test_several_messages_wait_in_the_ring() -> None:
    ring = ShmRingBuffer.create(num_readers=1, capacity=1 << 12)
    writer, reader = ring.writer(), ring.reader(0)
    assert not reader.ready
    for number in range(10):
        writer.send(bytes([number]))
    assert reader.ready
    assert [reader.receive() for _ in range(10)] == [bytes([number]) for number in range(10)]
    assert not reader.ready


def test_counts_pass_two_to_the_32() -> None:
    ring = ShmRingBuffer.create(num_readers=1, capacity=64)
    writer, reader = ring.writer(), ring.reader(0)
    start = 2**32 - 100  # as if this many bytes had passed through
    for line in (16, 32):
        ring.memory.words[line] = start
    writer._written = reader._read = start
    for number in range(60):
        writer.send(bytes([number]) * 9, LIMIT)
        assert reader.receive(LIMIT) == bytes([number]) * 9
    assert writer._written < 1000


def test_waits_have_a_limit() -> None:
    ring = ShmRingBuffer.create(num_readers=1, capacity=64)
    with pytest.raises(TimeoutError):
        ring.reader(0).receive(0.01)
    with pytest.raises(TimeoutError):
        ring.writer().send(b"x" * 100, 0.01)


def test_closing_ends_the_waits_of_readers_and_writer() -> None:
    empty, full = ShmRingBuffer.create(num_readers=2, capacity=64), ShmRingBuffer.create(num_readers=1, capacity=64)
    waiting = [
        lambda: empty.reader(0).receive(LIMIT),
        lambda: empty.reader(1).receive(None),
        lambda: full.writer().send(b"x" * 100, LIMIT),
    ]
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(wait) for wait in waiting]
        empty.close()
        full.close()
        for future in found:
            with pytest.raises(ChannelClosed):
                future.result(LIMIT)


def test_what_was_written_before_the_closing_can_still_be_read() -> None:
    ring = ShmRingBuffer.create(num_readers=1, capacity=64)
    ring.writer().send(b"last words")
    ring.close()
    reader = ring.reader(0)
    assert reader.receive() == b"last words"
    with pytest.raises(ChannelClosed):
        reader.receive()


ECHO = """
import sys
from serve_llm.engine.parallel.shm_ring import ShmRingBuffer
from serve_llm.engine.parallel.shm import ChannelClosed, ShmHandle
there, back = (ShmRingBuffer.open(ShmHandle(int(sys.argv[1]), int(fd), int(size))) for fd, size in
               (pair.split(":") for pair in sys.argv[2:]))
reader, writer = there.reader(0), back.writer()
try:
    while True:
        writer.send(reader.receive(120)[::-1], 120)
except ChannelClosed:
    print("closed")
"""


def test_another_process_opens_it_by_its_handle_and_nothing_has_a_name() -> None:
    before = set(Path("/dev/shm").iterdir())
    there, back = ShmRingBuffer.create(1, 64), ShmRingBuffer.create(1, 64)
    places = [f"{ring.memory.handle.fd}:{ring.memory.handle.size}" for ring in (there, back)]
    command = [sys.executable, "-P", "-c", ECHO, str(os.getpid()), *places]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        writer, reader = there.writer(), back.reader(0)
        for message in (b"", b"abc", bytes(range(256)) * 40):
            writer.send(message, LIMIT)
            assert reader.receive(LIMIT) == message[::-1]
        there.close()
        assert process.communicate(timeout=LIMIT)[0] == "closed\n"
    assert not [path for path in set(Path("/dev/shm").iterdir()) - before if "serve-llm" in path.name]


def test_a_creator_that_is_gone_is_an_error_and_files_are_closed() -> None:
    memory = SharedMemory.create(64)
    handle = memory.handle
    del memory
    gc.collect()
    with pytest.raises(EngineError, match=r"cannot open the shared memory of process \d+"):
        SharedMemory.open(ShmHandle(handle.pid, 10**6, 64))
    assert not os.path.exists(f"/proc/self/fd/{handle.fd}") or "serve-llm" not in os.readlink(
        f"/proc/self/fd/{handle.fd}"
    )


def test_a_sleeping_reader_is_woken() -> None:
    ring = ShmRingBuffer.create(num_readers=1, capacity=64)
    reader, writer = ring.reader(0), ring.writer()
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(reader.receive(LIMIT)))
    thread.start()
    asleep = 2 * 16 + 1
    while not ring.memory.words[asleep]:
        assert thread.is_alive()
    writer.send(b"up")
    thread.join(LIMIT)
    assert got == [b"up"]
