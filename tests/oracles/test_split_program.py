"""Split and threshold of a layer-step equal an integer program over all subsets of its absent experts (section 5)."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pulp
import pytest

from foreload.backend.policy import SplitCosts
from foreload.backend.policy.rules import rules_of
from foreload.backend.policy.split import Load, fetch_count, fetch_level
from foreload.settings import Settings
from foreload.shape import ModelShape

CASES, MOST = 200, 8


class Case:
    """One random layer-step: absent experts as (tokens, s) in their order, what else runs, and what things cost."""

    def __init__(self, seed: int) -> None:
        random = Random(seed)
        self.k = random.randint(1, 5)
        count = random.randint(1, MOST)
        experts = [(random.randint(1, 9), random.randint(0, self.k)) for _ in range(count)]
        self.experts = sorted(experts, reverse=True)
        self.load = Load(random.randint(0, MOST), random.randint(0, 2), random.randint(0, 400))
        gpu, cpu = (np.cumsum([0, *(random.randint(1, most) for _ in range(MOST))]) for most in (40, 300))
        self.costs = SplitCosts(random.randint(20, 300), gpu, cpu, random.randint(0, 60))

    @property
    def tokens(self) -> np.ndarray:
        return np.array([tokens for tokens, _ in self.experts], np.int32)

    @property
    def scores(self) -> np.ndarray:
        return np.array([score for _, score in self.experts], np.int32)

    def makespan(self, fetched: list[int]) -> int:
        """End of the layer-step if the experts at these places are fetched."""
        left = [at for at in range(len(self.experts)) if at not in fetched]
        ends = [int(self.costs.gpu_ns[self.load.resident]), int(self.costs.cpu_ns[len(left)])]
        ends[1] += sum(int(self.tokens[at]) - 1 for at in left) * self.costs.cpu_token_ns
        if len(fetched) + self.load.late:
            ends.append(self.load.backlog_ns + len(fetched) * self.costs.io_ns + int(self.costs.gpu_ns[1]))
        return max(ends)


def program(case: Case, by_threshold: bool) -> tuple[pulp.LpProblem, list[Any]]:
    """Minimise the end T over fetch[i], one binary per absent expert; with `by_threshold` they follow one tau."""
    model, costs, load, m = pulp.LpProblem("split", pulp.LpMinimize), case.costs, case.load, len(case.experts)
    end = model.add_variable("end", lowBound=int(costs.gpu_ns[load.resident]))
    fetch = [model.add_variable(f"fetch_{i}", cat=pulp.LpBinary) for i in range(m)]
    busy = model.add_variable("link_busy", lowBound=int(load.late > 0), upBound=1, cat=pulp.LpBinary)
    left = [model.add_variable(f"left_{n}", cat=pulp.LpBinary) for n in range(m + 1)]
    model += end, "makespan"
    for i in range(m):
        model += busy >= fetch[i], f"busy_{i}"
    link = costs.io_ns * pulp.lpSum(fetch) + (load.backlog_ns + int(costs.gpu_ns[1])) * busy
    model += end >= link, "link"
    model += pulp.lpSum(left) == 1, "one_count"
    model += pulp.lpSum(n * left[n] for n in range(m + 1)) == m - pulp.lpSum(fetch), "count_left"
    extra = [int(t - 1) * costs.cpu_token_ns for t in case.tokens]
    table = pulp.lpSum(int(costs.cpu_ns[n]) * left[n] for n in range(m + 1))
    model += end >= table + pulp.lpSum(extra[i] * (1 - fetch[i]) for i in range(m)), "cpu"
    if by_threshold:
        tau = [model.add_variable(f"tau_{level}", cat=pulp.LpBinary) for level in range(1, case.k + 2)]
        model += pulp.lpSum(tau) == 1, "one_threshold"
        for i, (_, score) in enumerate(case.experts):
            model += fetch[i] == pulp.lpSum(tau[:score]), f"hot_{i}"
    return model, fetch


def solved(case: Case, by_threshold: bool) -> int:
    """The program's makespan, worked out again from its choice."""
    model, fetch = program(case, by_threshold)
    model.solve(pulp.HiGHS(msg=False, threads=1))
    assert model.sol_status == pulp.LpSolutionOptimal
    return case.makespan([i for i, x in enumerate(fetch) if x.value() > 0.5])


@pytest.mark.integration
@pytest.mark.parametrize("rule", ["makespan", "tau"])
def test_equal_to_the_program(rule: str, shape: ModelShape) -> None:
    worse = 0
    for seed in range(CASES):
        case = Case(seed)
        settings = Settings.parse({"miss_action": "split", "split_rule": rule, "utility": {"k": case.k}})
        rules = rules_of(settings, shape)
        if rule == "makespan":
            chosen = list(range(fetch_count(rules, case.tokens, case.load, case.costs)))
        else:
            tau = fetch_level(rules, case.tokens, case.scores, case.load, case.costs)
            chosen = [i for i, (_, score) in enumerate(case.experts) if score >= tau]
        best = solved(case, rule == "tau")
        assert case.makespan(chosen) == best, f"case {seed}"
        worse += case.makespan(list(range(len(case.experts)))) > best
    assert worse > CASES // 4  # fetching everything is not already the answer
