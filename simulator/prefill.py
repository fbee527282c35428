"""Prompts in the simulated engine: residents first, then the absent experts in waves through staging."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.state import DECODE, KEPT, PREFILL
from foreload.simulator.resources import Process
from foreload.simulator.workload import Request

if TYPE_CHECKING:
    from foreload.simulator.engine_model import EngineModel


def prefill(engine: EngineModel, request: Request) -> Process:
    """Run the prompt in chunks of `prefill_chunk_tokens`; the last chunk fills the cache. Nothing without a prompt."""
    size = engine.settings.prefill_chunk_tokens
    engine.link.phase = PREFILL
    for start in range(0, len(request.prompt), size):
        chunk = request.prompt[start : start + size]
        last = start + size >= len(request.prompt)
        engine.device.block("embed", engine.costs.cost("embed"))
        for layer in range(engine.shape.n_moe_layers):
            yield from _layer(engine, chunk[:, layer], layer, last)
        engine.device.block("head", engine.costs.cost("head"))
        yield from engine.device.sync()
    engine.link.phase = DECODE


def _layer(engine: EngineModel, routed: NDArray[np.int32], layer: int, last: bool) -> Process:
    """One layer on a chunk; routed [tokens, k]."""
    counts = np.bincount(routed.ravel(), minlength=engine.shape.experts).astype(np.int32)
    engine.device.block("prefill_layer", engine.costs.cost("prefill_layer", len(routed)), layer)
    yield from engine.device.sync()
    target = engine.brain.prefill_targets(layer, counts, last)
    resident = engine.brain.state.status[layer] == KEPT
    for expert in np.flatnonzero((counts > 0) & resident).tolist():
        _expert(engine, layer, expert, int(counts[expert]))
    engine.link.watch()
    todo = deque(np.flatnonzero((counts > 0) & ~resident).tolist())
    waiting: deque[int] = deque()
    while todo or waiting:
        while todo and engine.brain.prefill_fetch(layer, todo[0]):
            waiting.append(todo.popleft())
        yield from engine.pump()
        expert = waiting.popleft()
        yield from _served(engine, layer, expert, int(counts[expert]), target)


def _served(engine: EngineModel, layer: int, expert: int, tokens: int, target: NDArray[np.bool_]) -> Process:
    """Wait for a fetched expert, run it, keep it or give its slot back."""
    key = layer * engine.shape.experts + expert
    yield from engine.settle()
    if key not in engine.link.landed_at:
        yield from engine.device.landed(key, layer, expert)
    _expert(engine, layer, expert, tokens)
    yield from engine.settle()
    engine.brain.prefill_done(layer, expert, target)


def _expert(engine: EngineModel, layer: int, expert: int, tokens: int) -> None:
    engine.device.block("prefill_expert", engine.costs.cost("prefill_expert", tokens), layer, expert)
