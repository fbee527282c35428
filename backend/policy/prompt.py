"""What a prompt copies before it knows its routing, and what its last chunk leaves in the cache.

While a chunk's last experts of a layer arrive, absent experts of the next layer are copied, so that the link has work
until that layer is routed: those with most tokens in the prompt so far, or any, if the chunk is so long that it will
demand nearly all. What is then not demanded is dropped when it has arrived: taking it back would make what is counted
depend on time.

The experts with most tokens in the last chunk, then lower ids, stay. In the layer's own pool the C most used of its
residents and the chunk's demand stay. In a shared pool, layer by layer, a fetched expert replaces the resident with
fewest tokens in the chunk (then the one needed latest, then the larger id) among the layers the chunk has reached;
layers it has not reached are left alone, so nothing is copied twice.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.copies import enqueue, keep, release
from foreload.backend.policy.order import has_room, prefers
from foreload.backend.policy.rules import ADMIT_NONE, BELADY, POOL_SHARED, Rules
from foreload.backend.policy.state import (
    ABSENT,
    DEMAND,
    HITS,
    KEPT,
    MISSES,
    N_FREE,
    N_UNFILLED,
    PREFETCH,
    PREFILL,
    WASTED,
    PolicyState,
)
from foreload.compiled import uncounted

SURE = 4
"""Tokens times k per expert, of a chunk from which on nearly all experts are taken to be demanded."""


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
    """Count the hits and misses of a prompt chunk's demand, counts [E] tokens, and what was copied early in vain."""
    for expert in range(len(counts)):
        status = state.status[layer, expert]
        state.asked[layer, expert] += counts[expert]
        if counts[expert] > 0:
            state.counters[PREFILL, layer, HITS if status == KEPT else MISSES] += 1
        elif status not in (ABSENT, KEPT):
            state.counters[PREFILL, layer, WASTED] += 1


@uncounted
def prefill_ahead(state: PolicyState, layer: int, routed: int, chosen: NDArray[np.int64]) -> int:
    """Absent experts of `layer` worth copying before a chunk of `routed` = tokens times k is routed there, best first.

    Those with most tokens in the prompt so far, then lower ids. Of a first chunk: all if it is long enough, else none.
    At most as many as staging holds go into chosen [E]; returns how many.
    """
    asked, experts, so_far, staging = state.asked[layer], state.status.shape[1], 0, len(state.free)
    for expert in range(experts):
        so_far += asked[expert]
    for persistent in state.capacity:
        staging -= persistent
    least = 0 if so_far == 0 and routed >= SURE * experts else 1
    last, n = -1, 0
    for _ in range(staging):
        best = -1
        for expert in range(experts):
            if state.status[layer, expert] != ABSENT or asked[expert] < least:
                continue
            behind = last < 0 or asked[expert] < asked[last] or (asked[expert] == asked[last] and expert > last)
            if behind and (best < 0 or asked[expert] > asked[best]):
                best = expert
        if best < 0:
            break
        chosen[n] = last = best
        n += 1
    return n


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
def prefill_fetch(state: PolicyState, layer: int, expert: int, early: bool = False) -> bool:
    """Queue a prompt chunk's copy, behind those before it; False if no staging slot is free: the wave is full.

    `early`: before the chunk is routed there (`prefill_ahead`); it counts as a prefetch.
    """
    spare = state.scalars[N_FREE] - state.scalars[N_UNFILLED]
    if spare <= 0 or not enqueue(state, layer, expert, DEMAND):
        return False
    if early:
        state.purpose[layer, expert] = PREFETCH
    return True


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
