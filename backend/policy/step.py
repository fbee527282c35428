"""One layer-step of decode as the brain sees it: demand, prefetch, finish (design: sections 2, 3, 7)."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foreload.backend.policy.copies import (
    cancel,
    commit_uploads,
    drop_unused,
    enqueue,
    keep,
    keep_or_release,
    promote,
    release,
)
from foreload.backend.policy.order import prefers, worst_kept
from foreload.backend.policy.split import SplitCosts, fetch_count, link_backlog_ns
from foreload.backend.policy.state import (
    ABSENT,
    DECODE,
    DEMAND,
    DISCARD,
    HITS,
    IN_FLIGHT,
    KEPT,
    LANDED,
    LATE,
    MISSES,
    N_DEMAND_HELD,
    N_FREE,
    N_IN_FLIGHT,
    N_UNFILLED,
    ON_CPU,
    PREFETCH,
    QUEUED,
    STEP,
    UPLOAD,
    WASTED,
    PolicyState,
)

ACT_HIT, ACT_LATE, ACT_FETCH, ACT_CPU = 0, 1, 2, 3
ADMIT_NONE, ADMIT_DEMAND, ADMIT_BACKGROUND = 0, 1, 2


@njit(cache=True)
def demand(
    state: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    eviction: int,
    rule: int,
    costs: SplitCosts,
    action: NDArray[np.int8],
) -> bool:
    """Look the whole demand of a layer-step up at once and decide what happens to each expert.

    experts [n] distinct, counts [n] tokens each; writes action [n]. Only here do recency, counts and uses change.
    Returns False if no staging slot was left for a fetch (an error: staging holds one token's demand).
    """
    commit_uploads(state, layer, eviction)
    n = len(experts)
    resident, late, ahead, absent = 0, 0, 0, 0
    missing = np.empty(n, np.int32)
    for i in range(n):
        expert = experts[i]
        status = state.status[layer, expert]
        if status == QUEUED and state.purpose[layer, expert] == UPLOAD:
            cancel(state, layer, expert)
            status = ABSENT
        if status in (KEPT, LANDED):
            action[i] = ACT_HIT
            resident += 1
        elif status == ABSENT:
            missing[absent] = i
            absent += 1
        else:
            action[i] = ACT_LATE
            late += 1
            if status == QUEUED:
                promote(state, layer, expert)
                ahead += 1
            elif state.purpose[layer, expert] == DISCARD:
                state.counters[DECODE, layer, WASTED] -= 1
        if status != KEPT and status != ABSENT:
            state.purpose[layer, expert] = DEMAND
            state.scalars[N_DEMAND_HELD] += 1
        state.last_step[layer, expert] = state.scalars[STEP]
        state.last_tokens[layer, expert] = counts[i]
        state.uses[layer, expert] += 1
    counters = state.counters[DECODE, layer]
    counters[HITS] += resident
    counters[LATE] += late
    counters[MISSES] += absent
    backlog = link_backlog_ns(state.scalars[N_IN_FLIGHT], ahead, costs.io_ns)
    fetched = fetch_count(rule, absent, resident, late, backlog, costs)
    counters[ON_CPU] += absent - fetched
    _by_tokens(missing[:absent], experts, counts)
    for at in range(absent):
        i = missing[at]
        if at >= fetched:
            action[i] = ACT_CPU
            continue
        action[i] = ACT_FETCH
        if not enqueue(state, layer, experts[i], DEMAND):
            return False
        state.scalars[N_DEMAND_HELD] += 1
    return True


@njit(cache=True)
def _by_tokens(missing: NDArray[np.int32], experts: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
    """Sort indices of absent experts in place by (tokens descending, id ascending)."""
    for at in range(1, len(missing)):
        i, to = missing[at], at
        while to > 0:
            j = missing[to - 1]
            if counts[j] > counts[i] or (counts[j] == counts[i] and experts[j] < experts[i]):
                break
            missing[to] = j
            to -= 1
        missing[to] = i


@njit(cache=True)
def _room(state: PolicyState, reserve: int) -> bool:
    """Whether a copy nobody has demanded may take a slot and still leave `reserve` for the next layer-step."""
    spare = state.scalars[N_FREE] - state.scalars[N_UNFILLED]
    return bool(spare > 0 and spare + state.scalars[N_DEMAND_HELD] > reserve)


@njit(cache=True)
def prefetch(state: PolicyState, layer: int, predicted: NDArray[np.int32], reserve: int) -> None:
    """Queue copies of the experts predicted for `layer`, best first (-1: none); cancel what is no longer predicted."""
    for expert in range(state.status.shape[1]):
        if state.status[layer, expert] == QUEUED and state.purpose[layer, expert] == PREFETCH:
            wanted = False
            for i in range(len(predicted)):
                wanted = wanted or predicted[i] == expert
            if not wanted:
                cancel(state, layer, expert)
    for i in range(len(predicted)):
        expert = predicted[i]
        if expert < 0:
            continue
        status = state.status[layer, expert]
        if status == ABSENT and _room(state, reserve):
            enqueue(state, layer, expert, PREFETCH)
        elif status == IN_FLIGHT and state.purpose[layer, expert] == DISCARD:
            state.purpose[layer, expert] = PREFETCH
            state.counters[DECODE, layer, WASTED] -= 1


@njit(cache=True)
def finish(
    state: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    action: NDArray[np.int8],
    eviction: int,
    admission: int,
    admit_per_step: int,
    reserve: int,
) -> None:
    """End of a layer-step: keep or drop what it fetched, drop unused prefetches, queue background uploads."""
    state.scalars[N_DEMAND_HELD] = 0
    for i in range(len(experts)):
        expert = experts[i]
        if action[i] != ACT_CPU and state.status[layer, expert] == LANDED:
            if admission == ADMIT_NONE:
                release(state, layer, expert)
            else:
                keep_or_release(state, layer, expert, eviction)
    drop_unused(state, layer)
    if admission == ADMIT_BACKGROUND:
        _queue_uploads(state, layer, experts, action, eviction, admit_per_step, reserve)


@njit(cache=True)
def _queue_uploads(
    state: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    action: NDArray[np.int8],
    eviction: int,
    limit: int,
    reserve: int,
) -> None:
    """Queue at most `limit` experts the CPU served, the most preferred first, if the cache would keep them."""
    worst = worst_kept(state, layer, eviction)
    for _ in range(limit):
        best = -1
        for i in range(len(experts)):
            expert = experts[i]
            candidate = action[i] == ACT_CPU and state.status[layer, expert] == ABSENT
            if candidate and (best < 0 or prefers(state, layer, expert, best, eviction)):
                best = expert
        unfilled = state.kept[layer] < state.capacity[layer]
        if best < 0 or not (unfilled or (worst >= 0 and prefers(state, layer, best, worst, eviction))):
            return
        if not _room(state, reserve):
            return
        enqueue(state, layer, best, UPLOAD)


@njit(cache=True)
def prefill_targets(state: PolicyState, layer: int, counts: NDArray[np.int32], target: NDArray[np.bool_]) -> None:
    """The experts `layer` keeps after the last prompt chunk: the most used of residents and demanded, then lower ids.

    counts [E] tokens per expert in that chunk; target [E] starts False and is set for them.
    """
    experts = len(counts)
    for _ in range(state.capacity[layer]):
        best = -1
        for expert in range(experts):
            candidate = counts[expert] > 0 or state.status[layer, expert] == KEPT
            if candidate and not target[expert] and (best < 0 or counts[expert] > counts[best]):
                best = expert
        if best < 0:
            break
        target[best] = True


@njit(cache=True)
def prefill_done(state: PolicyState, layer: int, expert: int, target: NDArray[np.bool_], eviction: int) -> None:
    """A fetched expert has served its chunk: it replaces a resident that is no target, or gives its slot back."""
    if not target[expert]:
        release(state, layer, expert)
        return
    victim = -1
    if state.kept[layer] == state.capacity[layer]:
        for other in range(len(target)):
            candidate = state.status[layer, other] == KEPT and not target[other]
            if candidate and (victim < 0 or prefers(state, layer, victim, other, eviction)):
                victim = other
    if victim < 0 and state.kept[layer] == state.capacity[layer]:
        release(state, layer, expert)
        return
    keep(state, layer, expert, victim)
