"""Ask the operating system to back a host tensor with huge pages, for fewer page faults and page-table walks."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20  # on x86-64, and on arm64 with 4 KiB base pages
MADV_HUGEPAGE = 14  # <linux/mman.h>


def use_huge_pages(tensor: Tensor) -> None:
    """Request huge pages for a dense tensor before its first write.

    Pages are still allocated on first use, 2 MiB at a time. Partial huge pages at either end use small pages. Does
    nothing on systems without huge pages."""
    begin = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if sys.platform == "linux" and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_HUGEPAGE)
