"""The host copy queue and the slots: what is queued, issued, landed, kept and given back.

Copies wait in a host queue: demand first, then prefetches by the layer-step that wants them, then background uploads.
At most `WINDOW` are issued at a time; an issued copy can be neither stopped nor overtaken (a DMA is not preemptible).
"""

from __future__ import annotations

from foreload.backend.policy.order import has_room, prefers, worst_kept
from foreload.backend.policy.rules import Rules
from foreload.backend.policy.state import (
    ABSENT,
    AHEAD,
    CANCELLED,
    DECODE,
    DEMAND,
    DISCARD,
    FETCHED,
    IN_FLIGHT,
    KEPT,
    LANDED,
    N_FREE,
    N_IN_FLIGHT,
    N_QUEUED,
    N_UNFILLED,
    N_UPLOADS,
    PREFETCH,
    PREFETCHED,
    QUEUED,
    SEQUENCE,
    STEP,
    UPLOAD,
    UPLOADED,
    WASTED,
    WORST_UNKNOWN,
    PolicyState,
)
from foreload.compiled import inlined, uncounted

WINDOW = 2
"""Copies that may be in the copy stream at once."""


@inlined
def release(state: PolicyState, layer: int, expert: int) -> None:
    """Give the expert's slot back; it is absent afterwards."""
    state.free[state.scalars[N_FREE]] = state.slot[layer, expert]
    state.scalars[N_FREE] += 1
    state.slot[layer, expert] = -1
    state.status[layer, expert] = ABSENT


@inlined
def _take_place(state: PolicyState, layer: int) -> None:
    """One more persistent slot of `layer` is in use."""
    state.kept[layer] += 1
    state.scalars[N_UNFILLED] -= 1
    state.worst[layer] = WORST_UNKNOWN


@inlined
def give_place(state: PolicyState, layer: int) -> None:
    """One persistent slot of `layer` less is in use."""
    state.kept[layer] -= 1
    state.scalars[N_UNFILLED] += 1
    state.worst[layer] = WORST_UNKNOWN


@inlined
def evict(state: PolicyState, key: int) -> None:
    """Give up a resident."""
    layer, expert = key // state.status.shape[1], key % state.status.shape[1]
    release(state, layer, expert)
    give_place(state, layer)


@inlined
def _rank(state: PolicyState, layer: int, purpose: int) -> int:
    state.scalars[SEQUENCE] += 1
    if purpose in (PREFETCH, AHEAD):
        step = state.scalars[STEP] + (1 if purpose == AHEAD else 0)
        wanted = (step * state.status.shape[0] + layer) << 20
        return int((PREFETCH << 60) + wanted + (state.scalars[SEQUENCE] & 0xFFFFF))
    return int((purpose << 60) + state.scalars[SEQUENCE])


@inlined
def note_upload(state: PolicyState, layer: int, expert: int) -> None:
    """The expert's copy is a background upload from now on."""
    state.uploads[state.scalars[N_UPLOADS]] = layer * state.status.shape[1] + expert
    state.scalars[N_UPLOADS] += 1


@inlined
def enqueue(state: PolicyState, layer: int, expert: int, purpose: int) -> bool:
    """Queue a copy of an absent expert into a free slot; False if there is none. AHEAD takes a persistent slot."""
    if state.scalars[N_FREE] == 0:
        return False
    state.scalars[N_FREE] -= 1
    state.slot[layer, expert] = state.free[state.scalars[N_FREE]]
    state.status[layer, expert] = QUEUED
    state.purpose[layer, expert] = purpose
    if purpose == AHEAD:
        _take_place(state, layer)
    elif purpose == UPLOAD:
        note_upload(state, layer, expert)
    at = state.scalars[N_QUEUED]
    state.queue[at] = layer * state.status.shape[1] + expert
    state.rank[at] = _rank(state, layer, purpose)
    state.scalars[N_QUEUED] += 1
    return True


@inlined
def _unqueue(state: PolicyState, at: int) -> None:
    last = state.scalars[N_QUEUED] - 1
    state.queue[at] = state.queue[last]
    state.rank[at] = state.rank[last]
    state.scalars[N_QUEUED] = last


@inlined
def _position(state: PolicyState, layer: int, expert: int) -> int:
    key = layer * state.status.shape[1] + expert
    for at in range(state.scalars[N_QUEUED]):
        if state.queue[at] == key:
            return at
    return -1


@uncounted
def cancel(state: PolicyState, layer: int, expert: int) -> None:
    """Take a queued copy back."""
    _unqueue(state, _position(state, layer, expert))
    release(state, layer, expert)
    if state.purpose[layer, expert] == AHEAD:
        give_place(state, layer)
    state.counters[DECODE, layer, CANCELLED] += 1


@uncounted
def promote(state: PolicyState, layer: int, expert: int) -> None:
    """Move a queued prefetch that is demanded now among the demand copies."""
    state.rank[_position(state, layer, expert)] = _rank(state, layer, DEMAND)


