"""Where resident experts and dense blocks run: on the decoding thread itself, or on a GPU that works behind it.

`HostDevice` is the machine without a GPU (`device=cpu`): one clock. `GpuDevice` has two: a block costs the host its
launch time, keeps the GPU busy for `gpu_ns`, and ends no earlier than its launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from foreload.simulator.clock import WAIT_GPU, WAIT_ISSUE, WAIT_LINK, WAKE, HostClock
from foreload.simulator.costs import SCALE, Cost, CostModel
from foreload.simulator.graph_costs import DeviceTimes, GraphCosts
from foreload.simulator.resources import CPU, GPU, Clockwork, Link, Process, Sharing, fire
from foreload.simulator.timeline import Timeline


class Device(ABC):
    """Runs blocks in order."""

    issue_wait: str
    """What waiting for a copy to enter the link counts as."""

    def __init__(
        self,
        env: Clockwork,
        costs: CostModel,
        sharing: Sharing,
        link: Link,
        clock: HostClock,
        timeline: Timeline,
        times: DeviceTimes,
    ) -> None:
        self._env, self._costs, self._sharing = env, costs, sharing
        self._link, self._clock, self._timeline = link, clock, timeline
        self._wake_ns = costs.cost("wait").host_ns
        self._times = times

    @abstractmethod
    def block(self, kind: str, cost: Cost, layer: int = -1, expert: int = -1) -> None:
        """Run (or launch) work that nothing slows down."""

    @abstractmethod
    def experts(self, count: int, layer: int, expert: int = -1, tokens: int = 0) -> Process:
        """Run (or launch) `count` resident experts; `tokens` as for `CostModel.experts_gpu`."""

    @abstractmethod
    def arrived(self, key: int, layer: int, expert: int, tokens: int = 0) -> Process:
        """Wait for a copy in the link, as far as the host must, and run (or launch) its expert."""

    @abstractmethod
    def sync(self) -> Process:
        """Wait until all blocks are done."""

    def landed(self, key: int, layer: int, expert: int) -> Process:
        """The host waits until the copy of `key`, in the link or queued for it, has arrived."""
        yield self._link.landing(key)
        self._clock.waited(WAIT_LINK, layer, expert)
        self._clock.spend(WAKE, self._wake_ns, layer, expert)


class HostDevice(Device):
    """The decoding thread computes everything itself."""

    issue_wait = WAIT_LINK

    def block(self, kind: str, cost: Cost, layer: int = -1, expert: int = -1) -> None:
        """Spend the time at once."""
        self._clock.spend(kind, cost.host_ns, layer, expert)

    def experts(self, count: int, layer: int, expert: int = -1, tokens: int = 0) -> Process:
        """Run them, slower while CPU experts run."""
        work_ns = self._costs.at(layer).experts_gpu_ns(count, tokens)
        if self._sharing.active(CPU):
            if self._clock.ahead:
                yield self._clock.catch_up()
            done = self._env.event()
            self._sharing.start(GPU, work_ns, partial(fire, done), count)
            yield done
            work_ns = self._env.now - self._clock.now
        self._clock.spend("experts_gpu", work_ns, layer, expert)

    def arrived(self, key: int, layer: int, expert: int, tokens: int = 0) -> Process:
        """Wait for the arrival, then run it."""
        if key not in self._link.landed_at:
            yield from self.landed(key, layer, expert)
        yield from self.experts(1, layer, expert, tokens)

    def sync(self) -> Process:
        """Nothing is ever pending."""
        yield from ()


@dataclass(slots=True)
class _Launch:
    kind: str
    layer: int
    expert: int
    begun_ns: int  # host time of the launch
    ended_ns: int  # it does not end before: the end of the launch, or what else it waits for
    work_ns: int
    experts: int = 0  # above 0: shares memory with CPU experts
    key: int = -1  # a copy it waits for, and
    landed_ns: int = -1  # when that has landed


class GpuDevice(Device):
    """A GPU stream fed by the decoding thread; it waits for copies by itself."""

    issue_wait = WAIT_ISSUE

    def __init__(
        self,
        env: Clockwork,
        costs: CostModel,
        sharing: Sharing,
        link: Link,
        clock: HostClock,
        timeline: Timeline,
        times: DeviceTimes,
    ) -> None:
        super().__init__(env, costs, sharing, link, clock, timeline, times)
        self._free_at = 0
        self._queue: deque[_Launch] = deque()
        self._blocked: list[tuple[int, int]] = []  # spans in which the stream waited for a copy, since the last sync
        self._work = env.event()
        self._drained = env.event()
        env.process(self._stream())

    def block(self, kind: str, cost: Cost, layer: int = -1, expert: int = -1) -> None:
        """Launch it."""
        self._launch(kind, cost, layer, expert)

    def experts(self, count: int, layer: int, expert: int = -1, tokens: int = 0) -> Process:
        """Launch them."""
        yield from ()
        self._launch("experts_gpu", self._costs.at(layer).experts_gpu(count, tokens), layer, expert, count)

    def arrived(self, key: int, layer: int, expert: int, tokens: int = 0) -> Process:
        """Launch it behind a wait of the stream."""
        yield from ()
        self._launch("experts_gpu", self._costs.at(layer).experts_gpu(1, tokens), layer, expert, 1, key)

    def goes_on(self, kind: str, gpu_ns: int, layer: int) -> int:
        """A stream in which nothing else is left goes on with what was launched last; when that is done."""
        begun = self._free_at
        self._free_at += self._slowed_ns(gpu_ns)
        self._timeline.add("gpu", kind, begun, self._free_at, layer)
        return self._free_at

    def behind_cpu(self, kind: str, gpu_ns: int, layer: int, launched_ns: int, rest_ns: int) -> None:
        """What was launched then: of it so much is left once the outputs of CPU experts are there, as they are now."""
        ended_ns = self._clock.now + self._slowed_ns(rest_ns)
        self._queued(_Launch(kind, layer, -1, launched_ns, ended_ns, gpu_ns))

    def _launch(self, kind: str, cost: Cost, layer: int, expert: int, experts: int = 0, key: int = -1) -> None:
        begun = self._clock.now
        self._clock.spend(kind, cost.host_ns, layer, expert)
        self._queued(_Launch(kind, layer, expert, begun, self._clock.now, cost.gpu_ns, experts, key))

    def _queued(self, launch: _Launch) -> None:
        key = launch.key
        if key in self._link.landed_at:
            launch.landed_ns = self._link.landed_at[key]
        elif key >= 0:  # a log that begins anew does not know of it when the stream comes there
            self._link.landing(key).callbacks.append(lambda _: self._note_landing(launch))
        plain = (key < 0 or launch.landed_ns >= 0) and not (launch.experts and self._sharing.active(CPU))
        if plain and not self._queue:
            start = self._start(launch)
            self._end(launch, start, start + self._slowed_ns(launch.work_ns))
            return
        self._queue.append(launch)
        if not self._work.triggered:
            fire(self._work)

    def _note_landing(self, launch: _Launch) -> None:
        launch.landed_ns = self._env.now

    def _landed(self, launch: _Launch) -> int:
        """When the copy that it waits for has landed; -1: it has not, or there is none."""
        return launch.landed_ns if launch.landed_ns >= 0 else self._link.landed_at.get(launch.key, -1)

    def _start(self, launch: _Launch) -> int:
        """When the stream can begin `launch`, whose copy (if any) has landed."""
        ready = max(self._free_at, launch.begun_ns + self._times.latency_ns)
        landed = self._landed(launch)
        if landed <= ready:
            return ready
        self._blocked.append((ready, landed + self._wake_ns))
        return landed + self._wake_ns

    def _slowed_ns(self, work_ns: int) -> int:
        """What it takes from now on: longer while copies run."""
        return work_ns * SCALE // self._times.gpu_rate if self._link.busy else work_ns

    def _end(self, launch: _Launch, start: int, end: int) -> None:
        self._free_at = max(end, launch.ended_ns)
        later = self._free_at - end
        self._timeline.add("gpu", launch.kind, start + later, self._free_at, launch.layer, launch.expert)

    def _stream(self) -> Process:
        """The GPU stream: launches in order, each behind its copy."""
        while True:
            yield self._work
            self._work = self._env.event()
            while self._queue:
                launch = self._queue[0]
                if launch.key >= 0 and self._landed(launch) < 0:
                    yield self._link.landing(launch.key)
                start = self._start(launch)
                end = start + self._slowed_ns(launch.work_ns)
                if launch.experts and self._sharing.active(CPU):
                    if self._env.now < start:
                        yield self._env.timeout(start - self._env.now)
                    done = self._env.event()
                    self._sharing.start(GPU, launch.work_ns, partial(fire, done), launch.experts)
                    yield done
                    end = self._env.now
                self._end(launch, start, end)
                self._queue.popleft()
            fire(self._drained)
            self._drained = self._env.event()

    def sync(self) -> Process:
        """Wait for the stream; time in which it waited for a copy is the link's."""
        if self._queue:
            yield self._drained
        clock, end = self._clock, max(self._clock.now, self._free_at)
        link_ns = sum(max(0, min(end, b) - max(clock.now, a)) for a, b in self._blocked)
        self._blocked.clear()
        clock.spend(WAIT_GPU, end - clock.now - link_ns)
        clock.spend(WAIT_LINK, link_ns)


class GraphDevice(GpuDevice):
    """The same fed with graphs: its kernels and CPU experts use different memory."""

    def __init__(self, *arguments: Any, graphs: GraphCosts) -> None:
        super().__init__(*arguments)
        self._graphs = graphs

    def experts(self, count: int, layer: int, expert: int = -1, tokens: int = 0) -> Process:
        """Launch them."""
        yield from ()
        self._launch("experts_gpu", self._costs.at(layer).experts_gpu(count, tokens), layer, expert)

    def arrived(self, key: int, layer: int, expert: int, tokens: int = 0) -> Process:
        """Launch it behind a wait of the stream."""
        yield from ()
        self._launch("experts_gpu", self._graphs.late(tokens, layer), layer, expert, key=key)
