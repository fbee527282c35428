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
from foreload.simulator import graph_steps
from foreload.simulator.clock import COLD, INTERRUPT, WAIT_CPU, WAIT_LINK, WAKE, HostClock
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import Cost, CostModel, as_costs
from foreload.simulator.devices import Device, GpuDevice, GraphDevice, HostDevice
from foreload.simulator.graph_costs import DeviceTimes, GraphCosts
from foreload.simulator.oracle import Oracle
from foreload.simulator.prefill import prefill, warm_start
from foreload.simulator.resources import Clockwork, CpuPool, Link, Process, Sharing
from foreload.simulator.result import SimResult, owned, shared_ns, token_parts
from foreload.simulator.timeline import Timeline
from foreload.simulator.workload import Request, load_requests
from foreload.traces.schema import Trace

_CPU, _HIT = int(Action.CPU), int(Action.HIT)


class EngineModel:
    """One engine with its cache, from a cold start."""

    def __init__(
        self,
        costs: CostModel,
        shape: ModelShape,
        settings: Settings,
        capacity: tuple[int, ...],
        timeline: bool = False,
        warm: NDArray[np.int64] | None = None,
        oracle: Oracle | None = None,
    ) -> None:
        split = split_costs(costs, shape, settings) if settings.needs_costs is not None else None
        self.env = Clockwork()
        self.costs, self.shape, self.settings = costs, shape, settings
        self.brain = Brain(shape, settings, capacity, split, warm, oracle is not None)
        self.oracle = oracle
        self.timeline = Timeline(timeline)
        self.clock = HostClock(self.env, self.timeline)
        sharing, times = Sharing(self.env, costs, settings.cpu_threads), DeviceTimes.of(costs, settings)
        varies = costs.varies("copy_beside_cpu", settings.cpu_threads)
        self.link = Link(self.env, sharing, self.brain, costs, self.timeline, lambda: self.clock.ahead, times, varies)
        self.cpu = CpuPool(self.env, sharing, costs, settings.cpu_threads, self.timeline, times)
        self._graphs = GraphCosts(costs, settings) if costs.graphs else None
        parts = (self.env, costs, sharing, self.link, self.clock, self.timeline, times)
        if self._graphs is not None:
            self.device: Device = GraphDevice(*parts, graphs=self._graphs)
        else:
            self.device = (GpuDevice if costs.asynchronous else HostDevice)(*parts)
        self.all_slots = sum(capacity) == shape.n_moe_layers * shape.experts
        self.token_ns: list[int] = []
        self.ttft_ns: list[int] = []
        self.warm_ns = 0
        self.decode_time: Mapping[str, int] = {}
        self.prefill_time: Mapping[str, int] = {}
        self.steps = 0
        self.sampled = False  # whether tokens are drawn, as the recording says
        self._speculated = frozenset(settings.speculated(shape))
        self._wake_ns, self._issue_wake_ns = costs.cost("wait").host_ns, times.host_wake_ns
        self._bring_ns = times.bring_ns
        self.after_cpu = False  # whether the last layer-step waited for CPU experts
        self._open = -1  # layer-step that is not finished yet
        self._coming: list[int] = []  # keys of the copies it runs on

    def run(self, requests: Sequence[Request], sampled: bool = False) -> None:
        """Serve the requests one after the other; `sampled`: at a temperature, which costs draws in verify steps."""
        self.sampled = sampled
        self.env.run(self.env.process(self._serve(requests)))
        self.brain.check_integrity()

    def _serve(self, requests: Sequence[Request]) -> Process:
        times = {DECODE: self.clock.time, PREFILL: type(self.clock.time)(int)}
        self.clock.time = type(self.clock.time)(int)
        yield from warm_start(self)
        self.warm_ns = self.clock.now
        for request in requests:
            self.clock.time = times[PREFILL]
            begun = self.clock.now
            yield from self._start_request()
            yield from prefill(self, request)
            self.ttft_ns.append(self.clock.now - begun)
            self.clock.time = times[DECODE]
            for step, emitted in enumerate(request.emitted):
                begun = self.clock.now
                if self._graphs is not None:
                    yield from graph_steps.step(self, self._graphs, request, step)
                else:
                    yield from self._step(request, step)
                self.token_ns += shared_ns([self.clock.now - begun], [emitted])
                self.timeline.step += 1
            self.steps += len(request.emitted)
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

    def _step(self, request: Request, step: int) -> Process:
        """One decode step: a token, or a draft and the window that verifies it."""
        device, fed, last = self.device, request.fed[step], self.shape.n_moe_layers

        def cost(probe: str, at: int = 0) -> Cost:
            return self.costs.block(probe, at, fed)

        drafting, attention = self.settings.draft.kind, cost("attention", request.context[step])
        route, plan, finish = cost("route"), cost("plan"), cost("finish")
        if drafting != "none":
            device.block("draft", self.costs.draft(self.settings, fed - 1))
            yield from device.sync()
        device.block("embed", cost("embed"))
        for layer in range(last):
            self.slowed(layer)
            device.block("attention", attention, layer)
            if layer in self._speculated:
                device.block("route", self.costs.beyond(self.costs.cost("speculated"), "route", fed), layer)
            else:
                device.block("route", route, layer)
                yield from device.sync()
            depth = min(self.settings.prefetch_depth, last - 1 - layer)
            if depth:
                predict = self.costs.predict(self.settings, depth)
                device.block("predict", self.costs.beyond(predict, "predict", fed), layer)
                yield from device.sync()
            device.block("plan", plan, layer)
            yield from self._experts(request, step, layer, depth)
            device.block("finish", finish, layer)
            self._open = layer
            if not self.costs.asynchronous:
                yield from self._finish()
        device.block("head", cost("head"))
        yield from device.sync()
        if drafting != "none" and self.sampled:
            device.block("sample", self.costs.cost("sample", request.emitted[step]))
        yield from self._finish()
        self.brain.end_step()

    def enter(self, costs: GraphCosts, request: Request, step: int, layer: int, launched_ns: int = -1) -> None:
        """Launch what enters a layer or, behind the last one, ends the step.

        `launched_ns`: it was launched then, and what it waited for of CPU experts is there now.
        """
        fed, layers = request.fed[step], self.shape.n_moe_layers
        if layer == layers:
            gpu_ns = costs.head(fed).gpu_ns
        else:
            gpu_ns = costs.enter(request.context[step], fed, layer in self._speculated).gpu_ns
        if launched_ns < 0:
            host_ns = costs.launch_ns(request.context[step], fed)
            self.device.block("attention", Cost(host_ns, gpu_ns, "measured"), layer)
        else:
            assert isinstance(self.device, GraphDevice)
            self.device.behind_cpu("attention", gpu_ns, layer, launched_ns, max(1, gpu_ns - costs.ahead_ns))

    def slowed(self, layer: int) -> None:
        """The host's blocks of this layer-step take longer for what it waited and for the copies that landed since."""
        threads = self.settings.cpu_threads if self.after_cpu else 0
        self.clock.spend(COLD, self.costs.cold_ns(self.clock.idle_ns, threads), layer)
        self.clock.spend(INTERRUPT, self.link.interruptions * self.costs.interrupt_ns, layer)
        self.clock.idle_ns = self.link.interruptions = 0
        self.after_cpu = False

    def _experts(self, request: Request, step: int, layer: int, depth: int) -> Process:
        """A layer-step's experts: plan, hits, copies in the order of the link, CPU results."""
        yield from self.settle()
        yield from self._close()
        self.link.watch()
        distinct = int(np.count_nonzero(request.counts[step, layer]))
        experts, counts = request.demand[step, layer, :distinct], request.counts[step, layer, :distinct]
        if self.oracle is not None:
            self.oracle.before_demand(self.brain, request, step, layer)
        decided = self.brain.begin(layer, experts, counts)
        actions = decided.tolist()
        tokens = counts if request.fed[step] > 1 else np.zeros_like(counts)
        for ahead in range(depth):
            self.brain.prefetch(layer + 1 + ahead, request.predicted[ahead][step, layer + 1 + ahead])
        on_cpu, hits = actions.count(_CPU), actions.count(_HIT)
        coming = (decided != _CPU) & (decided != _HIT)
        self._coming = (layer * self.shape.experts + experts[coming]).tolist()
        if on_cpu:
            if self.clock.ahead:
                yield self.clock.catch_up()
            self.cpu.start(on_cpu, layer, int(tokens[decided == _CPU].sum()))
        if self.brain.can_issue():
            yield from self.pump()
            self.clock.spend("plan", self.costs.queueing_ns, layer)
        if hits:
            yield from self.device.experts(hits, layer, tokens=int(tokens[decided == _HIT].sum()))
        if hits + on_cpu < len(actions):
            yield from self.copied(layer, dict(zip(experts[coming].tolist(), tokens[coming].tolist(), strict=True)))
        if on_cpu:
            self.after_cpu = True
            yield from self.settle()
            if self.cpu.busy:
                yield self.cpu.result()
                self.clock.waited(WAIT_CPU, layer)

    def copied(self, layer: int, tokens: dict[int, int]) -> Process:
        """Run the experts that come over the link, in its order; their tokens as for `CostModel.experts_gpu`."""
        base = layer * self.shape.experts
        mine = {base + expert for expert in tokens}
        at, brought, link = 0, 0, self.link
        while mine:
            yield from self.settle()
            if at == len(link.log):
                yield link.next_issue()
                self.clock.waited(self.device.issue_wait, layer)
                if self.costs.asynchronous:
                    self.clock.spend(WAKE, self._issue_wake_ns, layer)
                continue
            key = link.log[at]
            at += 1
            if key in mine:
                mine.remove(key)
                if at > brought:
                    brought = len(link.log)
                    self.clock.spend("experts_gpu", self._bring_ns, layer)
                yield from self.device.arrived(key, layer, key - base, tokens[key - base])

    def _finish(self) -> Process:
        """End the open layer-step, if any. With an asynchronous GPU that is when the next layer has been routed."""
        yield from self.settle()
        yield from self._close()
        yield from self.pump()

    def _close(self) -> Process:
        """End the open layer-step, if any, once its copies have landed: the stream may not have come to them yet."""
        if self._open < 0:
            return
        late = [key for key in self._coming if key not in self.link.landed_at]
        for key in late:
            if key not in self.link.landed_at:
                yield self.link.landing(key)
                self.clock.waited(WAIT_LINK, self._open)
        if late:
            self.clock.spend(WAKE, self._wake_ns, self._open)
            yield from self.settle()
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
    warm: NDArray[np.int64] | None = None,
    oracle: bool = False,
) -> SimResult:
    """What `settings` with `capacity` [MoE layers] persistent slots would do on the profiled machine.

    `requests` chooses and orders requests of the trace (default: all); the cache lives through them, and starts empty
    or with what `warm` [MoE layers, experts], uses in a recording, makes it load. With `oracle`, eviction goes by what
    is demanded next instead of by the settings: a bound.
    Deterministic. Raises MismatchError if trace, profile, shape and settings do not belong together, FileError if the
    profile lacks a probe the settings need.
    """
    if len(capacity) != shape.n_moe_layers:
        raise MismatchError(f"capacity has {len(capacity)} entries: the model has {shape.n_moe_layers} MoE layers")
    costs = as_costs(profile, shape).for_settings(settings).fresh()
    chosen = load_requests(trace, shape, settings, requests)
    foreseen = Oracle(chosen, shape) if oracle else None
    engine = EngineModel(costs, shape, settings, tuple(capacity), timeline, warm, foreseen)
    engine.run(chosen, sampled=trace.meta.sampled)
    return _result(engine, chosen)


def _result(engine: EngineModel, requests: Sequence[Request]) -> SimResult:
    token_ns = np.array(engine.token_ns, np.int64)
    if int(token_ns.sum()) != sum(engine.decode_time.values()):
        raise InternalError("the simulated times by kind do not add up to the total")
    routing = {"speculated_demand": "assumed"} if any(request.assumed for request in requests) else {}
    return SimResult(
        settings=engine.settings,
        capacity=tuple(int(c) for c in engine.brain.state.capacity),
        token_ns=token_ns,
        token_part=token_parts(owned(requests)),
        steps=engine.steps,
        ttft_ns=np.array(engine.ttft_ns, np.int64),
        warm_ns=engine.warm_ns,
        time_ns=engine.decode_time,
        prefill_time_ns=engine.prefill_time,
        counters=engine.brain.counters.copy(),
        layer_bytes=engine.costs.layer_bytes,
        copy_ns=engine.costs.copies_ns,
        sources=dict(sorted({**engine.costs.used, **routing}.items())),
        timeline=tuple(engine.timeline.events),
    )
