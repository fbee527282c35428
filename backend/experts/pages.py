"""Pages of memory that is streamed: huge ones, which the processor finds more quickly, and all of them at once."""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)
"""Where the system knows it (Linux)."""
POPULATE = 23
"""MADV_POPULATE_WRITE, since Linux 5.14."""
PART = 256 << 20
"""Bytes that a thread asks for at once."""


def _pages(memory: Tensor) -> range:
    """Addresses of `memory` from its first whole page on, in steps of PART."""
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    return range(start, memory.data_ptr() + memory.numel(), PART)


def prefer_huge_pages(memory: Tensor) -> None:
    """Ask for them, for uint8 memory that has not been written yet; a system that grants none changes nothing."""
    pages = _pages(memory)
    if ADVICE is not None and pages:
        _advise(pages.start, pages.stop - pages.start, ADVICE)


def populate(memory: Tensor, threads: int) -> None:
    """Have the system back uint8 `memory` with pages now, by so many threads; what was written stays.

    Registering memory for DMA does it too, on one thread. A system that does not know this changes nothing.
    """
    pages = _pages(memory)
    if ADVICE is not None and pages:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda at: _advise(at, min(PART, pages.stop - at), POPULATE), pages))


def _advise(start: int, size: int, advice: int) -> int:
    return int(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), advice))
