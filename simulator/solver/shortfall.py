"""Why there is no plan: the budget that is short, and by how many bytes at least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pulp

from foreload.errors import BudgetError, InternalError
from foreload.simulator.solver.milp import SolverName, choose_once, solver_named, used
from foreload.simulator.solver.problem import Outcome, Problem, Solution
from foreload.units import format_bytes


def require(problem: Problem, solution: Solution, unit_bytes: Mapping[str, int]) -> Solution:
    """`solution`, or BudgetError with the smallest increase that lets a plan exist (`unit_bytes` per unit of a budget).

    One budget is raised if that suffices, the one that needs the fewest bytes; else all of them together.
    """
    if solution.outcome is Outcome.NO_SOLUTION:
        raise InternalError(f"{solution.solver} found no plan in {solution.seconds:.1f} s")
    if solution.outcome is not Outcome.INFEASIBLE:
        return solution
    name: SolverName = "CBC" if solution.solver == "CBC" else "HiGHS"
    alone = {budget: _missing(problem, (budget,), unit_bytes, name) for budget in problem.limit}
    enough = {budget: found[budget] for budget, found in alone.items() if found}
    if enough:
        budget = min(enough, key=lambda b: enough[b])
        text = f"{format_bytes(enough[budget])} ({enough[budget]} bytes)"
        raise BudgetError(f"the {budget} budget is {text} short of any plan", budget, enough[budget])
    together = _missing(problem, tuple(problem.limit), unit_bytes, name)
    if not together:
        raise InternalError("no plan exists under any budget")
    parts = [f"{budget} {format_bytes(size)} ({size} bytes)" for budget, size in together.items() if size]
    raise BudgetError(f"no plan keeps all budgets at once: short are {', '.join(parts)}", "all", sum(together.values()))


def _missing(
    problem: Problem, budgets: tuple[str, ...], unit_bytes: Mapping[str, int], name: SolverName
) -> dict[str, int]:
    """Bytes by which each of `budgets` must grow, the fewest in all, the others kept; empty if that does not help."""
    most = {budget: int(use.max(axis=1).sum()) for budget, use in problem.use.items()}
    limit = {budget: most[budget] if budget in budgets else kept for budget, kept in problem.limit.items()}
    model = pulp.LpProblem("shortfall", pulp.LpMinimize)
    columns = choose_once(model, replace(problem, cost=np.zeros_like(problem.cost), limit=limit))
    slack = {budget: model.add_variable(f"slack_{budget}", 0, None, pulp.LpInteger) for budget in budgets}
    model.setObjective(pulp.lpSum(unit_bytes[budget] * slack[budget] for budget in budgets))
    for budget, kept in problem.limit.items():
        model += used(problem, columns, budget) - slack.get(budget, 0) <= kept, f"budget_{budget}"
    model.solve(solver_named(name, 20.0))
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return {}
    return {budget: round(slack[budget].value() or 0.0) * unit_bytes[budget] for budget in budgets}
