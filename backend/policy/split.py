"""How many of a layer-step's absent experts are fetched, the rest computed on the CPU (design: section 5, Split).

Absent experts are ordered by (tokens descending, s descending, id), the one the CPU has read ahead last; a rule that
counts fetches the first n of them.
All copies cost the same, so no other subset of n is better. `tau` fetches those with s >= tau.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.rules import (
    BALANCE,
    CPU,
    FETCH,
    SPLIT_BANDWIDTH,
    SPLIT_PER_EXPERT,
    TAU_AUTO,
    Rules,
)
from foreload.backend.policy.state import READ, PolicyState
from foreload.compiled import inlined, uncounted


class SplitCosts(NamedTuple):
    """What a layer-step costs by measurement, contended, in nanoseconds; one token per expert unless said."""

    io_ns: int
    gpu_ns: NDArray[np.int64]  # [n + 1] n resident experts on the GPU
    cpu_ns: NDArray[np.int64]  # [n + 1] n experts on the CPU
    cpu_token_ns: int = 0  # each token of a CPU expert beyond its first
    dense_ns: int = 0  # a layer-step without its experts, and its share of drafting: the link may be idle as long
    layer_ns: int = 0  # the same with every expert resident


NO_COSTS = SplitCosts(0, np.zeros(1, np.int64), np.zeros(1, np.int64))
"""For rules that weigh nothing."""


class Load(NamedTuple):
    """What a split looks at beside the absent experts."""

    resident: int
    late: int  # demanded and under way
    backlog_ns: int  # R: until those, and copies before them, are done
    ahead_ns: int = 0  # what the link has to copy for the next layers, once it is done with this one


@uncounted
def link_backlog_ns(in_flight: int, ahead: int, io_ns: int) -> int:
    """Expected time until the copies in flight and the `ahead` queued demand copies are done (the R of section 5).

    The copy at the head of the link is half done on average.
    """
    backlog = (in_flight + ahead) * io_ns
    return backlog - io_ns // 2 if in_flight > 0 else backlog


@inlined
def _at(table: NDArray[np.int64], count: int) -> int:
    return int(table[min(count, len(table) - 1)])


@inlined
def gpu_ns(fetched: int, load: Load, costs: SplitCosts) -> int:
    """End of the GPU's part: max(T_gpu(resident), R + n t_io + t_gpu(1))."""
    link = 0
    if fetched + load.late > 0:
        link = load.backlog_ns + fetched * costs.io_ns + _at(costs.gpu_ns, 1)
    return max(_at(costs.gpu_ns, load.resident), link)


@inlined
def cpu_ns(experts: int, tokens: int, costs: SplitCosts) -> int:
    """End of the CPU's part: `experts` with `tokens` in all."""
    return _at(costs.cpu_ns, experts) + (tokens - experts) * costs.cpu_token_ns


@inlined
def head_start_ns(fetched: int, end_ns: int, load: Load, costs: SplitCosts) -> int:
    """What is worth to the next layers what the link copies for them before they ask, if this one ends at `end_ns`.

    Link and CPU work side by side. Where both always have work, a layer-step takes as long however an expert more is
    given to one of them if a nanosecond of the link is worth cpu / (cpu + t_io), cpu being an expert more on the CPU.
    """
    if load.ahead_ns == 0:
        return 0
    idle = end_ns + costs.dense_ns - load.backlog_ns - fetched * costs.io_ns
    most = len(costs.cpu_ns) - 1
    one = _at(costs.cpu_ns, most) // max(1, most)
    return min(load.ahead_ns, max(0, idle)) * one // max(1, one + costs.io_ns)


@inlined
def objective_ns(fetched: int, left: int, left_tokens: int, load: Load, rules: Rules, costs: SplitCosts) -> int:
    """What is to be small: the end of both parts less the next layers' head start, or (`balance`) the time between the
    parts' ends.
    """
    on_gpu, on_cpu = gpu_ns(fetched, load, costs), cpu_ns(left, left_tokens, costs)
    if rules.objective == BALANCE:
        return abs(on_gpu - on_cpu)
    end_ns = max(on_gpu, on_cpu)
    return end_ns - head_start_ns(fetched, end_ns, load, costs)


@uncounted
def fetch_count(rules: Rules, tokens: NDArray[np.int32], load: Load, costs: SplitCosts) -> int:
    """How many absent experts to fetch, of any rule but `tau`; tokens [m] in their order, largest first.

    Ties go to fetching more, which also warms the cache.
    """
    absent = len(tokens)
    if rules.miss == FETCH or absent == 0:
        return absent
    if rules.miss == CPU:
        return 0
    one = _at(costs.cpu_ns, 1)
    if rules.miss == SPLIT_BANDWIDTH:
        total = costs.io_ns + one
        return int((2 * absent * one + total) // (2 * total))
    if rules.miss == SPLIT_PER_EXPERT:
        worth = 0
        for i in range(absent):
            worth += tokens[i] * one >= costs.io_ns + _at(costs.gpu_ns, 1)
        return worth
    best, best_ns, left = 0, 0, 0
    for i in range(absent):
        left += tokens[i]
    for fetched in range(absent + 1):
        time_ns = objective_ns(fetched, absent - fetched, left, load, rules, costs)
        if fetched == 0 or time_ns <= best_ns:
            best, best_ns = fetched, time_ns
        if fetched < absent:
            left -= tokens[fetched]
    return best


@uncounted
def fetch_level(
    rules: Rules, tokens: NDArray[np.int32], scores: NDArray[np.int32], load: Load, costs: SplitCosts
) -> int:
    """The threshold tau: experts with s >= tau are fetched, K + 1 sends all to the CPU; [m] as for `fetch_count`.

    Fixed by the rules or, if they say auto, the best of 1..K+1; ties go to the lower one, which fetches more.
    """
    if rules.tau != TAU_AUTO:
        return rules.tau
    best, best_ns = 0, 0
    for tau in range(rules.levels + 1, 0, -1):
        fetched, left_tokens = 0, 0
        for i in range(len(tokens)):
            if scores[i] >= tau:
                fetched += 1
            else:
                left_tokens += tokens[i]
        time_ns = objective_ns(fetched, len(tokens) - fetched, left_tokens, load, rules, costs)
        if best == 0 or time_ns <= best_ns:
            best, best_ns = tau, time_ns
    return best


@inlined
def is_read(state: PolicyState, layer: int, expert: int) -> bool:
    """Whether the CPU reads an expert ahead."""
    return bool(state.scalars[READ] == layer * state.status.shape[1] + expert)


@inlined
def in_order(
    state: PolicyState, layer: int, experts: NDArray[np.int32], counts: NDArray[np.int32], missing: NDArray[np.int32]
) -> None:
    """Sort indices of absent experts in place by (tokens descending, s descending, id ascending), the one that the
    CPU has read ahead behind the others.
    """
    for at in range(1, len(missing)):
        i, to = missing[at], at
        while to > 0:
            j = missing[to - 1]
            first = is_read(state, layer, experts[i]) - is_read(state, layer, experts[j])
            if first == 0:
                first = counts[j] - counts[i]
            if first == 0:
                first = state.score[layer, experts[j]] - state.score[layer, experts[i]]
            if first > 0 or (first == 0 and experts[j] < experts[i]):
                break
            missing[to] = j
            to -= 1
        missing[to] = i
