"""Huge pages for memory that is streamed: the processor then finds its pages more quickly."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
"""Where the system knows it (Linux)."""


def prefer_huge_pages(memory: Tensor) -> None:
    """Ask for them, for uint8 memory that has not been written yet; a system that grants none changes nothing."""
    if ADVICE is None:
        return
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = memory.data_ptr() + memory.numel() - start
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ADVICE)
