"""Anonymous shared memory between processes of one host, with waits for a word in it to change.

The memory has no name: a process opens it by the creator's pid and file descriptor, and it is freed when the last
process that has it ends. Ranks may outnumber cores, so a wait first polls, yielding its core between polls, and then
sleeps by futex(2). The first word says whether the memory is closed; users define the rest. No torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time

import msgspec

from serve_llm.common.errors import EngineError, PeerLost

CLOSED = 0  # index of the word that ends all waits
LINE = 16  # words (of 4 bytes) in a cache line; words that different processes write are in different lines

SPIN_SECONDS = 50e-6  # a poll costs 0.5 us, sleeping and waking 30 us or more
FIRST_NAP, LONGEST_NAP = 0.001, 0.1  # seconds; limits the delay after a missed wake-up or a close

_IN_ORDER = platform.machine() == "x86_64"  # whether other processors see writes in order
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT = 0  # FUTEX_WAIT
_WAKE = 1  # FUTEX_WAKE
_ALL = 2**31 - 1  # wakes every waiter
_syscall = ctypes.CDLL(None).syscall
_POINTER = ctypes.c_void_p
_syscall.argtypes = (ctypes.c_long, _POINTER, ctypes.c_int, ctypes.c_uint32, _POINTER, _POINTER, _POINTER)


CLOSED_MESSAGE = "the connection between ranks was closed"


class ChannelClosed(PeerLost):
    """The memory was closed because a process of the group has ended or failed. The cause is reported elsewhere."""


class ShmHandle(msgspec.Struct, frozen=True, array_like=True):
    """Where other processes of this host find a shared memory."""

    pid: int
    fd: int
    size: int  # bytes


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class SharedMemory:
    """Zero-filled at first. words: the memory as uint32. bytes: the same as bytes. address: of its first byte."""

    def __init__(self, handle: ShmHandle, fd: int) -> None:
        """Takes ownership of fd. Use `create` or `open`."""
        if _FUTEX is None:
            raise EngineError(f"several ranks on one host are not supported on {platform.machine()} machines")
        self.handle = handle
        self._fd = fd
        self._map = mmap.mmap(fd, handle.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("I")

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        """size: bytes, a multiple of 4."""
        fd = os.memfd_create("serve-llm", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(ShmHandle(os.getpid(), fd, size), fd)

    @classmethod
    def open(cls, handle: ShmHandle) -> SharedMemory:
        """Open the memory of another process of this host and user. Raises EngineError if that process is gone."""
        try:
            fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise EngineError(f"cannot open the shared memory of process {handle.pid}: {error.strerror}") from None
        return cls(handle, fd)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def closed(self) -> bool:
        return bool(self.words[CLOSED])

    def close(self) -> None:
        """End all waits on this memory, in every process and within LONGEST_NAP, with ChannelClosed."""
        self.words[CLOSED] = 1

    def wait(self, index: int, seen: int, asleep: int, deadline: float | None) -> None:
        """Return once the word at `index` differs from `seen`.

        asleep: index of the word that is 1 while this process sleeps, which tells the writer of `index` to call `wake`.
        deadline: in time.monotonic() seconds. Raises TimeoutError, and ChannelClosed when the memory is closed.
        """
        words = self.words
        spin_until = time.perf_counter() + SPIN_SECONDS
        while words[index] == seen and time.perf_counter() < spin_until:
            os.sched_yield()
        nap = FIRST_NAP
        while words[index] == seen:
            if words[CLOSED]:
                raise ChannelClosed(CLOSED_MESSAGE)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            words[asleep] = 1
            limit = _Timespec(0, int(nap * 1e9))
            _syscall(_FUTEX, self.address + 4 * index, _WAIT, seen, ctypes.addressof(limit), None, None)
            words[asleep] = 0
            nap = min(2 * nap, LONGEST_NAP)

    def wake(self, index: int) -> None:
        """Wake the processes that sleep until this word changes."""
        _syscall(_FUTEX, self.address + 4 * index, _WAKE, _ALL, None, None, None)

    def fence(self) -> None:
        """A full memory barrier. Where the processor needs one, wake no process: the system call has a barrier."""
        if not _IN_ORDER:
            self.wake(CLOSED)
