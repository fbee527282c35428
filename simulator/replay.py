"""Routing replayed through the brain's compiled functions without a clock: every copy lands at once.

Exact for hits and misses whenever timing cannot change them (no prefetch, no background uploads, no makespan split);
otherwise the limit of a fast link. This makes the cost tables of the integer program; every plan is then simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foreload.backend.policy import Brain, SplitCosts, copies, step
from foreload.backend.policy.brain import miss_rule
from foreload.backend.policy.order import EVICTIONS
from foreload.backend.policy.state import (
    DECODE,
    DEMAND,
    HITS,
    KEPT,
    LANDED,
    PREFETCH,
    PREFETCHED,
    PREFILL,
    STEP,
    PolicyState,
)
from foreload.compiled import drop_stale_caches
from foreload.settings import Settings, step_experts
from foreload.shape import ModelShape
from foreload.simulator.workload import Request

drop_stale_caches(Path(__file__).parent, Path(copies.__file__).parent)

_ADMISSIONS = {"none": step.ADMIT_NONE, "demand": step.ADMIT_DEMAND, "background": step.ADMIT_BACKGROUND}
_NO_COSTS = SplitCosts(0, np.zeros(1, np.int64), np.zeros(1, np.int64))


@dataclass(frozen=True)
class Outcomes:
    """What became of the demand of T decode steps: L MoE layers, at most D experts each (k without drafts)."""

    tokens: int  # T
    counters: NDArray[np.int64]  # [2 phases, L, Counter]
    histogram: NDArray[np.int64]  # [L, D+1, D+1, D+1] layer-steps by (fetched, on the CPU, prefetched and used)

    @property
    def hits(self) -> NDArray[np.int64]:
        """Experts found resident or landed, [L]."""
        found: NDArray[np.int64] = self.counters[DECODE, :, HITS]
        return found

    @property
    def prefetched(self) -> NDArray[np.float64]:
        """Copies issued as prefetches per layer-step, [L]."""
        issued: NDArray[np.float64] = self.counters[DECODE, :, PREFETCHED] / max(1, self.tokens)
        return issued


def prompt_counts(requests: Sequence[Request], shape: ModelShape, chunk_tokens: int) -> NDArray[np.int32]:
    """Tokens per expert in each request's last prompt chunk, [Q, L, E]; zeros without a prompt."""
    counts = np.zeros((len(requests), shape.n_moe_layers, shape.experts), np.int32)
    for at, request in enumerate(requests):
        if len(request.prompt):
            start = (len(request.prompt) - 1) // chunk_tokens * chunk_tokens
            for layer in range(shape.n_moe_layers):
                routed = request.prompt[start:, layer].ravel()
                counts[at, layer] = np.bincount(routed, minlength=shape.experts)
    return counts


def replay(
    requests: Sequence[Request],
    shape: ModelShape,
    settings: Settings,
    capacity: tuple[int, ...],
    costs: SplitCosts | None = None,
) -> Outcomes:
    """Outcomes of `requests` with `capacity` [L] slots, from an empty cache. `costs` as for the Brain."""
    brain = Brain(shape, settings, capacity, costs)
    layers, depth, width = shape.n_moe_layers, settings.prefetch_depth, settings.width(shape)
    most = 1 + max((request.demand.shape[2] for request in requests), default=shape.top_k)
    histogram = np.zeros((layers, most, most, most), np.int64)
    prompts = prompt_counts(requests, shape, settings.prefill_chunk_tokens)
    nothing = np.zeros((0, 0, layers, width), np.int32)
    for at, request in enumerate(requests):
        brain.start_request()
        _prompt(brain.state, prompts[at], _targets(brain, prompts[at]), EVICTIONS.index(settings.eviction))
        ahead = np.stack(request.predicted[:depth]) if depth else nothing
        _decode(
            brain.state,
            request.demand,
            request.counts,
            ahead,
            (EVICTIONS.index(settings.eviction), miss_rule(settings), _ADMISSIONS[settings.admission]),
            (settings.admit_per_step, step_experts(settings, shape)),
            costs or _NO_COSTS,
            histogram,
        )
    return Outcomes(sum(len(r.emitted) for r in requests), brain.counters.copy(), histogram)


