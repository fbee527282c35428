"""More than one program: the N best plans of one, and the best plan over several that exclude each other."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from foreload.simulator.solver.milp import solve
from foreload.simulator.solver.problem import Outcome, Problem, Solution

Key = TypeVar("Key", bound=Hashable)


def best_plans(
    problem: Problem, count: int, distance: int = 1, time_limit_s: float = 20.0, gap: float = 0.0
) -> list[Solution]:
    """Up to `count` plans, cheapest first (to within `gap`), each two of which differ in at least `distance` layers.

    Made of efficient choices alone: a plan that wastes a budget where another of its layers would be no dearer is none.
    """
    found: list[Solution] = []
    while len(found) < count:
        plan = solve(problem, time_limit_s, gap, without=[s.choice for s in found], distance=distance, relax=False)
        if not plan.found:
            break
        found.append(plan)
    return found


def cheapest(problems: Mapping[Key, Problem], time_limit_s: float = 20.0, gap: float = 0.0) -> tuple[Key, Solution]:
    """The problem with the cheapest plan, and its solution, whose bound holds for all of them.

    One program with a choice of option for all layers together: as the options exclude each other, it falls apart into
    one program each. Without any plan, the first problem with its outcome.
    """
    if not problems:
        raise ValueError("no problem to choose from")
    solved = {key: solve(problem, time_limit_s, gap) for key, problem in problems.items()}
    best = min(solved, key=lambda key: solved[key].objective)
    found = solved[best]
    if not found.found:
        return next(iter(solved.items()))
    bound = min(s.bound for s in solved.values())
    proven = all(s.outcome in (Outcome.PROVEN, Outcome.INFEASIBLE) for s in solved.values())
    return best, Solution(
        outcome=Outcome.PROVEN if proven else Outcome.FEASIBLE_LIMIT,
        choice=found.choice,
        objective=found.objective,
        bound=bound,
        gap=(found.objective - bound) / abs(found.objective) if found.objective else 0.0,
        relaxed=min(s.relaxed for s in solved.values()),
        seconds=sum(s.seconds for s in solved.values()),
        solver=found.solver,
    )
