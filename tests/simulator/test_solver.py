"""The integer program against brute force, sorting and another solver; refusals name what is short."""

import subprocess
import sys
from itertools import product

import numpy as np
import pytest

from foreload.errors import BudgetError, InternalError
from foreload.simulator.solver import (
    Outcome,
    Problem,
    Solution,
    best_plans,
    by_sorting,
    cheapest,
    check,
    efficient,
    milp,
    require,
    solve,
)


def random_problem(rng, budgets):
    layers, choices = int(rng.integers(1, 5)), int(rng.integers(2, 6))
    use = {name: rng.integers(0, 9, (layers, choices)) for name in budgets}
    limit = {name: int(rng.integers(0, 6 * layers)) for name in budgets}
    return Problem(rng.uniform(0, 100, (layers, choices)).round(2), use, limit)


def plans_by_force(problem):
    """(cost, plan) of every feasible plan, cheapest first."""
    layers, choices = problem.cost.shape
    rows, found = np.arange(layers), []
    for plan in product(range(choices), repeat=layers):
        if all(problem.use[b][rows, plan].sum() <= limit for b, limit in problem.limit.items()):
            found.append((problem.cost[rows, plan].sum(), plan))
    return sorted(found)


@pytest.mark.integration
def test_equals_brute_force_on_500_random_instances():
    rng = np.random.default_rng(0)
    infeasible = 0
    for trial in range(500):
        problem = random_problem(rng, (("vram",), ("vram", "link"), ("vram", "pinned", "link"))[trial % 3])
        plans, found = plans_by_force(problem), solve(problem)
        if not plans:
            infeasible += 1
            assert found.outcome is Outcome.INFEASIBLE
        else:
            assert found.outcome is Outcome.PROVEN
            assert found.objective == pytest.approx(plans[0][0], abs=1e-6)
            assert found.gap == pytest.approx(0, abs=1e-9)
            assert found.relaxed <= found.objective + 1e-6
    assert 0 < infeasible < 300


@pytest.mark.integration
def test_highs_and_cbc_agree():
    rng = np.random.default_rng(3)
    for _ in range(25):
        problem = random_problem(rng, ("vram", "link"))
        highs, cbc = solve(problem, solver="HiGHS"), solve(problem, solver="CBC")
        assert (highs.solver, cbc.solver, highs.outcome) == ("HiGHS", "CBC", cbc.outcome)
        assert highs.objective == pytest.approx(cbc.objective)
        assert highs.relaxed == pytest.approx(cbc.relaxed)


@pytest.mark.unit
def test_cbc_serves_where_highs_is_missing(monkeypatch):
    monkeypatch.setattr(milp, "_have_highs", lambda: False)
    assert solve(random_problem(np.random.default_rng(3), ("vram",))).solver == "CBC"


@pytest.mark.integration
def test_equals_sorting_where_costs_are_convex():
    rng = np.random.default_rng(1)
    for _ in range(10):
        savings = np.sort(rng.uniform(0, 10, (6, 8)), axis=1)[:, ::-1]
        cost = np.concatenate([np.zeros((6, 1)), -np.cumsum(savings, axis=1)], axis=1)
        slots = np.tile(np.arange(9), (6, 1))
        found = solve(Problem(cost, {"vram": slots}, {"vram": 17}))
        assert found.objective == pytest.approx(-np.sort(savings.ravel())[::-1][:17].sum())
        assert found.relaxed == pytest.approx(found.objective)


@pytest.mark.unit
def test_only_efficient_choices_are_asked_about():
    cost = np.array([[5.0, 3.0, 3.0, 1.0, 9.0]])
    problem = Problem(cost, {"vram": np.array([[0, 1, 1, 7, 0]])}, {"vram": 6})
    assert efficient(problem).tolist() == [[True, True, False, False, False]]


@pytest.mark.integration
def test_the_n_best_plans_are_the_n_best_of_efficient_choices():
    rng = np.random.default_rng(5)
    for _ in range(30):
        problem = random_problem(rng, ("vram", "link"))
        keep = efficient(problem)
        plans = [cost for cost, plan in plans_by_force(problem) if all(keep[i, j] for i, j in enumerate(plan))]
        found = best_plans(problem, 4)
        assert [s.objective for s in found] == pytest.approx(plans[:4])
        assert len({s.choice for s in found}) == len(found)


