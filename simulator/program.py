"""The integer program: one choice per MoE layer under budgets (a multiple-choice knapsack), through PuLP.

A choice is whatever the caller lists: a slot count, or a slot count with a miss action. HiGHS solves it; without HiGHS,
CBC does. The returned plan is checked against every constraint in plain numpy.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache

import numpy as np
import pulp
from numpy.typing import NDArray
from pulp.apis.coin_api import pulp_cbc_path

from foreload.errors import BudgetError, InternalError
from foreload.units import format_bytes


class Outcome(Enum):
    """What the solver has shown."""

    PROVEN = "proven"
    FEASIBLE_LIMIT = "feasible at the time limit"
    INFEASIBLE = "infeasible"
    NO_SOLUTION = "no solution at the time limit"


@dataclass(frozen=True)
class Problem:
    """Minimise the summed cost of one choice per layer; L layers, J choices each (the same number everywhere)."""

    cost: NDArray[np.float64]  # [L, J]
    use: Mapping[str, NDArray[np.int64]]  # budget -> [L, J] units each choice takes of it
    limit: Mapping[str, int]  # budget -> units there are

    def least(self, budget: str) -> int:
        """The smallest use of a budget by any plan."""
        return int(self.use[budget].min(axis=1).sum())


@dataclass(frozen=True)
class Solution:
    """The plan (if any) and what is known about it. `gap` is (objective - bound) / objective."""

    outcome: Outcome
    choice: tuple[int, ...]  # [L] index of the choice; empty without a plan
    objective: float
    bound: float
    gap: float
    seconds: float
    solver: str


def solve(problem: Problem, time_limit_s: float = 20.0) -> Solution:
    """The cheapest plan. Never raises for an infeasible problem: see `outcome` and `require`."""
    model, columns = _model(problem)
    solver, name = _solver(time_limit_s)
    begun = time.perf_counter()
    model.solve(solver)
    seconds = time.perf_counter() - begun
    status, found = model.status, model.sol_status
    if status == pulp.LpStatusInfeasible or found == pulp.LpSolutionInfeasible:
        return Solution(Outcome.INFEASIBLE, (), np.inf, np.inf, np.inf, seconds, name)
    if found not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Solution(Outcome.NO_SOLUTION, (), np.inf, -np.inf, np.inf, seconds, name)
    outcome = Outcome.PROVEN if found == pulp.LpSolutionOptimal else Outcome.FEASIBLE_LIMIT
    choice = tuple(int(np.argmax([x.value() or 0.0 for x in row])) for row in columns)
    objective = check(problem, choice)
    bound = objective if outcome is Outcome.PROVEN else _bound(model, name)
    gap = (objective - bound) / abs(objective) if objective else 0.0
    return Solution(outcome, choice, objective, bound, gap, seconds, name)


def require(problem: Problem, solution: Solution, unit_bytes: Mapping[str, int]) -> Solution:
    """`solution`, or BudgetError naming the budget that is short and by how many bytes (`unit_bytes` per unit)."""
    if solution.outcome is Outcome.INFEASIBLE:
        for budget, limit in problem.limit.items():
            missing = (problem.least(budget) - limit) * unit_bytes[budget]
            if missing > 0:
                raise BudgetError(
                    f"the {budget} budget is {format_bytes(missing)} ({missing} bytes) short of any plan",
                    budget,
                    missing,
                )
        raise BudgetError(f"no plan keeps all budgets at once: {', '.join(problem.limit)}", "all", 0)
    if solution.outcome is Outcome.NO_SOLUTION:
        raise InternalError(f"{solution.solver} found no plan in {solution.seconds:.1f} s")
    return solution


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


def _model(problem: Problem) -> tuple[pulp.LpProblem, list[list[pulp.LpVariable]]]:
    layers, choices = problem.cost.shape
    model = pulp.LpProblem("foreload", pulp.LpMinimize)
    x = [[model.add_variable(f"x_{layer}_{j}", 0, 1, pulp.LpBinary) for j in range(choices)] for layer in range(layers)]
    pairs = [(layer, j) for layer in range(layers) for j in range(choices)]
    scale = float(np.abs(problem.cost).max()) or 1.0
    model += pulp.lpSum(float(problem.cost[a, j]) / scale * x[a][j] for a, j in pairs), "cost"
    for layer in range(layers):
        model += pulp.lpSum(x[layer]) == 1, f"one_choice_{layer}"
    for budget, use in problem.use.items():
        model += pulp.lpSum(int(use[a, j]) * x[a][j] for a, j in pairs) <= problem.limit[budget], f"budget_{budget}"
    model.scale = scale
    return model, x


def _solver(time_limit_s: float) -> tuple[pulp.LpSolver, str]:
    if _have_highs():
        return pulp.HiGHS(msg=False, threads=1, timeLimit=time_limit_s, gapRel=0.0, gapAbs=0.0, random_seed=1), "HiGHS"
    installed = pulp.COIN_CMD(msg=False, threads=1, timeLimit=time_limit_s, gapRel=0.0)
    if installed.available():
        return installed, "CBC"
    return pulp.COIN_CMD(path=pulp_cbc_path, msg=False, threads=1, timeLimit=time_limit_s, gapRel=0.0), "CBC"


@cache
def _have_highs() -> bool:
    """Whether HiGHS loads. Its first use prints a banner on standard output, where only results belong."""
    try:
        import highspy
    except ImportError:
        return False
    saved, sink = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        highspy.Highs()  # type: ignore[no-untyped-call]
        ctypes.CDLL(None).fflush(None)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(sink)
    return True


def _bound(model: pulp.LpProblem, name: str) -> float:
    """The proven lower bound after a time limit; minus infinity where the solver does not tell."""
    if name != "HiGHS":
        return -np.inf
    return float(model.solverModel.getInfo().mip_dual_bound) * float(model.scale)
