"""What is asked (`Problem`), what was found (`Solution`), and the check of one against the other in plain numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from foreload.errors import InternalError


class Outcome(Enum):
    """What the solver has shown."""

    PROVEN = "proven"
    FEASIBLE_LIMIT = "feasible at the time limit"
    INFEASIBLE = "infeasible"
    NO_SOLUTION = "no solution at the time limit"


@dataclass(frozen=True)
class Problem:
    """Minimise the summed cost of one choice per layer; L layers, J choices each (the same number everywhere).

    A choice is whatever the caller lists: a slot count, or a slot count with an expert format.
    """

    cost: NDArray[np.float64]  # [L, J]
    use: Mapping[str, NDArray[np.int64]]  # budget -> [L, J] units each choice takes of it
    limit: Mapping[str, int]  # budget -> units there are

    def least(self, budget: str) -> int:
        """The smallest use of a budget by any plan."""
        return int(self.use[budget].min(axis=1).sum())


@dataclass(frozen=True)
class Solution:
    """The plan (if any) and what is known about it.

    `bound` is proven: no plan costs less. `gap` is (objective - bound) / objective. `relaxed` is the linear program's,
    minus infinity where that was not solved.
    """

    outcome: Outcome
    choice: tuple[int, ...]  # [L] index of the choice; empty without a plan
    objective: float
    bound: float
    gap: float
    relaxed: float
    seconds: float
    solver: str

    @property
    def found(self) -> bool:
        """Whether there is a plan."""
        return self.outcome in (Outcome.PROVEN, Outcome.FEASIBLE_LIMIT)


def efficient(problem: Problem) -> NDArray[np.bool_]:
    """Choices [L, J] that some optimal plan may hold.

    Left out are choices that no plan has room for, and those to which another of the layer is preferable: no dearer,
    no more of any budget, and (among equals) earlier.
    """
    layers, choices = problem.cost.shape
    keep = np.zeros((layers, choices), np.bool_)
    names = list(problem.use)
    spare = {name: problem.limit[name] - problem.least(name) for name in names}
    for layer in range(layers):
        uses = np.array([problem.use[name][layer] for name in names], np.int64).reshape(len(names), choices)
        room = np.array([spare[name] + int(problem.use[name][layer].min()) for name in names])
        fits = np.all(uses <= room[:, None], axis=0).tolist()
        front = np.empty((len(names), 0), np.int64)
        for j in np.lexsort((np.arange(choices), *uses[::-1], problem.cost[layer])).tolist():
            if fits[j] and not (front <= uses[:, j : j + 1]).all(axis=0).any():
                front = np.concatenate([front, uses[:, j : j + 1]], axis=1)
                keep[layer, j] = True
    return keep


def check(problem: Problem, choice: tuple[int, ...]) -> float:
    """The cost of a plan, every constraint verified; InternalError names one that does not hold."""
    layers, choices = problem.cost.shape
    if len(choice) != layers or not all(0 <= j < choices for j in choice):
        raise InternalError("the returned plan does not choose once per layer")
    rows, picked = np.arange(layers), np.asarray(choice)
    for budget, use in problem.use.items():
        used = int(use[rows, picked].sum())
        if used > problem.limit[budget]:
            raise InternalError(f"the returned plan uses {used} of budget {budget}: there are {problem.limit[budget]}")
    return float(problem.cost[rows, picked].sum())
