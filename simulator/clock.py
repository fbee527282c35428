"""The decoding thread's clock: what it did with every nanosecond, by kind."""

from __future__ import annotations

from collections import defaultdict

import simpy

from foreload.simulator.resources import Clockwork, fire
from foreload.simulator.timeline import Timeline

WAIT_LINK, WAIT_ISSUE, WAIT_CPU, WAIT_GPU, WAKE = "wait_link", "wait_issue", "wait_cpu", "wait_gpu", "wake"
COLD, INTERRUPT = "cold", "interrupt"
"""Work that takes longer: the host's, after a wait that let its caches go cold, and for the copy thread's turns."""
STALLS = (WAIT_LINK, WAIT_ISSUE, WAIT_CPU, WAKE)
"""Kinds of time in which neither host nor GPU works: for a copy to land, for a place in the link's window, for CPU
experts, and from an arrival to going on. `wait_gpu` (an asynchronous GPU is still busy) is no stall."""

_SPANS = {COLD: "plan", INTERRUPT: "plan", WAIT_LINK: "wait", WAIT_ISSUE: "wait", WAKE: "wait", WAIT_GPU: "sync"}


class HostClock:
    """Runs ahead of the SimPy clock while nothing else is at work; `catch_up` brings both together."""

    def __init__(self, env: Clockwork, timeline: Timeline) -> None:
        self.now = 0
        self.time: defaultdict[str, int] = defaultdict(int)
        self.idle_ns = 0  # waited for copies since it was last reset
        self._env = env
        self._timeline = timeline

    @property
    def ahead(self) -> bool:
        """Whether the SimPy clock is behind."""
        return self._env.now < self.now

    def catch_up(self) -> simpy.Event:
        """Fires when the SimPy clock has reached this one."""
        return fire(self._env.event(), self.now - self._env.now)

    def spend(self, kind: str, duration_ns: int, layer: int = -1, expert: int = -1) -> None:
        """Let `duration_ns` pass on `kind`."""
        if duration_ns:
            self._timeline.add("host", _SPANS.get(kind, kind), self.now, self.now + duration_ns, layer, expert)
            self.time[kind] += duration_ns
            self.now += duration_ns

    def waited(self, kind: str, layer: int = -1, expert: int = -1) -> None:
        """Account for the time up to the SimPy clock as `kind`."""
        waited = max(0, self._env.now - self.now)
        if kind in (WAIT_LINK, WAIT_ISSUE):
            self.idle_ns += waited
        self.spend(kind, waited, layer, expert)
