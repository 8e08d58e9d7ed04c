"""Anonymous shared memory of one host's processes, and waiting for a word of it to change.

It has no name: whoever knows the creator's process and file number opens it, and it is gone with the last process that
has it, however that ends. Ranks may outnumber cores, so waits look for a moment, offering their core to others between
two looks, and then sleep (futex(2)). Knows nothing of what lies in the memory but its first word: whether it is closed.
No torch.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import time

import msgspec

from serve_llm.engine.errors import EngineError, PeerLost

CLOSED = 0  # index of the word that ends all waits
LINE = 16  # words (of 4 bytes) in a cache line; words that different processes write lie in different lines

SPIN_SECONDS = 50e-6  # a look costs 0.5 us, going to sleep and being woken 30 us or more
FIRST_NAP, LONGEST_NAP = 0.001, 0.1  # seconds; a wake-up that was missed, or a closing, is noticed after so long

_IN_ORDER = platform.machine() == "x86_64"  # whether this processor keeps the order of writes
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_syscall = ctypes.CDLL(None).syscall
_POINTER = ctypes.c_void_p
_syscall.argtypes = (ctypes.c_long, _POINTER, ctypes.c_int, ctypes.c_uint32, _POINTER, _POINTER, _POINTER)


CLOSED_MESSAGE = "the connection between ranks was closed"


class Closed(PeerLost):
    """The memory was closed: someone in this group of processes has ended or failed, and said so elsewhere."""


class Handle(msgspec.Struct, frozen=True, array_like=True):
    """Where another process of this host finds a memory."""

    pid: int
    fd: int
    size: int  # bytes


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Memory:
    """Zeros at first. `words`: as unsigned 32-bit numbers; `bytes`: the same memory; `address`: where it begins."""

    def __init__(self, handle: Handle, fd: int) -> None:
        """Takes fd over. Use `create` or `open`."""
        if _FUTEX is None:
            raise EngineError(f"several ranks on one host are not supported on {platform.machine()} machines")
        self.handle = handle
        self._fd = fd
        self._map = mmap.mmap(fd, handle.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.bytes = memoryview(self._map)
        self.words = self.bytes.cast("I")

    @classmethod
    def create(cls, size: int) -> Memory:
        """size: bytes, a multiple of 4."""
        fd = os.memfd_create("serve-llm", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(Handle(os.getpid(), fd, size), fd)

    @classmethod
    def open(cls, handle: Handle) -> Memory:
        """A memory that another process of this host and user made. Raises EngineError if that process is gone."""
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
        """End all waits on this memory, in every process, with Closed; each notices within LONGEST_NAP."""
        self.words[CLOSED] = 1

    def wait(self, index: int, seen: int, asleep: int, deadline: float | None) -> None:
        """Return once the word at `index` differs from `seen`.

        asleep: index of the word that tells whoever changes the other one that it must `wake`.
        deadline: on time.monotonic's scale. Raises TimeoutError when it is past, Closed when the memory is closed.
        """
        words = self.words
        spin_until = time.perf_counter() + SPIN_SECONDS
        while words[index] == seen and time.perf_counter() < spin_until:
            os.sched_yield()
        nap = FIRST_NAP
        while words[index] == seen:
            if words[CLOSED]:
                raise Closed(CLOSED_MESSAGE)
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError
            words[asleep] = 1
            limit = _Timespec(0, int(nap * 1e9))
            _syscall(_FUTEX, self.address + 4 * index, _WAIT, seen, ctypes.addressof(limit), None, None)
            words[asleep] = 0
            nap = min(2 * nap, LONGEST_NAP)

    def wake(self, index: int) -> None:
        """Wake whoever sleeps until this word changes."""
        _syscall(_FUTEX, self.address + 4 * index, _WAKE, _ALL, None, None, None)

    def fence(self) -> None:
        """What was written before becomes visible before what is written after, and likewise for what is read: where
        the processor does not keep that order, by waking nobody, since the kernel has a full barrier there."""
        if not _IN_ORDER:
            self.wake(CLOSED)
