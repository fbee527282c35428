"""The simulated engine: the decoding thread as a SimPy process that drives the brain beside link, CPU pool and GPU.

This is the readable specification of how the engine spends its time (design: sections 7 and 8). Every decision is the
brain's; every duration is the cost model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import Action, Brain
from foreload.backend.policy.state import DECODE, N_QUEUED, PREFILL
from foreload.errors import InternalError, MismatchError
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.clock import COLD, INTERRUPT, WAIT_CPU, WAIT_LINK, WAKE, HostClock
from foreload.simulator.costs import CostModel, as_costs, split_costs
from foreload.simulator.devices import Device, GpuDevice, HostDevice
from foreload.simulator.prefill import prefill
from foreload.simulator.resources import Clockwork, CpuPool, Link, Process, Sharing
from foreload.simulator.result import SimResult, token_parts
from foreload.simulator.timeline import Timeline
from foreload.simulator.workload import Request, load_requests
from foreload.traces.schema import Trace

_CPU, _HIT = int(Action.CPU), int(Action.HIT)


class EngineModel:
    """One engine with its cache, from a cold start."""

    def __init__(
        self, costs: CostModel, shape: ModelShape, settings: Settings, capacity: tuple[int, ...], timeline: bool = False
    ) -> None:
        split = split_costs(costs, shape, settings) if settings.miss_action == "split" else None
        self.env = Clockwork()
        self.costs, self.shape, self.settings = costs, shape, settings
        self.brain = Brain(shape, settings, capacity, split)
        self.timeline = Timeline(timeline)
        self.clock = HostClock(self.env, self.timeline)
        sharing = Sharing(self.env, costs, settings.cpu_threads)
        self.link = Link(self.env, sharing, self.brain, costs, self.timeline, lambda: self.clock.ahead)
        self.cpu = CpuPool(self.env, sharing, costs, settings.cpu_threads, self.timeline)
        kind = GpuDevice if costs.asynchronous else HostDevice
        self.device: Device = kind(self.env, costs, sharing, self.link, self.clock, self.timeline)
        self.token_ns: list[int] = []
        self.ttft_ns: list[int] = []
        self.decode_time: Mapping[str, int] = {}
        self.prefill_time: Mapping[str, int] = {}
        self._speculated = frozenset(settings.speculated(shape))
        self._ones = np.ones(shape.top_k, np.int32)
        self._wake_ns = costs.cost("wait").host_ns
        self._after_cpu = False  # whether the last layer-step waited for CPU experts
        self._open = -1  # layer-step that is not finished yet
        self._costs = {name: costs.cost(name) for name in ("embed", "route", "finish", "head")}

    def run(self, requests: Sequence[Request]) -> None:
        """Serve the requests one after the other."""
        self.env.run(self.env.process(self._serve(requests)))
        self.brain.check_integrity()

    def _serve(self, requests: Sequence[Request]) -> Process:
        times = {DECODE: self.clock.time, PREFILL: type(self.clock.time)(int)}
        for request in requests:
            self.clock.time = times[PREFILL]
            begun = self.clock.now
            yield from self._start_request()
            yield from prefill(self, request)
            self.ttft_ns.append(self.clock.now - begun)
            self.clock.time = times[DECODE]
            for token in range(len(request.context)):
                begun = self.clock.now
                yield from self._token(request, token)
                self.token_ns.append(self.clock.now - begun)
                self.timeline.step += 1
        self.decode_time, self.prefill_time = dict(times[DECODE]), dict(times[PREFILL])

    def _start_request(self) -> Process:
        """Nothing of the last request stays queued or in flight."""
        if self.link.busy and self.clock.ahead:
            yield self.clock.catch_up()
        self.brain.start_request()
        while self.link.busy:
            yield self.link.landing(self.link.issued[-1])
            self.clock.waited(WAIT_LINK)

    def settle(self) -> Process:
        """Let the others reach the host's time, if any is at work."""
        if self.clock.ahead and (self.link.busy or self.cpu.busy):
            yield self.clock.catch_up()

    def pump(self) -> Process:
        """Wake the copy thread."""
        if self.brain.state.scalars[N_QUEUED]:
            if self.clock.ahead:
                yield self.clock.catch_up()
            self.link.pump()

    def _token(self, request: Request, token: int) -> Process:
        """One decode step."""
        device, costs, last = self.device, self._costs, self.shape.n_moe_layers
        attention = self.costs.cost("attention", request.context[token])
        device.block("embed", costs["embed"])
        for layer in range(last):
            self._slowed(layer)
            device.block("attention", attention, layer)
            if layer in self._speculated:
                device.block("route", self.costs.cost("speculated"), layer)
            else:
                device.block("route", costs["route"], layer)
                yield from device.sync()
            depth = min(self.settings.prefetch_depth, last - 1 - layer)
            if depth:
                device.block("predict", self.costs.predict(self.settings, depth), layer)
                yield from device.sync()
            device.block("plan", self.costs.plan, layer)
            yield from self._experts(request, token, layer, depth)
            device.block("finish", costs["finish"], layer)
            self._open = layer
            if not self.costs.asynchronous:
                yield from self._finish()
        device.block("head", costs["head"])
        yield from device.sync()
        yield from self._finish()
        self.brain.end_step()

    def _slowed(self, layer: int) -> None:
        """The host's blocks of this layer-step take longer for what it waited and for the copies that landed since."""
        threads = self.settings.cpu_threads if self._after_cpu else 0
        self.clock.spend(COLD, self.costs.cold_ns(self.clock.idle_ns, threads), layer)
        self.clock.spend(INTERRUPT, self.link.interruptions * self.costs.interrupt_ns, layer)
        self.clock.idle_ns = self.link.interruptions = 0
        self._after_cpu = False

    def _experts(self, request: Request, token: int, layer: int, depth: int) -> Process:
        """A layer-step's experts: plan, hits, copies in the order of the link, CPU results."""
        yield from self.settle()
        self._close()
        self.link.watch()
        experts = request.demand[token, layer]
        actions = self.brain.begin(layer, experts, self._ones).tolist()
        for ahead in range(depth):
            self.brain.prefetch(layer + 1 + ahead, request.predicted[ahead][token, layer + 1 + ahead])
        on_cpu, hits = actions.count(_CPU), actions.count(_HIT)
        if on_cpu:
            if self.clock.ahead:
                yield self.clock.catch_up()
            self.cpu.start(on_cpu, layer)
        if self.brain.can_issue():
            yield from self.pump()
            self.clock.spend("plan", self.costs.queueing_ns, layer)
        if hits:
            yield from self.device.experts(hits, layer)
        if hits + on_cpu < len(actions):
            yield from self._copied(layer, experts, actions)
        if on_cpu:
            self._after_cpu = True
            yield from self.settle()
            if self.cpu.busy:
                yield self.cpu.result()
                self.clock.waited(WAIT_CPU, layer)

    def _copied(self, layer: int, experts: NDArray[np.int32], actions: list[int]) -> Process:
        """Run the experts that come over the link, in its order."""
        base = layer * self.shape.experts
        pairs = zip(experts.tolist(), actions, strict=True)
        mine = {base + expert for expert, action in pairs if action not in (_CPU, _HIT)}
        at, link = 0, self.link
        while mine:
            yield from self.settle()
            if at == len(link.log):
                yield link.next_issue()
                self.clock.waited(self.device.issue_wait, layer)
                if self.costs.asynchronous:
                    self.clock.spend(WAKE, self._wake_ns, layer)
                continue
            key = link.log[at]
            at += 1
            if key in mine:
                mine.remove(key)
                yield from self.device.arrived(key, layer, key - base)

    def _finish(self) -> Process:
        """End the open layer-step, if any. With an asynchronous GPU that is when the next layer has been routed."""
        yield from self.settle()
        self._close()
        yield from self.pump()

    def _close(self) -> None:
        if self._open >= 0:
            self.brain.finish(self._open)
            self._open = -1


