"""Routing replayed through the brain's compiled functions without a clock: every copy lands at once.

Exact for hits and misses whenever timing cannot change them (no prefetch, no background uploads, no makespan split);
otherwise the limit of a fast link. This makes the cost tables of the integer program; every plan is then simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import Brain, SplitCosts, copies, prompt, step
from foreload.backend.policy.copied import COPIES
from foreload.backend.policy.rules import Rules
from foreload.backend.policy.split import NO_COSTS
from foreload.backend.policy.state import (
    AHEAD,
    DECODE,
    DEMAND,
    HITS,
    KEPT,
    LANDED,
    PREFETCH,
    PREFETCHED,
    PREFILL,
    WARM,
    PolicyState,
)
from foreload.compiled import inlined, uncounted
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.workload import Request
from foreload.traces.histogram import uses


@dataclass(frozen=True)
class Outcomes:
    """What became of the demand of T decode steps: L MoE layers, at most D experts each (k without drafts)."""

    tokens: int  # T
    counters: NDArray[np.int64]  # [3 phases, L, Counter]
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

    @property
    def copied(self) -> NDArray[np.float64]:
        """All copies per layer-step, [L]."""
        copied: NDArray[np.float64] = self.counters[DECODE][:, list(COPIES)].sum(axis=1) / max(1, self.tokens)
        return copied


def prompt_counts(requests: Sequence[Request], shape: ModelShape, chunk_tokens: int) -> NDArray[np.int32]:
    """Tokens per expert in each request's last prompt chunk, [Q, L, E]; zeros without a prompt."""
    counts = np.zeros((len(requests), shape.n_moe_layers, shape.experts), np.int32)
    for at, request in enumerate(requests):
        if len(request.prompt):
            start = (len(request.prompt) - 1) // chunk_tokens * chunk_tokens
            counts[at] = uses(request.prompt[start:], shape.experts)
    return counts


def replay(
    requests: Sequence[Request],
    shape: ModelShape,
    settings: Settings,
    capacity: tuple[int, ...],
    costs: SplitCosts | None = None,
    warm: NDArray[np.int64] | None = None,
) -> Outcomes:
    """Outcomes of `requests` with `capacity` [L] slots, from an empty cache or a warm start. Rest as for the Brain."""
    brain = Brain(shape, settings, capacity, costs, warm)
    target = np.ones(shape.experts, np.bool_)
    for layer, expert in np.argwhere(brain.warm_targets()):
        _load(brain.state, brain.rules, layer, expert, target)
    layers, depth = shape.n_moe_layers, settings.prefetch_depth
    most = 1 + max((request.demand.shape[2] for request in requests), default=shape.top_k)
    histogram, action = np.zeros((layers, most, most, most), np.int64), np.empty(most, np.int8)
    prompts = prompt_counts(requests, shape, settings.prefill_chunk_tokens)
    for at, request in enumerate(requests):
        brain.start_request()
        if len(request.prompt):
            _prompt(brain.state, brain.rules, prompts[at], target)
        steps = (request.demand, request.counts, request.ahead(depth))
        _decode(brain.state, brain.rules, *steps, costs or NO_COSTS, action, histogram)
    return Outcomes(sum(len(r.emitted) for r in requests), brain.counters.copy(), histogram)


@inlined
def _land(state: PolicyState, phase: int) -> None:
    """Issue and complete everything that is queued."""
    key = copies.next_copy(state, phase)
    while key >= 0:
        copies.complete(state, key)
        key = copies.next_copy(state, phase)


@uncounted
def _load(state: PolicyState, rules: Rules, layer: int, expert: int, target: NDArray[np.bool_]) -> None:
    """A warm start's expert goes into a persistent slot nobody holds; target [E]: all of them may stay."""
    copies.enqueue(state, layer, expert, DEMAND)
    _land(state, WARM)
    prompt.prefill_done(state, rules, layer, expert, target)


@uncounted
def _prompt(state: PolicyState, rules: Rules, counts: NDArray[np.int32], target: NDArray[np.bool_]) -> None:
    """The last prompt chunk fills the cache; counts [L, E], target [E] scratch.

    Nothing is fetched before all is looked up: a copy of this layer never makes another of its experts resident.
    """
    for layer in range(counts.shape[0]):
        prompt.look_up(state, layer, counts[layer])
        target[:] = False
        prompt.prefill_targets(state, rules, layer, counts[layer], target)
        absent = state.scratch[0]
        for expert in range(counts.shape[1]):
            absent[expert] = counts[layer, expert] > 0 and state.status[layer, expert] != KEPT
        for expert in range(counts.shape[1]):
            if absent[expert]:
                copies.enqueue(state, layer, expert, DEMAND)
                _land(state, PREFILL)
                prompt.prefill_done(state, rules, layer, expert, target)


@inlined
def _prefetched(state: PolicyState, layer: int, expert: int) -> bool:
    """Whether a prefetch of the expert has landed that nothing has used yet."""
    purpose = state.purpose[layer, expert]
    return bool(state.status[layer, expert] == LANDED and purpose in (PREFETCH, AHEAD))


@uncounted
def _decode(
    state: PolicyState,
    rules: Rules,
    demand: NDArray[np.int32],
    counts: NDArray[np.int32],
    predicted: NDArray[np.int32],
    costs: SplitCosts,
    actions: NDArray[np.int8],
    histogram: NDArray[np.int64],
) -> None:
    """Decode steps of one request; demand and counts [T, L, D], predicted [depth, T, L, width], actions [D] scratch."""
    layers = demand.shape[1]
    for token in range(demand.shape[0]):
        for layer in range(layers):
            distinct, used = 0, 0
            for i in range(demand.shape[2]):
                if counts[token, layer, i] > 0:
                    distinct += 1
                    used += _prefetched(state, layer, demand[token, layer, i])
            experts, action = demand[token, layer, :distinct], actions[:distinct]
            step.demand(state, rules, layer, experts, counts[token, layer, :distinct], costs, action)
            for ahead in range(predicted.shape[0]):
                if layer + 1 + ahead < layers:
                    step.prefetch(state, rules, layer + 1 + ahead, predicted[ahead, token, layer + 1 + ahead])
            _land(state, DECODE)
            on_cpu, fetched = 0, 0
            for i in range(distinct):
                on_cpu += action[i] == step.ACT_CPU
                fetched += action[i] == step.ACT_FETCH or action[i] == step.ACT_LATE
            histogram[layer, fetched, on_cpu, used] += 1
            step.finish(state, rules, layer, experts, action, costs)
            _land(state, DECODE)
        step.end_step(state)
