"""All-reduce and all-gather over the ranks of one host, by the compiled library (collectives.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.kernels.cpu.library import check_sources

SLOT_UNIT = 64  # bytes: a cache line
CLOSED = -1


class Group(ctypes.Structure):
    """`Group` in collectives.cpp."""

    _fields_ = (
        ("windows", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("seconds", ctypes.c_double),
        ("ranks", ctypes.c_int),
        ("rank", ctypes.c_int),
    )


class RankTimeout(Exception):
    """A rank did not arrive in time."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class WindowClosed(Exception):
    """The shared memory was closed."""


class Collectives:
    """The calls of one rank. All ranks of the group make the same calls in the same order, with equal sizes."""

    def __init__(self, path: Path, windows: Sequence[int], window_bytes: int, rank: int, seconds: float) -> None:
        """path: of the library. windows: by rank, the address of window_bytes of memory that all ranks share, aligned
        to 64 bytes and initially zero, except for the first 64 bytes, which belong to the caller; a non-zero value in
        the first 4 ends all waits. The memory must outlive this object. seconds: limit for a rank to answer.

        Raises OSError if the file cannot be loaded, ValueError if the windows are too small.
        """
        library = ctypes.CDLL(str(path))
        check_sources(library, "group", ctypes.sizeof(Group))
        self._sum = library.serve_llm_all_reduce
        self._gather = library.serve_llm_all_gather
        self._sum.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
        self._gather.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        slot_bytes = (window_bytes - library.serve_llm_window_header()) // 2 // SLOT_UNIT * SLOT_UNIT
        if slot_bytes < SLOT_UNIT:
            raise ValueError(f"windows of {window_bytes} bytes are too small")
        self._windows = (ctypes.c_void_p * len(windows))(*windows)
        self._group = Group(ctypes.addressof(self._windows), slot_bytes, seconds, len(windows), rank)
        self._address = ctypes.addressof(self._group)

    def all_reduce(self, x: Tensor) -> None:
        """x becomes the sum of all ranks' x, added in rank order in float32 and rounded once.

        x: contiguous, float32 or bfloat16. Raises WindowClosed and RankTimeout.
        """
        if result := self._sum(self._address, x.data_ptr(), x.numel(), x.dtype == torch.bfloat16):
            raise _failure(result)

    def all_gather(self, x: Tensor) -> Tensor:
        """Gather every rank's x (contiguous, any dtype), in rank order: (ranks, *x.shape). Raises WindowClosed and
        RankTimeout."""
        parts = torch.empty((len(self._windows), *x.shape), dtype=x.dtype)
        if result := self._gather(self._address, x.data_ptr(), parts.data_ptr(), x.nbytes):
            raise _failure(result)
        return parts


def _failure(result: int) -> Exception:
    return WindowClosed() if result == CLOSED else RankTimeout(result - 1)
