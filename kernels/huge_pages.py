"""Asks the operating system to back a tensor on the host with huge pages: fewer page faults and table walks."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

SIZE = 2 << 20  # bytes of a huge page of x86-64, and of arm64 with small pages of 4 KiB
MADV_HUGEPAGE = 14  # <linux/mman.h>


def use_huge_pages(tensor: Tensor) -> None:
    """For a dense tensor that nobody has written to yet. Its pages stay lazy: memory grows with use, 2 MiB at a time.

    Does nothing where the system has no such pages; the first and the last bytes, less than a huge page, stay as they
    are."""
    begin = -(-tensor.data_ptr() // SIZE) * SIZE
    end = (tensor.data_ptr() + tensor.nbytes) // SIZE * SIZE
    if sys.platform == "linux" and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)
