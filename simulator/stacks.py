"""One stack per layer holds what a cache of every size holds (see `curves`): compiled passes over one layer's ids.

R rows in S steps, k experts per row, E experts. Row ranges and flags of steps are those of `curves.Steps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.order import ONE_USE, faded, random_rank
from foreload.backend.policy.rules import AGED, BELADY, LFU, LRU, RANDOM
from foreload.compiled import plain

PROMPT = 100
"""An order beside the brain's: what a prompt's last chunk leaves, (its tokens, -id)."""


class History(NamedTuple):
    """What orders look at, per expert, [E]."""

    last: NDArray[np.int64]  # counted step that demanded it last, -1 if none
    last_tokens: NDArray[np.int32]  # tokens in that step
    uses: NDArray[np.int64]  # counted steps of this request that demanded it
    weight: NDArray[np.int64]  # uses that fade, as at its last one (AGED alone)
    next_use: NDArray[np.int64]  # the counted step that demands it next (BELADY alone)
    tokens: NDArray[np.int32]  # in the present step


@plain
def count_demand(
    ids: NDArray[np.int16],
    starts: NDArray[np.int64],
    chunk: NDArray[np.int64],
    counted: NDArray[np.bool_],
    uses: NDArray[np.int64],
    cold: NDArray[np.int64],
) -> None:
    """Add to uses [E] the counted steps that demand each expert; ids [R, k].

    cold [E] becomes 1 where the first of them comes before any prompt whose last chunk has the expert.
    """
    seen = np.full(len(uses), -1)
    for at in range(len(counted)):
        for row in range(starts[at] if counted[at] else chunk[at], starts[at + 1]):
            for expert in ids[row]:
                if counted[at] and seen[expert] < at:
                    uses[expert] += 1
                    cold[expert] |= seen[expert] < 0
                seen[expert] = at


@plain
def next_uses(
    ids: NDArray[np.int16], starts: NDArray[np.int64], counted: NDArray[np.bool_], found: NDArray[np.int32]
) -> None:
    """The next counted step that demands an expert, into found [R, k]; S if there is none, or a prompt comes first.

    A prompt loads for free, so keeping an expert until one saves nothing. `ids` as for `count_demand`.
    """
    never = len(counted)
    later = np.full(32768, never, np.int32)
    for at in range(len(counted) - 1, -1, -1):
        for row in range(starts[at], starts[at + 1]):
            for i in range(ids.shape[1]):
                found[row, i] = later[ids[row, i]]
        for row in range(starts[at], starts[at + 1]):
            for i in range(ids.shape[1]):
                later[ids[row, i]] = at if counted[at] else never


@plain
def _rank(past: History, now: int, order: int, where: tuple[int, int], score: NDArray[Any], tie: NDArray[Any]) -> None:
    """The order at this step as score [E], then tie [E], which never ties: the larger stays.

    `where` = (layer, seed) of a random order, or (layer, half-life) of `aged`. For `lfru` a quotient of integers below
    2**26 is exact enough: different ones differ after rounding too.
    """
    experts = len(score)
    for expert in range(experts):
        other = experts - 1 - expert
        if order == BELADY:
            score[expert], tie[expert] = -past.next_use[expert], other
        elif order == RANDOM:
            score[expert], tie[expert] = random_rank(now, where[0], expert, where[1]), other
        elif order == PROMPT:
            score[expert], tie[expert] = past.tokens[expert], other
        elif order == LRU:
            score[expert], tie[expert] = past.last[expert], past.last_tokens[expert] * experts + other
        elif order == AGED:
            score[expert] = faded(past.weight[expert], now - past.last[expert], where[1])
            tie[expert] = (past.last[expert] + 1) * experts + other
        else:
            age = 1 if order == LFU else now - past.last[expert] + 1
            score[expert], tie[expert] = past.uses[expert] / age, (past.last[expert] + 1) * experts + other


@plain
def _insert(
    best: NDArray[np.int32], head: int, end: int, expert: int, score: NDArray[np.float64], tie: NDArray[np.int64]
) -> None:
    """Put `expert` into the sorted best[head:end], from the end, where it mostly belongs."""
    to = end
    mine, also = score[expert], tie[expert]
    while to > head:
        other = best[to - 1]
        if mine < score[other] or (mine == score[other] and also < tie[other]):
            break
        best[to] = other
        to -= 1
    best[to] = expert


@plain
def _update(
    stack: NDArray[np.int32],
    seen: int,
    best: NDArray[np.int32],
    new: int,
    tokens: NDArray[np.int32],
    score: NDArray[np.float64],
    tie: NDArray[np.int64],
) -> int:
    """The stack after a step that demanded `best[:new]`, the experts with `tokens` > 0; returns its length.

    Depth by depth the best of what is left over and the expert that was there is put there. What is left over is
    best[head:end], sorted; room for `new` + `seen` is needed.
    """
    for at in range(1, new):
        _insert(best, 0, at, best[at], score, tie)
    head, end = 0, new
    for at in range(seen):
        if head == end:
            return seen
        there, first = stack[at], best[head]
        if tokens[there] > 0:
            stack[at] = first
            head += 1
        elif score[there] < score[first] or (score[there] == score[first] and tie[there] < tie[first]):
            stack[at] = first
            head += 1
            _insert(best, head, end, there, score, tie)
            end += 1
    for i in range(head, end):
        stack[seen + i - head] = best[i]
    return seen + end - head


@plain
def _demand(ids: NDArray[np.int16], first: int, last: int, tokens: NDArray[np.int32], needed: NDArray[np.int32]) -> int:
    """The distinct experts of rows `first` to `last`, into `needed`, and their tokens; returns how many."""
    count = 0
    for row in range(first, last):
        for expert in ids[row]:
            if tokens[expert] == 0:
                needed[count] = expert
                count += 1
            tokens[expert] += 1
    return count


@plain
def stack_pass(
    ids: NDArray[np.int16],
    future: NDArray[np.int32],
    where: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]],
    order: int,
    salt: tuple[int, int],
    hits: NDArray[np.int64],
) -> None:
    """Add to hits[C] [E + 1] the experts found with C slots and not with C - 1, from an empty cache.

    ids [R, k]; future [R, k] of `next_uses` for BELADY, else empty; where = (starts, chunk, counted, fresh);
    salt = (layer, seed) of a random order, or (layer, half-life) of `aged`.
    """
    starts, chunk, counted, fresh = where
    experts = len(hits) - 1
    stack, needed, best = np.zeros(experts, np.int32), np.zeros(experts, np.int32), np.zeros(2 * experts, np.int32)
    score, tie = np.zeros(experts), np.zeros(experts, np.int64)
    last, tokens, last_tokens = np.full(experts, -1), np.zeros(experts, np.int32), np.zeros(experts, np.int32)
    uses, weight = np.zeros(experts, np.int64), np.zeros(experts, np.int64)
    past = History(last, last_tokens, uses, weight, np.full(experts, len(counted)), tokens)
    seen, now = 0, 0
    for at in range(len(counted)):
        if fresh[at]:
            past.uses[:] = 0
        prompt = not counted[at]
        rule = PROMPT if prompt and order != BELADY else order
        first = chunk[at] if rule == PROMPT else starts[at]
        count = _demand(ids, first, starts[at + 1], tokens, needed)
        if not prompt:
            for depth in range(seen):
                hits[depth + 1] += tokens[stack[depth]] > 0
            for expert in needed[:count]:
                if order == AGED:
                    past.weight[expert] = faded(past.weight[expert], now - last[expert], salt[1]) + ONE_USE
                last[expert], last_tokens[expert] = now, tokens[expert]
                past.uses[expert] += 1
        if order == BELADY:
            for row in range(first, starts[at + 1]):
                for i in range(ids.shape[1]):
                    past.next_use[ids[row, i]] = future[row, i]
        _rank(past, now, rule, salt, score, tie)
        best[:count] = needed[:count]
        seen = _update(stack, seen, best, count, tokens, score, tie)
        tokens[needed[:count]] = 0
        now += not prompt


def layer_hits(
    ids: NDArray[np.int16],
    where: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], NDArray[np.bool_]],
    order: int,
    salt: tuple[int, int],
    experts: int,
) -> NDArray[np.int64]:
    """Hits [E + 1] of one layer with 0..E slots under an order of the brain's; arguments as for `stack_pass`."""
    starts, _, counted, _ = where
    hits = np.zeros(experts + 1, np.int64)
    future = np.empty(ids.shape if order == BELADY else (0, ids.shape[1]), np.int32)
    if order == BELADY:
        next_uses(ids, starts, counted, future)
    stack_pass(ids, future, where, order, salt, hits)
    return np.cumsum(hits)
