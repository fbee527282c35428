"""Where helper threads run: off the decoding thread's core, so that waking one never makes the other wait."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable
from contextlib import suppress


def keep_apart(helpers: Iterable[threading.Thread]) -> None:
    """Let `helpers` run on the cores this process may use, except the one the calling thread is on.

    Does nothing with a single core, or where threads cannot be placed.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    others = os.sched_getaffinity(0) - {ctypes.CDLL(None).sched_getcpu()}
    if not others:
        return
    for helper in helpers:
        if helper.native_id is not None and helper.is_alive():
            with suppress(OSError):  # not allowed, or the helper has just ended
                os.sched_setaffinity(helper.native_id, others)