@pytest.mark.unit
def test_plans_keep_their_distance():
    problem = Problem(np.array([[1.0, 2.0, 4.0]] * 3), {"vram": np.array([[2, 1, 0]] * 3)}, {"vram": 6})
    near, far = best_plans(problem, 2), best_plans(problem, 2, distance=3)
    assert near[0].choice == (0, 0, 0)
    assert sum(a != b for a, b in zip(near[0].choice, near[1].choice, strict=True)) == 1
    assert far[1].choice == (1, 1, 1)


@pytest.mark.unit
def test_the_cheapest_of_programs_that_exclude_each_other():
    use = {"vram": np.array([[0, 1], [0, 1]])}
    problems = {
        "dear": Problem(np.array([[9.0, 1.0], [9.0, 1.0]]), use, {"vram": 1}),
        "none": Problem(np.array([[0.0, 0.0], [0.0, 0.0]]), {"vram": np.array([[2, 2], [0, 0]])}, {"vram": 1}),
        "cheap": Problem(np.array([[5.0, 1.0], [4.0, 2.0]]), use, {"vram": 1}),
    }
    name, found = cheapest(problems)
    assert (name, found.choice, found.objective, found.outcome) == ("cheap", (1, 0), 5.0, Outcome.PROVEN)
    assert found.bound == 5.0
    assert cheapest({"none": problems["none"]})[1].outcome is Outcome.INFEASIBLE


@pytest.mark.unit
def test_infeasible_names_the_budget_and_the_missing_bytes():
    problem = Problem(np.ones((2, 2)), {"vram": np.array([[3, 4], [5, 6]])}, {"vram": 6})
    with pytest.raises(BudgetError, match="vram budget is 200 B") as refused:
        require(problem, solve(problem), {"vram": 100})
    assert refused.value.shortfall_bytes == 200
    assert refused.value.exit_code == 3


@pytest.mark.unit
def test_infeasible_names_the_budget_whose_increase_is_smallest():
    use = {"vram": np.array([[4, 0]]), "ram": np.array([[0, 3]])}
    problem = Problem(np.ones((1, 2)), use, {"vram": 1, "ram": 1})
    with pytest.raises(BudgetError, match="ram budget is 20 B"):
        require(problem, solve(problem), {"vram": 10, "ram": 10})
    with pytest.raises(BudgetError, match="vram budget is 30 B"):
        require(problem, solve(problem), {"vram": 10, "ram": 100})


@pytest.mark.unit
def test_infeasible_names_all_budgets_where_no_single_one_suffices():
    use = {"a": np.array([[2, 2]]), "b": np.array([[3, 5]])}
    both = Problem(np.ones((1, 2)), use, {"a": 1, "b": 1})
    with pytest.raises(BudgetError, match=r"all budgets at once: short are a 1 B \(1 bytes\), b 4 B") as refused:
        require(both, solve(both), {"a": 1, "b": 2})
    assert refused.value.shortfall_bytes == 5


@pytest.mark.unit
def test_a_time_limit_without_a_plan_is_no_solution():
    nothing = Solution(Outcome.NO_SOLUTION, (), np.inf, -np.inf, np.inf, -np.inf, 1.0, "HiGHS")
    with pytest.raises(InternalError, match=r"no plan in 1\.0 s"):
        require(Problem(np.ones((1, 1)), {}, {}), nothing, {})


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
        "import numpy as np; from foreload.simulator.solver import Problem, solve;"
        "solve(Problem(np.ones((1, 2)), {'vram': np.array([[0, 1]])}, {'vram': 1}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.unit
def test_sorting_is_the_linear_program_of_one_budget():
    rng = np.random.default_rng(2)
    exact = 0
    for _ in range(60):
        problem = random_problem(rng, ("vram",))
        sorted_, solved = by_sorting(problem), solve(problem)
        if solved.outcome is Outcome.INFEASIBLE:
            assert sorted_.outcome is Outcome.INFEASIBLE
            continue
        assert sorted_.bound == pytest.approx(solved.relaxed, abs=1e-6)
        assert sorted_.bound - 1e-6 <= solved.objective <= sorted_.objective + 1e-6
        assert check(problem, sorted_.choice) == pytest.approx(sorted_.objective)
        exact += sorted_.objective <= solved.objective + 1e-6
    assert exact > 20
