"""Where helper threads run: off the decoding thread's core, so that waking one never makes the other wait."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Collection, Iterable
from contextlib import suppress


def other_cores() -> set[int]:
    """The cores this process may use, except the one the calling thread is on.

    Empty with a single core, or where threads cannot be placed.
    """
    if not hasattr(os, "sched_setaffinity"):
        return set()
    return os.sched_getaffinity(0) - {ctypes.CDLL(None).sched_getcpu()}


def place_threads(threads: Iterable[threading.Thread], cores: Collection[int]) -> None:
    """Let `threads` run on `cores` alone; nothing happens where they cannot be placed."""
    if not cores:
        return
    for thread in threads:
        if thread.native_id is not None and thread.is_alive():
            with suppress(OSError):  # not allowed, or the thread has just ended
                os.sched_setaffinity(thread.native_id, cores)
