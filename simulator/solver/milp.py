"""The program in PuLP: HiGHS solves it, CBC where HiGHS is missing or asked for. Outcomes are read with care.

At a time limit PuLP's `status` says optimal; only `sol_status` tells. An infeasible model leaves numbers in its
variables. So a plan is taken only where `sol_status` says there is one, and is checked against every constraint.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
import pulp
from pulp.apis.coin_api import pulp_cbc_path

from foreload.simulator.solver.problem import Outcome, Problem, Solution, check, efficient

SolverName = Literal["HiGHS", "CBC"]
Column = tuple[int, pulp.LpVariable]


def solve(
    problem: Problem,
    time_limit_s: float = 20.0,
    gap: float = 0.0,
    solver: SolverName | None = None,
    without: Sequence[tuple[int, ...]] = (),
    distance: int = 1,
    relax: bool = True,
) -> Solution:
    """The cheapest plan, to within `gap` (a share of its cost) of the optimum; `relax`: also the linear program's.

    Plans that differ from one of `without` in fewer than `distance` layers are excluded (no-good cuts). Never raises
    for an infeasible problem: see `Solution.outcome` and `require`.
    """
    name: SolverName = solver or ("HiGHS" if _have_highs() else "CBC")
    begun = time.perf_counter()
    model, columns = build(problem)
    for at, plan in enumerate(without):
        held = [x for row, choice in zip(columns, plan, strict=True) for j, x in row if j == choice]
        model += pulp.lpSum(held) <= len(plan) - distance, f"no_good_{at}"
    model.solve(solver_named(name, time_limit_s, gap))
    seconds = time.perf_counter() - begun
    status, found = model.status, model.sol_status
    if status == pulp.LpStatusInfeasible or found == pulp.LpSolutionInfeasible:
        return Solution(Outcome.INFEASIBLE, (), np.inf, np.inf, np.inf, np.inf, seconds, name)
    if found not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Solution(Outcome.NO_SOLUTION, (), np.inf, -np.inf, np.inf, -np.inf, seconds, name)
    outcome = Outcome.PROVEN if found == pulp.LpSolutionOptimal else Outcome.FEASIBLE_LIMIT
    choice = tuple(max(row, key=lambda column: column[1].value() or 0.0)[0] for row in columns)
    objective = check(problem, choice)
    bound = objective if outcome is Outcome.PROVEN and not gap else _bound(model, name)
    share = (objective - bound) / abs(objective) if objective else 0.0
    linear = relaxed(model, name) if relax else -np.inf
    return Solution(outcome, choice, objective, bound, share, linear, seconds, name)


def build(problem: Problem) -> tuple[pulp.LpProblem, list[list[Column]]]:
    """The program over the efficient choices, constraints named; columns [L] are (choice, variable)."""
    model = pulp.LpProblem("foreload", pulp.LpMinimize)
    columns = choose_once(model, problem)
    model.scale = float(np.abs(problem.cost).max()) or 1.0
    terms = [float(problem.cost[layer, j]) / model.scale * x for layer, row in enumerate(columns) for j, x in row]
    model.setObjective(pulp.lpSum(terms))
    for budget, limit in problem.limit.items():
        model += used(problem, columns, budget) <= limit, f"budget_{budget}"
    return model, columns


def choose_once(model: pulp.LpProblem, problem: Problem) -> list[list[Column]]:
    """One binary variable per efficient choice, and exactly one choice per layer."""
    keep, columns = efficient(problem), []
    for layer, kept in enumerate(keep):
        chosen = np.flatnonzero(kept).tolist()
        row = [(j, model.add_variable(f"x_{layer}_{j}", 0, 1, pulp.LpBinary)) for j in chosen]
        model += pulp.lpSum(x for _, x in row) == 1, f"one_choice_{layer}"
        columns.append(row)
    return columns


def used(problem: Problem, columns: list[list[Column]], budget: str) -> pulp.LpAffineExpression:
    """Units of `budget` that the chosen plan takes."""
    use = problem.use[budget]
    return pulp.lpSum(int(use[layer, j]) * x for layer, row in enumerate(columns) for j, x in row)


def solver_named(name: SolverName, time_limit_s: float, gap: float = 0.0, whole: bool = True) -> pulp.LpSolver:
    """The solver with one thread and a fixed seed; `whole` False drops integrality."""
    common = {"msg": False, "mip": whole, "timeLimit": time_limit_s, "gapRel": gap, "threads": 1}
    if name == "HiGHS":
        return pulp.HiGHS(**common, gapAbs=0.0, random_seed=1)
    installed = pulp.COIN_CMD(**common)
    return installed if installed.available() else pulp.COIN_CMD(path=pulp_cbc_path, **common)


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


def relaxed(model: pulp.LpProblem, name: SolverName) -> float:
    """The optimum of the linear program: a lower bound on every plan, without branching."""
    model.solve(solver_named(name, 20.0, whole=False))
    if model.status != pulp.LpStatusOptimal:
        return -np.inf
    return float(pulp.value(model.objective)) * float(model.scale)


def _bound(model: pulp.LpProblem, name: str) -> float:
    """The proven lower bound where the solver stopped early; minus infinity where it does not tell."""
    if name != "HiGHS":
        return -np.inf
    return float(model.solverModel.getInfo().mip_dual_bound) * float(model.scale)
