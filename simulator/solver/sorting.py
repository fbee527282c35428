"""One budget without a solver: sort what each further unit saves. A plan, and the linear program's bound.

Per layer only the lower convex hull of (units, cost) matters to the linear program; its best point fills the hulls'
segments in the order of what a unit saves, the last one in part. Leaving that one out gives a plan that costs at most
what it saves more than any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from foreload.simulator.solver.problem import Outcome, Problem, Solution, check


def by_sorting(problem: Problem) -> Solution:
    """A plan of a problem with one budget, and the bound that the linear program has."""
    begun = time.perf_counter()
    (budget,) = problem.limit
    room = problem.limit[budget] - problem.least(budget)
    if room < 0:
        seconds = time.perf_counter() - begun
        return Solution(Outcome.INFEASIBLE, (), np.inf, np.inf, np.inf, np.inf, seconds, "sorting")
    layers = range(len(problem.cost))
    hulls = [_hull(problem.cost[layer], problem.use[budget][layer], room) for layer in layers]
    at, saved = [0] * len(hulls), 0.0
    start = check(problem, tuple(hull[0] for hull in hulls))
    for layer, units, gain in _segments(problem, budget, hulls):
        if units > room:
            saved += gain * room / units
            break
        room, saved = room - units, saved + gain
        at[layer] += 1
    choice = tuple(hull[n] for hull, n in zip(hulls, at, strict=True))
    objective, bound = check(problem, choice), start - saved
    gap = (objective - bound) / abs(objective) if objective else 0.0
    seconds = time.perf_counter() - begun
    return Solution(Outcome.FEASIBLE_LIMIT, choice, objective, bound, gap, bound, seconds, "sorting")


def _segments(problem: Problem, budget: str, hulls: Sequence[list[int]]) -> list[tuple[int, int, float]]:
    """(layer, units, what they save) of all hulls' segments, the most saved per unit first."""
    found = []
    for layer, hull in enumerate(hulls):
        cost, use = problem.cost[layer], problem.use[budget][layer]
        for a, b in pairwise(hull):
            found.append((layer, int(use[b] - use[a]), float(cost[a] - cost[b])))
    # Within a layer savings per unit fall, so that sorting keeps a hull's segments in their order.
    return sorted(found, key=lambda segment: (-segment[2] / segment[1], segment[0]))


def _hull(cost: NDArray[np.float64], use: NDArray[np.int64], room: int) -> list[int]:
    """Choices on the lower convex hull, from the fewest units to the lowest cost that `room` more units allow."""
    found: list[int] = []
    for j in np.lexsort((cost, use)).tolist():
        if use[j] > use.min() + room:
            break
        if found and (cost[j] >= cost[found[-1]] or use[j] == use[found[-1]]):
            continue
        while len(found) > 1:
            a, b = found[-2], found[-1]
            # b lies on or above the line from a to j
            if (cost[a] - cost[b]) * (use[j] - use[a]) > (cost[a] - cost[j]) * (use[b] - use[a]):
                break
            found.pop()
        found.append(j)
    return found