def _targets(brain: Brain, counts: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Experts to keep from the last prompt chunk, [L, E]; layers do not depend on each other.

    Asked from Python: a cached compiled function that returns an array may not also be part of another one's cache.
    """
    return np.stack([brain.prefill_targets(layer, row, last_chunk=True) for layer, row in enumerate(counts)])


@njit(cache=True)
def _land(state: PolicyState, phase: int) -> None:
    """Issue and complete everything that is queued."""
    key = copies.next_copy(state, phase)
    while key >= 0:
        copies.complete(state, key)
        key = copies.next_copy(state, phase)


@njit(cache=True)
def _prompt(state: PolicyState, counts: NDArray[np.int32], targets: NDArray[np.bool_], eviction: int) -> None:
    """The last prompt chunk fills the cache; counts and targets [L, E]."""
    for layer in range(counts.shape[0]):
        resident = state.status[layer] == KEPT
        for expert in range(counts.shape[1]):
            if counts[layer, expert] > 0 and not resident[expert]:
                copies.enqueue(state, layer, expert, DEMAND)
                _land(state, PREFILL)
                step.prefill_done(state, layer, expert, targets[layer], eviction)


@njit(cache=True)
def _decode(
    state: PolicyState,
    demand: NDArray[np.int32],
    counts: NDArray[np.int32],
    predicted: NDArray[np.int32],
    rules: tuple[int, int, int],
    limits: tuple[int, int],
    costs: SplitCosts,
    histogram: NDArray[np.int64],
) -> None:
    """Decode steps of one request; demand and counts [T, L, D], predicted [depth, T, L, width]."""
    eviction, rule, admission = rules
    admit_per_step, reserve = limits
    layers = demand.shape[1]
    actions = np.empty(demand.shape[2], np.int8)
    for token in range(demand.shape[0]):
        for layer in range(layers):
            distinct = (counts[token, layer] > 0).sum()
            experts, action = demand[token, layer, :distinct], actions[:distinct]
            used = 0
            for expert in experts:
                if state.status[layer, expert] == LANDED and state.purpose[layer, expert] == PREFETCH:
                    used += 1
            step.demand(state, layer, experts, counts[token, layer, :distinct], eviction, rule, costs, action)
            for ahead in range(predicted.shape[0]):
                if layer + 1 + ahead < layers:
                    step.prefetch(state, layer + 1 + ahead, predicted[ahead, token, layer + 1 + ahead], reserve)
            _land(state, DECODE)
            on_cpu = (action == step.ACT_CPU).sum()
            fetched = (action == step.ACT_FETCH).sum() + (action == step.ACT_LATE).sum()
            histogram[layer, fetched, on_cpu, used] += 1
            step.finish(state, layer, experts, action, eviction, admission, admit_per_step, reserve)
            _land(state, DECODE)
        state.scalars[STEP] += 1


@njit(cache=True)
def _stack_hits(demand: NDArray[np.int32], experts: int, hits: NDArray[np.int64]) -> None:
    """Hits [E + 1] of one layer at every LRU size: an expert is found from the size just above its depth on."""
    k = demand.shape[1]
    stack = np.arange(experts)
    seen = 0
    for token in range(demand.shape[0]):
        new = 0
        for at in range(seen):
            for i in range(k):
                if stack[at] == demand[token, i]:
                    hits[at + 1] += 1
        rest = np.empty(seen, stack.dtype)
        left = 0
        for at in range(seen):
            found = False
            for i in range(k):
                found = found or stack[at] == demand[token, i]
            if not found:
                rest[left] = stack[at]
                left += 1
        for i in range(k):
            stack[new] = demand[token, i]
            new += 1
        for at in range(left):
            stack[new + at] = rest[at]
        seen = new + left
    for size in range(1, experts + 1):
        hits[size] += hits[size - 1]


def lru_hits(requests: Sequence[Request], shape: ModelShape) -> NDArray[np.int64]:
    """Decode hits [L, E + 1] of an LRU cache with demand admission at every slot count, in one pass.

    A layer-step's whole demand is looked up before any of it is inserted. Prompts are left out: they fill the cache by
    their own rule (`replay` includes it). For steps of one token; `curves` takes windows too.
    """
    demand = np.concatenate([request.demand for request in requests])
    hits = np.zeros((shape.n_moe_layers, shape.experts + 1), np.int64)
    for layer in range(shape.n_moe_layers):
        _stack_hits(np.ascontiguousarray(demand[:, layer]), shape.experts, hits[layer])
    return hits
