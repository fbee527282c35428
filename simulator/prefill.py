"""What the simulated engine does before it decodes: a warm start, and prompts.

A prompt runs residents while the absent experts arrive in waves through staging, then those that have arrived, all at
once; beside the last of them the next layer's are copied early. So are a warm start's experts loaded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import simpy
from numpy.typing import NDArray

from foreload.backend.policy.state import ABSENT, DECODE, KEPT, LANDED, PREFILL, WARM
from foreload.simulator.costs import Cost
from foreload.simulator.resources import Process
from foreload.simulator.workload import Request

if TYPE_CHECKING:
    from foreload.simulator.engine_model import EngineModel


def warm_start(engine: EngineModel) -> Process:
    """Load what the brain wants before the first request."""
    every, brain = np.ones(engine.shape.experts, np.bool_), engine.brain
    todo = deque((int(layer), int(expert)) for layer, expert in np.argwhere(brain.warm_targets()))
    waiting: deque[tuple[int, int]] = deque()
    engine.link.phase = WARM
    while todo or waiting:
        while todo and brain.prefill_fetch(*todo[0]):
            waiting.append(todo.popleft())
        yield from engine.pump()
        layer, expert = waiting.popleft()
        key = layer * engine.shape.experts + expert
        if key not in engine.link.landed_at:
            yield from engine.device.landed(key, layer, expert)
        yield from engine.settle()
        brain.prefill_done(layer, expert, every)
    engine.link.phase = DECODE
    engine.clock.idle_ns = engine.link.interruptions = 0


def prefill(engine: EngineModel, request: Request) -> Process:
    """Run the prompt in chunks of `prefill_chunk_tokens`; the last chunk fills the cache. Nothing without a prompt."""
    size, early = engine.settings.prefill_chunk_tokens, deque[int]()
    engine.link.phase = PREFILL
    for start in range(0, len(request.prompt), size):
        chunk = request.prompt[start : start + size]
        last = start + size >= len(request.prompt)
        engine.device.block("embed", engine.costs.cost("embed"))
        for layer in range(engine.shape.n_moe_layers):
            if last and engine.oracle is not None:
                engine.oracle.before_prompt(engine.brain, request, layer)
            early = yield from _layer(engine, chunk[:, layer], layer, last, early)
        engine.device.block("head", engine.costs.cost("head"))
        yield from engine.device.sync()
    engine.link.phase = DECODE


def _layer(
    engine: EngineModel, routed: NDArray[np.int32], layer: int, last: bool, early: deque[int]
) -> Generator[simpy.Event, Any, deque[int]]:
    """One layer on a chunk; routed [tokens, k]. `early`: what was copied for it early; returns the same of the next."""
    counts = np.bincount(routed.ravel(), minlength=engine.shape.experts).astype(np.int32)
    engine.device.block("prefill_layer", engine.costs.cost("prefill_layer", len(routed)), layer)
    yield from engine.device.sync()
    target = engine.brain.prefill_targets(layer, counts, last)
    status = engine.brain.state.status[layer].copy()
    waiting = deque(expert for expert in early if status[expert] not in (ABSENT, KEPT))
    todo = deque(np.flatnonzero((counts > 0) & (status == ABSENT)).tolist())
    following, early, ahead = (layer + 1) % engine.shape.n_moe_layers, deque[int](), deque[int]()
    if following > layer or (following < layer and not last):
        ahead += engine.brain.prefill_ahead(following, routed.size).tolist()
    engine.link.watch()

    def queue() -> Process:
        while todo and engine.brain.prefill_fetch(layer, todo[0]):
            waiting.append(todo.popleft())
        while not todo and ahead and engine.brain.prefill_fetch(following, ahead[0], True):
            early.append(ahead.popleft())
        yield from engine.pump()

    yield from queue()
    _experts(engine, layer, np.flatnonzero((counts > 0) & (status == KEPT)).tolist(), counts)
    while waiting:
        yield from _served(engine, layer, waiting, counts, target)
        yield from queue()
    return early


def _served(
    engine: EngineModel,
    layer: int,
    waiting: deque[int],
    counts: NDArray[np.int32],
    target: NDArray[np.bool_],
) -> Process:
    """Wait for the first of the fetched experts; run what has arrived, keep it or give its slot back."""
    yield from engine.settle()
    if engine.brain.status(layer, waiting[0]) != LANDED:
        yield from engine.device.landed(layer * engine.shape.experts + waiting[0], layer, waiting[0])
        yield from engine.settle()
    arrived = []
    while waiting and engine.brain.status(layer, waiting[0]) == LANDED:
        arrived.append(waiting.popleft())
    _experts(engine, layer, [expert for expert in arrived if counts[expert]], counts)
    yield from engine.settle()
    for expert in arrived:
        engine.brain.prefill_done(layer, expert, target)


def _experts(engine: EngineModel, layer: int, experts: Sequence[int], counts: NDArray[np.int32]) -> None:
    """Experts on the device: one by one, or where decoding is graphs all in one launch."""
    costs = [engine.costs.cost("prefill_expert", int(counts[expert])) for expert in experts]
    if not engine.costs.graphs:
        for expert, cost in zip(experts, costs, strict=True):
            engine.device.block("prefill_expert", cost, layer, expert)
    elif costs:
        launch, work_ns = max(cost.host_ns for cost in costs), sum(cost.gpu_ns for cost in costs)
        engine.device.block("prefill_expert", Cost(launch, work_ns, "measured"), layer)