@inlined
def _next_at(state: PolicyState) -> int:
    """Where in the queue the copy is that may be issued now, or -1."""
    flying = state.scalars[N_IN_FLIGHT]
    if state.scalars[N_QUEUED] == 0 or flying >= WINDOW:
        return -1
    first = 0
    for at in range(1, state.scalars[N_QUEUED]):
        if state.rank[at] < state.rank[first]:
            first = at
    return -1 if flying > 0 and state.rank[first] >> 60 == UPLOAD else first


@inlined
def can_issue(state: PolicyState) -> bool:
    """Whether `next_copy` returns a copy."""
    return _next_at(state) >= 0


@inlined
def next_copy(state: PolicyState, phase: int) -> int:
    """Key of the copy to issue now (it is in flight afterwards), or -1 if the window is full or nothing waits.

    A background upload goes when nothing else is in flight: a demand finds one copy ahead of it at most.
    """
    first = _next_at(state)
    if first < 0:
        return -1
    key = state.queue[first]
    _unqueue(state, first)
    layer, expert = key // state.status.shape[1], key % state.status.shape[1]
    state.status[layer, expert] = IN_FLIGHT
    state.scalars[N_IN_FLIGHT] += 1
    purpose = state.purpose[layer, expert]
    counter = FETCHED if purpose == DEMAND else (UPLOADED if purpose == UPLOAD else PREFETCHED)
    state.counters[phase, layer, counter] += 1
    return int(key)


@inlined
def complete(state: PolicyState, key: int) -> None:
    """The copy of `key` has arrived."""
    layer, expert = key // state.status.shape[1], key % state.status.shape[1]
    state.scalars[N_IN_FLIGHT] -= 1
    if state.purpose[layer, expert] == DISCARD:
        release(state, layer, expert)
    else:
        state.status[layer, expert] = LANDED


@inlined
def keep(state: PolicyState, layer: int, expert: int, victim: int) -> None:
    """Turn the staging slot of a landed expert into a persistent one; `victim` (a key, -1: none) gives its own back."""
    if victim >= 0:
        evict(state, victim)
    _take_place(state, layer)
    state.status[layer, expert] = KEPT


@inlined
def keep_or_release(state: PolicyState, rules: Rules, layer: int, expert: int) -> None:
    """Keep a landed expert if a slot is unfilled or the eviction order prefers it to a resident; else drop it."""
    if has_room(state, rules, layer):
        keep(state, layer, expert, -1)
        return
    experts = state.status.shape[1]
    worst = worst_kept(state, rules, layer)
    if worst >= 0 and prefers(state, rules, layer, expert, worst // experts, worst % experts):
        keep(state, layer, expert, worst)
    else:
        release(state, layer, expert)


@inlined
def commit_uploads(state: PolicyState, rules: Rules) -> None:
    """Background uploads that have landed join the residents of their layers: the staging slots they held are free for
    others.
    """
    experts, left = state.status.shape[1], 0
    for at in range(state.scalars[N_UPLOADS]):
        key = state.uploads[at]
        layer, expert = key // experts, key % experts
        status = state.status[layer, expert]
        if status in (ABSENT, KEPT) or state.purpose[layer, expert] != UPLOAD:
            continue
        if status == LANDED:
            keep_or_release(state, rules, layer, expert)
            continue
        state.uploads[left] = key
        left += 1
    state.scalars[N_UPLOADS] = left


@inlined
def drop_prefetch(state: PolicyState, layer: int, expert: int) -> None:
    """A prefetch its layer-step did not demand: cancel it, discard it on arrival, or give its slot back.

    One for the next step that is in flight stays: it holds a persistent slot, which a copy cannot give back before it
    has landed, and may be demanded in the step after.
    """
    status = state.status[layer, expert]
    if status == QUEUED:
        cancel(state, layer, expert)
        return
    if status == IN_FLIGHT:
        if state.purpose[layer, expert] == PREFETCH:
            state.counters[DECODE, layer, WASTED] += 1
            state.purpose[layer, expert] = DISCARD
        return
    state.counters[DECODE, layer, WASTED] += 1
    release(state, layer, expert)
    if state.purpose[layer, expert] == AHEAD:
        give_place(state, layer)


@inlined
def drop_unused(state: PolicyState, layer: int) -> None:
    """Drop the prefetches of `layer` that its demand did not use."""
    for expert in range(state.status.shape[1]):
        status = state.status[layer, expert]
        if state.purpose[layer, expert] == PREFETCH and status != ABSENT and status != KEPT:
            drop_prefetch(state, layer, expert)


@uncounted
def take_back(state: PolicyState, layer: int, expert: int) -> None:
    """Nobody wants the expert's copy any more, wherever it is; it is no resident."""
    status = state.status[layer, expert]
    if status == QUEUED:
        cancel(state, layer, expert)
        return
    if state.purpose[layer, expert] == AHEAD:
        give_place(state, layer)
    if status == IN_FLIGHT:
        state.purpose[layer, expert] = DISCARD
    else:
        release(state, layer, expert)
