"""What a prompt's last chunk leaves in the cache: the experts with most tokens in it, then lower ids.

In the layer's own pool the C most used of its residents and the chunk's demand stay. In a shared pool, layer by layer,
a fetched expert replaces the resident with fewest tokens in the chunk (then the one needed latest, then the larger id)
among the layers the chunk has reached; layers it has not reached are left alone, so nothing is copied twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.copies import enqueue, keep, release
from foreload.backend.policy.order import has_room, prefers
from foreload.backend.policy.rules import ADMIT_NONE, BELADY, POOL_SHARED, Rules
from foreload.backend.policy.state import (
    DEMAND,
    HITS,
    IN_FLIGHT,
    KEPT,
    MISSES,
    N_FREE,
    N_UNFILLED,
    PREFILL,
    PolicyState,
)
from foreload.compiled import uncounted


@uncounted
def _chunk_prefers(state: PolicyState, rules: Rules, at: int, layer_a: int, a: int, layer_b: int, b: int) -> bool:
    """Whether a prompt at layer `at` keeps `a` rather than `b`; an oracle asks the future instead of the chunk."""
    if rules.eviction == BELADY:
        return bool(prefers(state, rules, layer_a, a, layer_b, b))
    first = state.prompt[layer_a, a] - state.prompt[layer_b, b]
    if first != 0:
        return bool(first > 0)
    layers = state.status.shape[0]
    if layer_a != layer_b:
        return bool((layer_a - at) % layers < (layer_b - at) % layers)
    return a < b


@uncounted
def look_up(state: PolicyState, layer: int, counts: NDArray[np.int32]) -> None:
    """Count the hits and misses of a prompt chunk's demand, counts [E] tokens."""
    for expert in range(len(counts)):
        if counts[expert] > 0:
            found = state.status[layer, expert] == KEPT
            state.counters[PREFILL, layer, HITS if found else MISSES] += 1


@uncounted
def prefill_targets(
    state: PolicyState, rules: Rules, layer: int, counts: NDArray[np.int32], target: NDArray[np.bool_]
) -> None:
    """The last prompt chunk reaches `layer`: which of its residents and demanded may stay.

    counts [E] tokens per expert in that chunk; target [E] starts False and is set for them.
    """
    for expert in range(len(counts)):
        state.prompt[layer, expert] = counts[expert]
    if rules.admission == ADMIT_NONE:
        return
    if rules.pool == POOL_SHARED:
        for expert in range(len(counts)):
            target[expert] = counts[expert] > 0
        return
    for _ in range(state.capacity[layer]):
        best = -1
        for expert in range(len(counts)):
            candidate = counts[expert] > 0 or state.status[layer, expert] == KEPT
            if target[expert] or not candidate:
                continue
            if best < 0 or _chunk_prefers(state, rules, layer, layer, expert, layer, best):
                best = expert
        if best < 0:
            break
        target[best] = True


@uncounted
def prefill_fetch(state: PolicyState, layer: int, expert: int) -> bool:
    """Queue a prompt chunk's copy (or adopt one in flight); False if no staging slot is free: the wave is full."""
    if state.status[layer, expert] == IN_FLIGHT:
        state.purpose[layer, expert] = DEMAND
        return True
    spare = state.scalars[N_FREE] - state.scalars[N_UNFILLED]
    return spare > 0 and enqueue(state, layer, expert, DEMAND)


@uncounted
def _victim(state: PolicyState, rules: Rules, layer: int, target: NDArray[np.bool_]) -> int:
    """Key of the resident that an expert of `layer` may replace, or -1."""
    experts = state.status.shape[1]
    shared = rules.pool == POOL_SHARED
    victim = -1
    for other in range(state.status.shape[0]):
        if other != layer and not (shared and state.prompt[other, 0] >= 0):
            continue
        for expert in range(experts):
            if state.status[other, expert] != KEPT or (not shared and target[expert]):
                continue
            if victim < 0 or _chunk_prefers(state, rules, layer, victim // experts, victim % experts, other, expert):
                victim = other * experts + expert
    return victim


@uncounted
def prefill_done(state: PolicyState, rules: Rules, layer: int, expert: int, target: NDArray[np.bool_]) -> None:
    """A fetched expert has served its chunk: it stays where the targets say so and there is room, or is dropped."""
    if not target[expert]:
        release(state, layer, expert)
    elif has_room(state, rules, layer):
        keep(state, layer, expert, -1)
    else:
        experts, victim = state.status.shape[1], _victim(state, rules, layer, target)
        worth = rules.pool != POOL_SHARED or (
            victim >= 0 and _chunk_prefers(state, rules, layer, layer, expert, victim // experts, victim % experts)
        )
        if victim >= 0 and worth:
            keep(state, layer, expert, victim)
        else:
            release(state, layer, expert)
