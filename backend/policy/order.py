"""Eviction orders (design: section 3). Each is total: of two experts of a layer exactly one is preferred."""

from __future__ import annotations

from numba import njit

from foreload.backend.policy.state import KEPT, STEP, PolicyState

EVICTIONS = ("lru", "lfu", "lfru")
"""Order names; the index is what compiled functions take.

lru: (last step used, tokens in that step, -id). lfu: (uses in this request, last step, -id).
lfru: (uses / (steps since last use + 1), last step, -id). The smaller goes first.
"""
LRU, LFU, LFRU = 0, 1, 2


@njit(cache=True)
def prefers(state: PolicyState, layer: int, a: int, b: int, eviction: int) -> bool:
    """Whether expert `a` of `layer` stays rather than `b`."""
    last_a, last_b = state.last_step[layer, a], state.last_step[layer, b]
    uses_a, uses_b = state.uses[layer, a], state.uses[layer, b]
    if eviction == LRU:
        if last_a != last_b:
            return bool(last_a > last_b)
        tokens_a, tokens_b = state.last_tokens[layer, a], state.last_tokens[layer, b]
        if tokens_a != tokens_b:
            return bool(tokens_a > tokens_b)
        return a < b
    if eviction == LFU:
        if uses_a != uses_b:
            return bool(uses_a > uses_b)
    else:
        now = state.scalars[STEP]
        score_a, score_b = uses_a * (now - last_b + 1), uses_b * (now - last_a + 1)
        if score_a != score_b:
            return bool(score_a > score_b)
    if last_a != last_b:
        return bool(last_a > last_b)
    return a < b


@njit(cache=True)
def worst_kept(state: PolicyState, layer: int, eviction: int) -> int:
    """The kept expert of `layer` that goes first, or -1."""
    worst = -1
    for expert in range(state.status.shape[1]):
        if state.status[layer, expert] == KEPT and (worst < 0 or prefers(state, layer, worst, expert, eviction)):
            worst = expert
    return worst
