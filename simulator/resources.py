"""What works at the same time in the simulated machine: the link, the CPU pool and the GPU stream, sharing memory.

Times are integer nanoseconds of the SimPy clock. Link, CPU pool and expert kernels slow each other while CPU experts
run (fluid sharing): work is kept as nanoseconds x SCALE; when membership changes, each remainder shrinks by rate x
elapsed, rounded down, and its completion is rounded up. At equal times jobs complete before the host goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import simpy
from simpy.events import EventPriority

from foreload.backend.policy import Brain
from foreload.backend.policy.state import AHEAD, DECODE, DEMAND, PREFETCH, UPLOAD
from foreload.simulator.costs import SCALE, CostModel
from foreload.simulator.graph_costs import DeviceTimes
from foreload.simulator.lookup import on_line
from foreload.simulator.timeline import Timeline
from foreload.simulator.variation import GOLDEN, SILVER, in_turn

LINK, CPU, GPU = 0, 1, 2
_KINDS = {DEMAND: "fetch", PREFETCH: "prefetch", AHEAD: "prefetch", UPLOAD: "upload"}
HOST_LAST = EventPriority(2)
"""Event priority of the host: after every completion of the same nanosecond."""

Process = Generator[simpy.Event, Any, None]


class Clockwork(simpy.Environment):
    """A SimPy environment whose clock counts whole nanoseconds."""

    @property
    def now(self) -> int:
        """Simulated nanoseconds since the start."""
        return cast(int, self._now)


def fire(event: simpy.Event, delay_ns: int = 0) -> simpy.Event:
    """Trigger `event` after `delay_ns`, behind everything else that happens then."""
    event._ok = True
    event._value = None
    event.env.schedule(event, priority=HOST_LAST, delay=delay_ns)
    return event


class _Job:
    """One running piece of work."""

    __slots__ = ("active", "done", "experts", "generation", "rate", "remaining", "since")

    def __init__(self) -> None:
        self.active = False
        self.generation = 0
        self.remaining, self.rate, self.since, self.experts = 0, 0, 0, 0
        self.done: Callable[[], object] = lambda: None


class Sharing:
    """Processor sharing between at most one copy, one CPU batch and one group of GPU experts."""

    def __init__(self, env: Clockwork, costs: CostModel, threads: int) -> None:
        self._env = env
        self._costs = costs
        self._threads = threads
        self._jobs = (_Job(), _Job(), _Job())

    def active(self, which: int) -> bool:
        """Whether LINK, CPU or GPU has work."""
        return self._jobs[which].active

    def start(self, which: int, work_ns: int, done: Callable[[], object], experts: int = 0) -> None:
        """Run `work_ns` (alone) on `which`, which is idle; `done` is called on completion."""
        job = self._jobs[which]
        job.active, job.remaining, job.rate, job.since = True, work_ns * SCALE, 0, self._env.now
        job.done, job.experts = done, experts
        if which == CPU or self._jobs[CPU].active:
            self._replan()
        else:
            job.rate = SCALE
            self._arm(job)

    def _rate(self, which: int) -> int:
        link, cpu, gpu = self._jobs
        if not cpu.active:
            return SCALE
        if which == LINK:
            return self._costs.copy_rate(self._threads)
        rate = SCALE
        if gpu.active:
            rate = self._costs.both_rate(gpu.experts, cpu.experts, self._threads)
        if which == CPU and link.active:
            rate = max(1, rate * self._costs.cpu_rate(cpu.experts, self._threads) // SCALE)
        return rate

    def _replan(self) -> None:
        now = self._env.now
        for which, job in enumerate(self._jobs):
            if not job.active:
                continue
            rate = self._rate(which)
            if rate != job.rate:
                job.remaining = max(0, job.remaining - job.rate * (now - job.since))
                job.rate, job.since = rate, now
                self._arm(job)

    def _arm(self, job: _Job) -> None:
        job.generation += 1
        generation = job.generation
        timeout = self._env.timeout(-(-job.remaining // job.rate))
        timeout.callbacks.append(lambda _: self._expire(job, generation))

    def _expire(self, job: _Job, generation: int) -> None:
        if job.generation != generation:
            return
        job.active = False
        job.generation += 1
        if job is self._jobs[CPU] or self._jobs[CPU].active:
            self._replan()
        job.done()


class Link:
    """Serves the brain's queue: a window of two in the stream, one transfer at a time, first in first out."""

    def __init__(
        self,
        env: Clockwork,
        sharing: Sharing,
        brain: Brain,
        costs: CostModel,
        timeline: Timeline,
        working: Callable[[], bool],
        times: DeviceTimes,
        varies: Sequence[int],
    ) -> None:
        """`working()` says whether the host is at work now, and not waiting; `varies`: factors of SCALE that copies
        which begin beside CPU experts have in turn.
        """
        self._working, self._times = working, times
        self._varies, self._beside = varies, 0
        self.phase = DECODE
        self.issued: deque[int] = deque()  # keys in the stream, the transferring one first
        self.log: list[int] = []  # keys in the order of issue since `watch`
        self.landed_at: dict[int, int] = {}
        self.interruptions = 0  # copies that landed, or that it had to issue then, while the host was working
        self._env, self._sharing, self._brain, self._timeline = env, sharing, brain, timeline
        self._copy_ns, self._bytes = costs.copies_ns, costs.layer_bytes
        self._landing: dict[int, simpy.Event] = {}
        self._issue: simpy.Event | None = None
        self._kinds: dict[int, str] = {}  # as issued; a demand may have joined since
        self._begun = 0

    @property
    def busy(self) -> bool:
        """Whether a copy is in the stream."""
        return bool(self.issued)

    def watch(self) -> None:
        """Start a new `log`, beginning with what is in the stream."""
        self.log = list(self.issued)
        self.landed_at.clear()

    def pump(self) -> int:
        """Issue what the window admits; how many copies that were."""
        issued = 0
        while self._brain.can_issue():
            key = self._brain.next_copy(self.phase)
            self.issued.append(key)
            self.log.append(key)
            if self._timeline.on:
                self._kinds[key] = _KINDS[int(self._brain.state.purpose.flat[key])]
            if len(self.issued) == 1:
                self._transfer(self._times.copy_start_ns)
            if self._issue is not None:
                fire(self._issue)
                self._issue = None
            issued += 1
        return issued

    def next_issue(self) -> simpy.Event:
        """Fires when the next copy is issued."""
        if self._issue is None:
            self._issue = self._env.event()
        return self._issue

    def landing(self, key: int) -> simpy.Event:
        """Fires when the copy of `key`, queued or in the stream, has arrived."""
        return self._landing.setdefault(key, self._env.event())

    def _transfer(self, start_ns: int = 0) -> None:
        self._begun = self._env.now
        work_ns = self._copy_ns[self.issued[0] // self._brain.shape.experts]
        if self._sharing.active(CPU):
            work_ns = work_ns * in_turn(self._varies, self._beside, SILVER) // SCALE
            self._beside += 1
        self._sharing.start(LINK, work_ns + start_ns, self._arrived)

    def _arrived(self) -> None:
        key = self.issued.popleft()
        working = self._working()
        if self._timeline.on:
            self._record(key)
        self._brain.complete(key)
        self.landed_at[key] = self._env.now
        if self.issued:
            self._transfer()
        issued = self.pump()
        self.interruptions += working * (issued if self._times.driven else 1)
        waiter = self._landing.pop(key, None)
        if waiter is not None:
            fire(waiter)

    def _record(self, key: int) -> None:
        layer, expert = divmod(key, self._brain.shape.experts)
        kind = self._kinds.pop(key)
        self._timeline.add("link", kind, self._begun, self._env.now, layer, expert, self._bytes[layer])


class CpuPool:
    """Computes one batch of experts at a time on `threads` threads."""

    def __init__(
        self,
        env: Clockwork,
        sharing: Sharing,
        costs: CostModel,
        threads: int,
        timeline: Timeline,
        times: DeviceTimes,
    ) -> None:
        self._env, self._sharing, self._costs, self._threads = env, sharing, costs, threads
        self._timeline, self._times = timeline, times
        self._rested_since = -times.rest_ns - 1  # its workers sleep at first
        self._varies, self._batches = costs.varies("experts_cpu", threads), 0
        self._told_ns, self._saved = 0, times.read_ahead
        self._result: simpy.Event | None = None

    @property
    def busy(self) -> bool:
        """Whether a batch is running."""
        return self._sharing.active(CPU)

    def tell(self) -> None:
        """The workers hear what to read ahead."""
        self._told_ns = self._env.now

    def start(self, experts: int, layer: int, tokens: int = 0, read: bool = False) -> None:
        """Hand `experts` experts over; `tokens` as for `CostModel.experts_gpu`, `read`: one was to be read ahead."""
        begun = self._env.now

        def done() -> None:
            self._timeline.add("cpu", "experts_cpu", begun, self._env.now, layer)
            self._rested_since = self._env.now
            if self._result is not None:
                fire(self._result)
                self._result = None

        varied = in_turn(self._varies, self._batches, GOLDEN)
        work_ns = self._costs.at(layer).experts_cpu_ns(experts, self._threads, tokens) * varied // SCALE
        self._batches += 1
        if begun - self._rested_since > self._times.rest_ns:
            work_ns += self._times.asleep_ns
        if read:
            idle_ns = begun - max(self._rested_since, self._told_ns)
            work_ns = max(1, work_ns - on_line(self._saved, idle_ns))
        self._sharing.start(CPU, work_ns, done, experts)

    def result(self) -> simpy.Event:
        """Fires when the running batch is done."""
        self._result = self._env.event()
        return self._result
