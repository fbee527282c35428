"""`NativeCopies`: the brain's queue served by the native library's thread, which never needs Python's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from foreload.backend.cuda.issue import Blocks, Issuer
from foreload.backend.experts.link import Order
from foreload.backend.experts.transfer import Copies, CopySpan
from foreload.backend.policy import Brain
from foreload.backend.policy.calls import QueueCalls
from foreload.backend.policy.state import DECODE, IN_FLIGHT, LANDED, PolicyState

MOST_SPANS = 1 << 20


class BrainLock:
    """The lock under which the brain is used, as a context manager; leaving it serves the queue if asked to."""

    def __init__(self, issuer: Issuer, before_release: Callable[[], None]) -> None:
        self._issuer, self._before_release = issuer, before_release
        self._kicked = False
        self._owner = 0

    def __enter__(self) -> None:
        self._issuer.lock()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        try:
            self._before_release()
        finally:
            kicked, self._kicked, self._owner = self._kicked, False, 0
            self._issuer.unlock(kicked)

    @property
    def held(self) -> bool:
        """Whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def notify_all(self) -> None:
        """Something may have been queued: issue it when the lock is let go."""
        self._kicked = True


class NativeCopies(Copies):
    """Copies by the native library. Kernels may be queued on a copy that is only issued."""

    usable = (IN_FLIGHT, LANDED)

    def __init__(self, brain: Brain, issuer: Issuer, calls: QueueCalls, blocks: Callable[[], Blocks]) -> None:
        """`blocks()`: where expert blocks are now; asked again whenever the brain's state is a new one."""
        self.brain, self.issuer = brain, issuer
        self.lock = BrainLock(issuer, self._follow)
        self.threads = []
        self._calls, self._find_blocks = calls, blocks
        self._bound: PolicyState | None = None
        self._phase, self._recording = DECODE, False
        with self.lock:
            self._follow()

    def _follow(self) -> None:
        """Serve the brain's state, if it is not the one that is served (lock held)."""
        if self.brain.state is not self._bound:
            self.blocks = self._find_blocks()
            self.issuer.bind(self._calls, self.brain.state, self.blocks)
            self._bound = self.brain.state

    @property
    def phase(self) -> int:
        """In which phase copies are counted."""
        return self._phase

    @phase.setter
    def phase(self, phase: int) -> None:
        self._phase = phase
        with self._locked():
            self.issuer.phase(phase)

    @property
    def spans(self) -> list[CopySpan] | None:
        """Copies as they were measured, while they are recorded."""
        if not self._recording:
            return None
        with self._locked():
            return [CopySpan(*span) for span in self.issuer.spans().tolist()]

    @spans.setter
    def spans(self, wanted: list[CopySpan] | None) -> None:
        self._recording = wanted is not None
        with self._locked():
            self.issuer.record_spans(MOST_SPANS if self._recording else 0)

    def _locked(self) -> BrainLock | _Nothing:
        return _Nothing() if self.lock.held else self.lock

    def kick(self) -> None:
        """Something may have been queued (`lock` held): it is issued when the lock is let go."""
        self.lock.notify_all()

    def take_ready(self, keys: Collection[int]) -> int:
        """Wait until a copy among `keys` is issued; returns the first in link order."""
        chosen = _array(keys)
        return int(chosen[self.issuer.take_ready(chosen)])

    def wait_landed(self, keys: Collection[int]) -> None:
        """Wait until all of `keys` have landed."""
        if keys:
            self.issuer.wait_landed(_array(keys))

    def settle(self) -> None:
        """Wait until nothing is in flight (`lock` held, after `brain.quiesce`)."""
        self.issuer.settle()

    def close(self) -> None:
        """Stop serving; copies in flight are waited for."""
        self.issuer.close()


class _Nothing:
    """A context manager that does nothing."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _array(keys: Collection[int]) -> NDArray[np.int64]:
    return np.fromiter(keys, np.int64, len(keys))


class NativeOrder(Order):
    """Kernels of one compute stream ordered against the copies."""

    asynchronous = True

    def __init__(self, copies: NativeCopies, stream: Callable[[], int]) -> None:
        """`stream()`: the stream that kernels are queued on now."""
        self._copies, self._stream = copies, stream

    def slot_used(self, slots: list[int]) -> None:
        """See `Order`."""
        if slots:
            with self._copies._locked():
                self._copies.issuer.slot_used(np.asarray(slots, np.int32), self._stream())

    def when_landed(self, slot: int) -> None:
        """See `Order`."""
        self._copies.issuer.when_landed(slot, self._stream())
