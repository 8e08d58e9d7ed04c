"""Memory of freed tensors on a CPU. Torch-free.

By default, glibc returns freed memory to the system, so that the tensors of each step are new pages, which the system
fills with zeros. For steps of a thousand tokens of a small model, this takes a fifth of the processor time.
"""

from __future__ import annotations

import ctypes

# The parameters of glibc's mallopt.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# Bytes that a process keeps at the end of its heap, enough for the intermediate results of a step of a small model.
MAX_KEPT = 128 << 20
LARGEST_KEPT = 32 << 20  # bytes of a tensor, the most that glibc allows; larger ones always get new pages


def keep_freed_memory() -> None:
    """Let this process keep what it frees, up to MAX_KEPT. Call after the weights are loaded. Without glibc, this does
    nothing."""
    if mallopt := _find("mallopt"):
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, MAX_KEPT)


def return_freed_memory() -> None:
    """Return what this process keeps to the system. For a process without work; takes milliseconds."""
    if trim := _find("malloc_trim"):
        trim(ctypes.c_size_t(0))


def _find(name: str) -> ctypes._FuncPointer | None:
    """Return the C library's function of this name, or None if there is none."""
    try:
        found: ctypes._FuncPointer = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return None
    return found
