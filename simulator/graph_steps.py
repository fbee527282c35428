"""Decode steps of an engine that launches graphs, as a process of the engine model (`backend/cuda/forward.py`).

The host waits for a layer's routing, decides, lets the device run residents, launches what comes later and what enters
the next layer, and ends the layer-step when its copies have landed, while the device goes on. With all experts resident
a step is one launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import Action
from foreload.backend.policy.state import KEPT
from foreload.simulator.clock import WAIT_CPU, WAIT_GPU, WAIT_LINK
from foreload.simulator.devices import GraphDevice
from foreload.simulator.graph_costs import GraphCosts
from foreload.simulator.resources import Process
from foreload.simulator.workload import Request

if TYPE_CHECKING:
    from foreload.simulator.engine_model import EngineModel

_CPU, _HIT = int(Action.CPU), int(Action.HIT)


def step(engine: EngineModel, costs: GraphCosts, request: Request, at: int) -> Process:
    """One decode step: a token, or a draft and the window that verifies it."""
    device, clock, fed, last = engine.device, engine.clock, request.fed[at], engine.shape.n_moe_layers
    if engine.settings.draft.kind != "none":
        device.block("draft", engine.costs.draft(engine.settings, fed - 1))
        yield from device.sync()
    costs.look_up(request.context[at], fed, engine.all_slots)
    distinct = int(np.count_nonzero(request.counts[at]))
    whole_ns = costs.whole_ns(request.context[at], fed, distinct) if engine.all_slots else 0
    if whole_ns and (engine.brain.state.status == KEPT).all():
        _tell(engine, request, at)
        clock.spend("head", whole_ns)
    else:
        clock.spend("embed", engine.costs.block("embed", tokens=fed).host_ns)
        yield from engine.settle()
        engine.enter(costs, request, at, 0)
        for layer in range(last):
            yield from device.sync()
            engine.slowed(layer)
            yield from _layer(engine, costs, request, at, layer)
        clock.spend("head", costs.head(fed).host_ns)
        yield from device.sync()
    if engine.settings.draft.kind != "none" and engine.sampled:
        device.block("sample", engine.costs.cost("sample", request.emitted[at]))
    engine.brain.end_step()


def _tell(engine: EngineModel, request: Request, at: int) -> None:
    """The brain hears of the demand of a step of one launch."""
    for layer in range(engine.shape.n_moe_layers):
        _begin(engine, request, at, layer)
        engine.brain.finish(layer)


def _begin(engine: EngineModel, request: Request, at: int, layer: int) -> NDArray[np.int8]:
    distinct = int(np.count_nonzero(request.counts[at, layer]))
    if engine.oracle is not None:
        engine.oracle.before_demand(engine.brain, request, at, layer)
    return engine.brain.begin(layer, request.demand[at, layer, :distinct], request.counts[at, layer, :distinct])


def _layer(engine: EngineModel, costs: GraphCosts, request: Request, at: int, layer: int) -> Process:
    """A layer-step from its routing to its end; what enters the next layer is launched on the way."""
    clock, device, fed = engine.clock, engine.device, request.fed[at]
    depth = min(engine.settings.prefetch_depth, engine.shape.n_moe_layers - 1 - layer)
    foresee = costs.foresee(fed, depth)
    assert isinstance(device, GraphDevice)
    seen_ns = device.goes_on("predict", foresee.gpu_ns, layer) if depth else 0
    clock.spend("plan", engine.costs.block("plan", tokens=fed).host_ns, layer)
    yield from engine.settle()
    engine.link.watch()
    decided = _begin(engine, request, at, layer)
    experts, counts = request.demand[at, layer, : len(decided)], request.counts[at, layer, : len(decided)]
    tokens = counts if fed > 1 else np.zeros_like(counts)
    on_cpu, hits = int((decided == _CPU).sum()), int((decided == _HIT).sum())
    coming = (decided != _CPU) & (decided != _HIT)
    if hits:
        yield from device.experts(hits, layer, tokens=int(tokens[decided == _HIT].sum()))
    if on_cpu:
        if clock.ahead:
            yield clock.catch_up()
        read = bool((experts[decided == _CPU] == engine.brain.read(layer)).any())
        engine.cpu.start(on_cpu, layer, int(tokens[decided == _CPU].sum()), read)
        clock.spend("plan", costs.host.submit_ns, layer)
        yield from engine.settle()
    if depth:  # the CPU has begun by now
        yield from _issue(engine, costs, layer)
        clock.spend(WAIT_GPU, max(0, seen_ns - clock.now), layer)
        clock.spend("plan", foresee.host_ns, layer)
        yield from engine.settle()
        for ahead in range(depth):
            engine.brain.prefetch(layer + 1 + ahead, request.predicted[ahead][at, layer + 1 + ahead])
        engine.cpu.tell()
    yield from _issue(engine, costs, layer)
    if coming.any():
        yield from engine.copied(layer, dict(zip(experts[coming].tolist(), tokens[coming].tolist(), strict=True)))
    yield from engine.settle()
    launched_ns = -1
    if on_cpu:  # what follows is launched already, and waits for the outputs
        launched_ns = clock.now
        clock.spend("attention", costs.launch_ns(request.context[at], fed), layer)
        yield from engine.settle()
        if engine.cpu.busy:
            yield engine.cpu.result()
            clock.waited(WAIT_CPU, layer)
        engine.after_cpu = True
        yield from engine.settle()
    engine.enter(costs, request, at, layer + 1, launched_ns)
    yield from _end(engine, costs, fed, layer, (layer * engine.shape.experts + experts[coming]).tolist())


def _issue(engine: EngineModel, costs: GraphCosts, layer: int) -> Process:
    """Issue what the window admits, on the host's time."""
    if engine.brain.can_issue():
        if engine.clock.ahead:
            yield engine.clock.catch_up()
        engine.clock.spend("plan", engine.link.pump() * costs.host.issue_ns, layer)


def _end(engine: EngineModel, costs: GraphCosts, fed: int, layer: int, keys: list[int]) -> Process:
    """Wait for the copies of a layer-step, and end it."""
    clock, link = engine.clock, engine.link
    yield from engine.settle()
    for key in keys:
        if key not in link.landed_at:
            yield link.landing(key)
            clock.waited(WAIT_LINK, layer)
    clock.spend("finish", engine.costs.block("finish", tokens=fed).host_ns, layer)
    yield from engine.settle()
    engine.brain.finish(layer)
    yield from _issue(engine, costs, layer)