def simulate(
    trace: Trace,
    profile: HardwareProfile | CostModel,
    shape: ModelShape,
    settings: Settings,
    capacity: tuple[int, ...],
    requests: Sequence[int] | None = None,
    timeline: bool = False,
) -> SimResult:
    """What `settings` with `capacity` [MoE layers] persistent slots would do on the profiled machine.

    `requests` chooses and orders requests of the trace (default: all); the cache starts empty and lives through them.
    Deterministic. Raises MismatchError if trace, profile, shape and settings do not belong together, FileError if the
    profile lacks a probe the settings need.
    """
    if len(capacity) != shape.n_moe_layers:
        raise MismatchError(f"capacity has {len(capacity)} entries: the model has {shape.n_moe_layers} MoE layers")
    costs = as_costs(profile, shape).fresh()
    chosen = load_requests(trace, shape, settings, requests)
    engine = EngineModel(costs, shape, settings, tuple(capacity), timeline)
    engine.run(chosen)
    return _result(engine, chosen)


def _result(engine: EngineModel, requests: Sequence[Request]) -> SimResult:
    token_ns = np.array(engine.token_ns, np.int64)
    if int(token_ns.sum()) != sum(engine.decode_time.values()):
        raise InternalError("the simulated times by kind do not add up to the total")
    owner = np.repeat(np.arange(len(requests)), [len(request.context) for request in requests])
    routing = {"speculated_demand": "assumed"} if any(request.assumed for request in requests) else {}
    return SimResult(
        settings=engine.settings,
        capacity=tuple(int(c) for c in engine.brain.state.capacity),
        token_ns=token_ns,
        token_part=token_parts(owner),
        ttft_ns=np.array(engine.ttft_ns, np.int64),
        time_ns=engine.decode_time,
        prefill_time_ns=engine.prefill_time,
        counters=engine.brain.counters.copy(),
        expert_bytes=engine.costs.expert_bytes,
        sources=dict(sorted({**engine.costs.used, **routing}.items())),
        timeline=tuple(engine.timeline.events),
    )
