"""The copy thread: serves the brain's queue over a link and tells the decoding thread what it may use."""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from foreload.backend.experts.link import Link
from foreload.backend.experts.pool import SlotPool
from foreload.backend.experts.slab import HostSlab
from foreload.backend.policy import Brain
from foreload.backend.policy.copies import WINDOW
from foreload.backend.policy.state import DECODE, IN_FLIGHT, LANDED, QUEUED
from foreload.errors import InternalError

PR_SET_TIMERSLACK = 29
SPINS = 2000


@dataclass(frozen=True)
class CopySpan:
    """One copy as measured, in perf_counter nanoseconds; `purpose` as in `policy.state` when it was issued."""

    key: int
    purpose: int
    issued_ns: int
    landed_ns: int


def followed(spans: Iterable[CopySpan]) -> list[tuple[int, int]]:
    """When copies landed and when each that was issued before then did behind them, nanoseconds, in order."""
    ordered = sorted(spans, key=lambda span: span.landed_ns)
    return [(a.landed_ns, b.landed_ns) for a, b in pairwise(ordered) if b.issued_ns < a.landed_ns]


class Copies(ABC):
    """Serves a brain's queue. Everything that touches the brain holds `lock`."""

    brain: Brain
    lock: Any
    """A context manager; `notify_all` tells the server that something may have been queued."""
    phase: int
    """In which phase copies are counted."""
    spans: list[CopySpan] | None
    """Copies as they were measured, while this is not None."""
    threads: list[threading.Thread]
    """Serving threads that are Python's."""
    usable: tuple[int, ...] = (LANDED,)
    """What a copy's status is when the next kernel can use it."""

    @abstractmethod
    def kick(self) -> None:
        """Something may have been queued (`lock` held): have it issued."""

    @abstractmethod
    def take_ready(self, keys: Collection[int]) -> int:
        """Wait until a copy among `keys` can be used by the next kernel; returns the first in link order."""

    def take_all_ready(self, keys: Collection[int]) -> list[int]:
        """Wait until a copy among `keys` can be used by the next kernel; all that can, in the order given."""
        self.take_ready(keys)
        with self.lock:
            status = self.brain.state.status.reshape(-1)
            return [key for key in keys if status[key] in self.usable]

    @abstractmethod
    def wait_landed(self, keys: Collection[int]) -> None:
        """Wait until all of `keys` have landed."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until nothing is in flight (`lock` held, after `brain.quiesce`)."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving; copies in flight are waited for."""


class CopyThread(Copies):
    """Owns the lock under which the brain is used; everything that touches the brain holds `lock`.

    An asynchronous link (CUDA) lets the decoding thread go on once a copy is issued, a synchronous one once it landed.
    """

    def __init__(self, brain: Brain, slab: HostSlab, pool: SlotPool, link: Link) -> None:
        self.brain = brain
        self.lock = threading.Condition(threading.Lock())
        self.phase = DECODE
        self.spans = None
        self._slab, self._pool, self._link = slab, pool, link
        self.usable = (IN_FLIGHT, LANDED) if link.asynchronous else (LANDED,)
        self._wake_on_issue = link.asynchronous
        self._order: dict[int, int] = {}  # key -> when it was last issued
        self._issued: dict[int, tuple[int, int]] = {}  # key -> (purpose, when) of a copy whose span is wanted
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="foreload-copy", daemon=True)
        self.threads = [self._thread]
        self._thread.start()

    def kick(self) -> None:
        """Something may have been queued (`lock` held): wake the thread if it can issue a copy."""
        if self.brain.can_issue():
            self.lock.notify_all()

    def take_ready(self, keys: Collection[int]) -> int:
        """Wait until a copy among `keys` can be used by the next kernel; returns the first in link order.

        Spins for the length of a few copies, since a sleeping thread wakes late and with cold caches.
        """
        for _ in range(SPINS):
            with self.lock:
                if (ready := self._ready(keys)) >= 0:
                    return ready
            time.sleep(0)
        with self.lock:
            while (ready := self._ready(keys)) < 0:
                self._wait()
            return ready

    def _ready(self, keys: Collection[int]) -> int:
        status = self.brain.state.status.reshape(-1)
        ready = [key for key in keys if status[key] in self.usable]
        return min(ready, key=self._order.__getitem__) if ready else -1

    def wait_landed(self, keys: Collection[int]) -> None:
        """Wait until all of `keys` have landed."""
        with self.lock:
            while any(self._status(key) in (QUEUED, IN_FLIGHT) for key in keys):
                self._wait()

    def settle(self) -> None:
        """Wait until nothing is in flight (`lock` held, after `brain.quiesce`)."""
        while self.brain.in_flight():
            self._wait()

    def close(self) -> None:
        """Stop the thread; copies in flight are waited for."""
        with self.lock:
            self._stopped = True
            self.lock.notify_all()
        self._thread.join()

    def _wait(self) -> None:
        if self._error is not None:
            raise InternalError(f"the copy thread stopped: {self._error}") from self._error
        self.lock.wait()

    def _status(self, key: int) -> int:
        return self.brain.status(*divmod(key, self.brain.shape.experts))

    def _run(self) -> None:
        # The default timer slack of 50 us would be a tenth of a small copy.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1000), 0, 0, 0)
        try:
            while self._serve():
                pass
        except BaseException as error:
            with self.lock:
                self._error = error
                self.lock.notify_all()

    def _serve(self) -> bool:
        """One round: report what has landed, issue what may be issued, sleep until either can change."""
        with self.lock:
            self._report(self._link.landed())
            self._issue()
            flying = self.brain.in_flight()
            if self._stopped and not flying:
                return False
            if flying < WINDOW:
                self.lock.wait(self._link.pause_s() if flying else None)
                return True
        self._link.block()
        return True

    def _issue(self) -> None:
        issued = False
        while (key := self.brain.next_copy(self.phase)) >= 0:
            layer, expert = divmod(key, self.brain.shape.experts)
            slot = self.brain.slot(layer, expert)
            if self.spans is not None:
                self._issued[key] = (int(self.brain.state.purpose[layer, expert]), time.perf_counter_ns())
            source = self._slab.block(layer, expert)
            self._link.issue(key, source, self._pool.slot(slot)[: len(source)], slot)
            self._order[key] = time.perf_counter_ns()
            issued = True
        if issued and self._wake_on_issue:
            self.lock.notify_all()

    def _report(self, keys: list[int]) -> None:
        for key in keys:
            self.brain.complete(key)
            if self.spans is not None and key in self._issued:
                self.spans.append(CopySpan(key, *self._issued.pop(key), time.perf_counter_ns()))
        if keys:
            self.lock.notify_all()
