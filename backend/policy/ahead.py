"""Prefetch for a layer's next step, at the end of its layer-step (design: section 5, Next-step prefetch).

Candidates are the absent experts with s >= tau, highest s first (`utility`), or the absent ones of the demand that is
ending, most tokens first (`previous_step`). Each takes a persistent slot: one nobody holds, or that of a resident which
ranks below it in the eviction order. They are queued behind all prefetches of the running step, so that they are copied
while the link is idle: in the rest of this step, while drafting, and in the next step before the layer computes. The
link is idle for about a layer-step without its experts or, with few demand copies, for what is left of it; each
layer-step adds that to its layer's credit, and each copy is paid from it.
"""

from __future__ import annotations

from foreload.backend.policy.copies import drop_prefetch, enqueue, evict
from foreload.backend.policy.order import has_room, prefers, worst_kept
from foreload.backend.policy.rules import BY_UTILITY, POOL_SHARED, Rules
from foreload.backend.policy.split import SplitCosts
from foreload.backend.policy.state import (
    ABSENT,
    AHEAD,
    DECODE,
    KEPT,
    LANDED,
    STEP,
    WASTED,
    WORST_UNKNOWN,
    PolicyState,
)
from foreload.compiled import uncounted


@uncounted
def threshold(state: PolicyState, rules: Rules, layer: int) -> int:
    """tau of the layer: as fixed, or as its last split by utility chose, or 1 where none did."""
    return max(1, rules.tau if rules.tau > 0 else int(state.tau[layer]))


@uncounted
def _wanted(state: PolicyState, rules: Rules, layer: int, expert: int, tau: int) -> bool:
    if rules.ahead == BY_UTILITY:
        return bool(state.score[layer, expert] >= tau)
    return bool(state.last_step[layer, expert] == state.scalars[STEP])


@uncounted
def _first(state: PolicyState, rules: Rules, layer: int, a: int, b: int) -> bool:
    """Whether `a` is prefetched before `b`."""
    if rules.ahead == BY_UTILITY:
        first = state.score[layer, a] - state.score[layer, b]
        later = state.last_step[layer, a] - state.last_step[layer, b]
    else:
        first = state.last_tokens[layer, a] - state.last_tokens[layer, b]
        later = state.score[layer, a] - state.score[layer, b]
    if first != 0:
        return bool(first > 0)
    return bool(later > 0) if later != 0 else a < b


@uncounted
def _settle(state: PolicyState, rules: Rules, layer: int, tau: int) -> None:
    """Copies for the step that is ending which it did not demand: those the next may demand stay, others are dropped.

    One that has landed is a resident then, and counted as wasted.
    """
    for expert in range(state.status.shape[1]):
        status = state.status[layer, expert]
        if state.purpose[layer, expert] != AHEAD or status in (ABSENT, KEPT):
            continue
        if not _wanted(state, rules, layer, expert, tau):
            drop_prefetch(state, layer, expert)
        elif status == LANDED:
            state.status[layer, expert] = KEPT
            state.counters[DECODE, layer, WASTED] += 1
            state.worst[layer] = WORST_UNKNOWN


@uncounted
def _victim(state: PolicyState, rules: Rules, layer: int) -> int:
    """Key of the resident that goes first, or -1. What is computing is frozen: in a shared pool its whole layer, in
    the layer's own pool the experts of the demand that is ending.
    """
    if rules.pool == POOL_SHARED:
        return worst_kept(state, rules, layer, layer)
    worst = -1
    for expert in range(state.status.shape[1]):
        free = state.status[layer, expert] == KEPT and state.last_step[layer, expert] != state.scalars[STEP]
        if free and (worst < 0 or prefers(state, rules, layer, worst, layer, expert)):
            worst = expert
    return layer * state.status.shape[1] + worst if worst >= 0 else -1


@uncounted
def _queue(state: PolicyState, rules: Rules, layer: int, expert: int) -> bool:
    """Queue the copy of an absent expert if a persistent slot is to be had for it."""
    if not has_room(state, rules, layer):
        experts, victim = state.status.shape[1], _victim(state, rules, layer)
        if victim < 0 or not prefers(state, rules, layer, expert, victim // experts, victim % experts):
            return False
        evict(state, victim)
    return enqueue(state, layer, expert, AHEAD)


@uncounted
def prefetch_ahead(state: PolicyState, rules: Rules, layer: int, fetched: int, costs: SplitCosts) -> None:
    """Queue what `layer` may need in its next step; `fetched` copies were demanded in the one that is ending.

    What was copied for that one and is not wanted again is dropped.
    """
    tau = threshold(state, rules, layer)
    _settle(state, rules, layer, tau)
    idle = max(costs.dense_ns, costs.layer_ns - fetched * costs.io_ns)
    state.credit[layer] = min(state.credit[layer] + idle, idle + costs.io_ns)
    tried = state.scratch[0]
    tried[:] = 0
    for _ in range(rules.ahead_width):
        best = -1
        for expert in range(len(tried)):
            absent = state.status[layer, expert] == ABSENT and tried[expert] == 0
            candidate = absent and _wanted(state, rules, layer, expert, tau)
            if candidate and (best < 0 or _first(state, rules, layer, expert, best)):
                best = expert
        if best < 0 or idle <= 0 or state.credit[layer] < costs.io_ns:
            return
        tried[best] = 1
        if not _queue(state, rules, layer, best):
            return
        state.credit[layer] -= costs.io_ns
