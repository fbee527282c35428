"""Taking turns: a decoding thread that lets others act between two tokens."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock with two kinds of holders. A thread that takes `turn` after `turn` waits while a `guest` wants in.

    A plain lock would be taken again by the decoding thread before a waiting one has woken.
    """

    PAUSE_S = 1e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = threading.Lock()
        self._guests = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the lock for one of many turns."""
        while self._guests:
            time.sleep(self.PAUSE_S)
        with self._lock:
            yield

    @contextmanager
    def guest(self) -> Iterator[None]:
        """Hold the lock between two turns."""
        with self._count:
            self._guests += 1
        try:
            with self._lock:
                yield
        finally:
            with self._count:
                self._guests -= 1
