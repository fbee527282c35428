"""The integer program of the tuner: one choice per MoE layer under budgets, through PuLP (design: section 8)."""

from foreload.simulator.solver.milp import solve
from foreload.simulator.solver.plans import best_plans, cheapest
from foreload.simulator.solver.problem import Outcome, Problem, Solution, check, efficient
from foreload.simulator.solver.shortfall import require
from foreload.simulator.solver.sorting import by_sorting

__all__ = [
    "Outcome",
    "Problem",
    "Solution",
    "best_plans",
    "by_sorting",
    "cheapest",
    "check",
    "efficient",
    "require",
    "solve",
]
