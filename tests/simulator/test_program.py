"""The integer program against brute force and sorting; refusals name what is short."""

import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from foreload.errors import BudgetError, InternalError
from foreload.simulator import program
from foreload.simulator.program import Outcome, Problem, Solution, check, require, solve


def random_problem(rng, budgets):
    layers, choices = int(rng.integers(1, 5)), int(rng.integers(2, 6))
    use = {name: rng.integers(0, 9, (layers, choices)) for name in budgets}
    limit = {name: int(rng.integers(0, 6 * layers)) for name in budgets}
    return Problem(rng.uniform(0, 100, (layers, choices)).round(2), use, limit)


def by_force(problem):
    layers, choices = problem.cost.shape
    rows, best = np.arange(layers), np.inf
    for plan in product(range(choices), repeat=layers):
        if all(problem.use[b][rows, plan].sum() <= limit for b, limit in problem.limit.items()):
            best = min(best, problem.cost[rows, plan].sum())
    return best


@pytest.mark.integration
def test_equals_brute_force_on_200_random_instances():
    rng = np.random.default_rng(0)
    infeasible = 0
    for trial in range(200):
        problem = random_problem(rng, ("vram",) if trial % 2 else ("vram", "link"))
        best, found = by_force(problem), solve(problem)
        if np.isinf(best):
            infeasible += 1
            assert found.outcome is Outcome.INFEASIBLE
        else:
            assert found.outcome is Outcome.PROVEN
            assert found.objective == pytest.approx(best, abs=1e-6)
            assert found.gap == pytest.approx(0, abs=1e-9)
    assert 0 < infeasible < 100


@pytest.mark.integration
def test_equals_sorting_where_costs_are_convex():
    rng = np.random.default_rng(1)
    for _ in range(10):
        savings = np.sort(rng.uniform(0, 10, (6, 8)), axis=1)[:, ::-1]
        cost = np.concatenate([np.zeros((6, 1)), -np.cumsum(savings, axis=1)], axis=1)
        slots = np.tile(np.arange(9), (6, 1))
        found = solve(Problem(cost, {"vram": slots}, {"vram": 17}))
        assert found.objective == pytest.approx(-np.sort(savings.ravel())[::-1][:17].sum())


@pytest.mark.unit
def test_cbc_agrees_where_highs_is_missing(monkeypatch):
    problem = random_problem(np.random.default_rng(3), ("vram",))
    proven = solve(problem)
    monkeypatch.setattr(program, "_have_highs", lambda: False)
    found = solve(problem)
    assert (found.solver, found.outcome) == ("CBC", proven.outcome)
    assert found.objective == pytest.approx(proven.objective)


@pytest.mark.unit
def test_infeasible_names_the_budget_and_the_missing_bytes():
    problem = Problem(np.ones((2, 2)), {"vram": np.array([[3, 4], [5, 6]])}, {"vram": 6})
    with pytest.raises(BudgetError, match="vram budget is 200 B") as refused:
        require(problem, solve(problem), {"vram": 100})
    assert refused.value.shortfall_bytes == 200
    assert refused.value.exit_code == 3
    use = {"a": np.array([[0, 1]]), "b": np.array([[1, 0]])}
    both = Problem(np.ones((1, 2)), use, {"a": 0, "b": 0})
    with pytest.raises(BudgetError, match="all budgets at once: a, b"):
        require(both, solve(both), {"a": 1, "b": 1})


@pytest.mark.unit
def test_a_time_limit_without_a_plan_is_no_solution():
    nothing = Solution(Outcome.NO_SOLUTION, (), np.inf, -np.inf, np.inf, 1.0, "HiGHS")
    problem = Problem(np.ones((1, 1)), {}, {})
    with pytest.raises(InternalError, match=r"no plan in 1\.0 s"):
        require(problem, nothing, {})


@pytest.mark.unit
def test_plans_are_checked():
    problem = Problem(np.ones((2, 2)), {"vram": np.array([[1, 2], [1, 2]])}, {"vram": 3})
    assert check(problem, (0, 1)) == 2
    with pytest.raises(InternalError, match="uses 4 of budget vram: there are 3"):
        check(problem, (1, 1))
    with pytest.raises(InternalError, match="once per layer"):
        check(problem, (0,))


@pytest.mark.integration
def test_solving_prints_nothing():
    code = (
        "import numpy as np; from foreload.simulator.program import Problem, solve;"
        "solve(Problem(np.ones((1, 2)), {'vram': np.array([[0, 1]])}, {'vram': 1}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
