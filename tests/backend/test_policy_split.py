"""How many absent experts are fetched: against searches over all counts, all subsets and all thresholds."""

from __future__ import annotations

from itertools import combinations
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import COSTS, LAYERS, SHAPE, Driver, make_shape

from foreload.backend.policy import Action, Brain, Counter, SplitCosts
from foreload.backend.policy.rules import Rules, rules_of
from foreload.backend.policy.split import Load, fetch_count, fetch_level, link_backlog_ns
from foreload.backend.policy.state import ABSENT, DECODE, QUEUED
from foreload.settings import Settings

MOST = 8
COUNT = st.integers(0, MOST)
TOKENS = st.lists(st.integers(1, 4), max_size=MOST).map(lambda found: sorted(found, reverse=True))


@st.composite
def costs(draw: st.DrawFn) -> SplitCosts:
    """Any table that does not fall."""
    rise = st.lists(st.integers(0, 1000), min_size=MOST, max_size=MOST)
    tables = [np.concatenate([[0], np.cumsum(draw(rise))]).astype(np.int64) for _ in range(2)]
    return SplitCosts(draw(st.integers(1, 2000)), *tables, draw(st.integers(0, 300)), draw(st.integers(0, 500)))


LOADS = st.builds(Load, COUNT, COUNT, st.integers(0, 5000), st.sampled_from((0, 0, 700, 4000)))


def rules(**fields: Any) -> Rules:
    """Rules of a split."""
    return rules_of(Settings.parse({"miss_action": "split", **fields}), SHAPE)


def ends_ns(fetched: list[int], left: list[int], load: Load, costs: SplitCosts) -> tuple[int, int]:
    """Ends of the GPU's part, max(T_gpu(resident), R + n t_io + t_gpu(1)), and of the CPU's; lists of tokens."""
    on_gpu = int(costs.gpu_ns[load.resident])
    if len(fetched) + load.late:
        on_gpu = max(on_gpu, load.backlog_ns + len(fetched) * costs.io_ns + int(costs.gpu_ns[1]))
    return on_gpu, int(costs.cpu_ns[len(left)]) + sum(t - 1 for t in left) * costs.cpu_token_ns


def objective_ns(name: str, fetched: list[int], left: list[int], load: Load, costs: SplitCosts) -> int:
    on_gpu, on_cpu = ends_ns(fetched, left, load, costs)
    if name == "balance":
        return abs(on_gpu - on_cpu)
    end = max(on_gpu, on_cpu)
    copied = min(load.ahead_ns, max(0, end + costs.dense_ns - load.backlog_ns - len(fetched) * costs.io_ns))
    each = int(costs.cpu_ns[MOST]) // MOST  # an expert on the CPU
    return end - copied * each // (each + costs.io_ns)


def int32(values: list[int]) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.mark.unit
@pytest.mark.parametrize("objective", ["makespan", "balance"])
@settings(max_examples=200, deadline=None)
@given(costs=costs(), tokens=TOKENS, load=LOADS)
def test_the_best_of_all_counts(objective: str, costs: SplitCosts, tokens: list[int], load: Load) -> None:
    """Ties go to fetching more, which also warms the cache."""
    found = fetch_count(rules(objective=objective), int32(tokens), load, costs)
    best = min(range(len(tokens) + 1), key=lambda n: (objective_ns(objective, tokens[:n], tokens[n:], load, costs), -n))
    assert found == best


@pytest.mark.unit
@settings(max_examples=100, deadline=None)
@given(costs=costs(), tokens=TOKENS.map(lambda t: t[:5]), load=LOADS)
def test_no_subset_ends_earlier(costs: SplitCosts, tokens: list[int], load: Load) -> None:
    """All copies cost the same, so the first n of the order are the best n."""
    n = fetch_count(rules(), int32(tokens), load, costs)
    every = set(range(len(tokens)))
    subsets = [set(chosen) for size in range(len(tokens) + 1) for chosen in combinations(every, size)]
    ends = [
        objective_ns("makespan", [tokens[i] for i in chosen], [tokens[i] for i in every - chosen], load, costs)
        for chosen in subsets
    ]
    assert objective_ns("makespan", tokens[:n], tokens[n:], load, costs) == min(ends)


@pytest.mark.unit
@pytest.mark.parametrize("objective", ["makespan", "balance"])
@settings(max_examples=200, deadline=None)
@given(costs=costs(), load=LOADS, k=st.integers(1, 5), data=st.data())
def test_the_best_of_all_thresholds(objective: str, costs: SplitCosts, load: Load, k: int, data: st.DataObject) -> None:
    """tau from 1 to K + 1, which sends all to the CPU; ties go to the lower one, which fetches more."""
    experts = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, k)), max_size=MOST))
    experts.sort(key=lambda e: (-e[0], -e[1]))
    tokens, scores = int32([t for t, _ in experts]), int32([s for _, s in experts])

    def end(tau: int) -> int:
        fetched, left = ([t for t, s in experts if (s >= tau) == hot] for hot in (True, False))
        return objective_ns(objective, fetched, left, load, costs)

    chosen = rules(split_rule="tau", objective=objective, utility={"k": k})
    assert fetch_level(chosen, tokens, scores, load, costs) == min(range(1, k + 2), key=lambda tau: (end(tau), tau))
    fixed = data.draw(st.integers(1, k + 1))
    chosen = rules(split_rule="tau", utility={"k": k, "tau": fixed})
    assert fetch_level(chosen, tokens, scores, load, costs) == fixed


@pytest.mark.unit
@settings(max_examples=100, deadline=None)
@given(absent=COUNT, io=st.integers(1, 10_000), cpu=st.integers(1, 10_000))
def test_bandwidth_shares_by_rate(absent: int, io: int, cpu: int) -> None:
    """n = m B_link / (B_link + B_cpu) to the nearest whole number, rates being one expert per time."""
    table = np.arange(MOST + 1, dtype=np.int64)
    ones = np.ones(absent, np.int32)
    found = fetch_count(rules(split_rule="bandwidth"), ones, Load(0, 0, 0), SplitCosts(io, table, cpu * table))
    assert abs(found - absent * (1 / io) / (1 / io + 1 / cpu)) <= 0.5 + 1e-9
    assert 0 <= found <= absent


@pytest.mark.unit
@settings(max_examples=100, deadline=None)
@given(tokens=TOKENS, costs=costs(), load=LOADS)
def test_per_expert_weighs_each_alone(tokens: list[int], costs: SplitCosts, load: Load) -> None:
    """On the CPU if n t_cpu < t_io + t_gpu, whatever else the layer-step does."""
    found = fetch_count(rules(split_rule="per_expert"), int32(tokens), load, costs)
    assert found == sum(t * costs.cpu_ns[1] >= costs.io_ns + costs.gpu_ns[1] for t in tokens)


@pytest.mark.unit
@settings(max_examples=50, deadline=None)
@given(costs=costs(), tokens=TOKENS, load=LOADS)
def test_fetch_and_cpu_take_all(costs: SplitCosts, tokens: list[int], load: Load) -> None:
    assert fetch_count(rules(miss_action="fetch"), int32(tokens), load, costs) == len(tokens)
    assert fetch_count(rules(miss_action="cpu"), int32(tokens), load, costs) == 0


@pytest.mark.unit
def test_backlog_counts_half_of_the_copy_at_the_head() -> None:
    assert link_backlog_ns(0, 0, 100) == 0
    assert link_backlog_ns(1, 0, 100) == 50
    assert link_backlog_ns(2, 3, 100) == 450
    assert link_backlog_ns(0, 2, 100) == 200


@pytest.mark.unit
def test_the_largest_demands_are_fetched_first() -> None:
    """Absent experts are ordered by tokens, then by id; the first go over the link."""
    shape, table = make_shape(top_k=4), np.arange(5, dtype=np.int64)
    brain = Brain(shape, Settings(miss_action="split"), (0,) * LAYERS, SplitCosts(100, table, 100 * table))
    experts, tokens = np.array([1, 3, 5, 7], np.int32), np.array([1, 2, 1, 2], np.int32)
    actions = brain.begin(0, experts, tokens).tolist()
    assert actions == [Action.CPU, Action.FETCH, Action.CPU, Action.FETCH]
    assert [brain.next_copy(), brain.next_copy()] == [3, 7]


@pytest.mark.unit
def test_a_busy_link_sends_more_to_the_cpu() -> None:
    """Two copies under way make a third later than both experts on the CPU."""
    driver = Driver(Settings(miss_action="split", predictor="gate", prefetch_depth=2), (0,) * LAYERS, Random(0))
    assert driver.begin(0, [0, 1]) == [Action.FETCH, Action.CPU]
    driver.wait(0, [0, 1], [Action.FETCH, Action.CPU])
    driver.finish(0)
    driver.brain.prefetch(2, np.array([4, 5], np.int32))
    driver.issue()
    driver.issue()
    assert driver.begin(1, [0, 1]) == [Action.CPU, Action.CPU]
    assert driver.brain.counters[DECODE, :, Counter.ON_CPU].tolist() == [1, 2, 0]


@pytest.mark.unit
def test_the_last_predicted_is_the_cpus() -> None:
    """The link copies the others, the CPU reads it while it is idle, and is given it if it is demanded."""
    shape, table = make_shape(top_k=4), np.arange(5, dtype=np.int64)
    chosen = Settings(miss_action="split", predictor="gate", prefetch_depth=2, cpu_read_ahead=True)
    brain = Brain(shape, chosen, (0,) * LAYERS, SplitCosts(100, table, 100 * table))
    brain.begin(0, int32([0]), int32([1]))
    brain.prefetch(1, int32([5, 3, 1]))
    assert brain.read(1) == 1
    assert [at for at, status in enumerate(brain.state.status[1]) if status == QUEUED] == [3, 5]
    brain.prefetch(2, int32([4, 6]))  # not the next one: the link's
    assert brain.read(1) == 1
    brain.quiesce()
    actions = brain.begin(1, int32([1, 2, 3, 7]), int32([3, 1, 1, 1])).tolist()
    assert actions[0] == Action.CPU  # though it has the most tokens
    assert Action.FETCH in actions
    brain.finish(1)
    brain.prefetch(2, int32([4]))  # the only one is the link's
    assert brain.read(2) == -1


@pytest.mark.unit
def test_what_the_cpu_reads_is_not_copied_any_more() -> None:
    chosen = Settings(miss_action="cpu", predictor="gate", prefetch_depth=2, cpu_read_ahead=True)
    brain = Brain(make_shape(top_k=4), chosen, (0,) * LAYERS, COSTS)
    brain.begin(0, int32([0]), int32([1]))
    brain.prefetch(2, int32([3, 4, 5]))
    brain.finish(0)
    brain.begin(1, int32([0]), int32([1]))
    brain.prefetch(2, int32([4, 3, 5]))
    assert brain.read(2) == 5
    assert (brain.state.status[2, 3:6] == [QUEUED, QUEUED, ABSENT]).all()
    brain.check_integrity()


@pytest.mark.unit
def test_equal_tokens_go_by_utility_then_id() -> None:
    shape, table = make_shape(top_k=4), np.arange(5, dtype=np.int64)
    brain = Brain(shape, Settings(miss_action="split"), (0,) * LAYERS, SplitCosts(100, table, 100 * table))
    brain.state.score[0, [3, 5]] = 1
    actions = brain.begin(0, int32([1, 3, 5, 7]), int32([1, 1, 1, 1])).tolist()
    assert actions == [Action.CPU, Action.FETCH, Action.FETCH, Action.CPU]


@pytest.mark.unit
def test_tau_fetches_by_utility_alone() -> None:
    """A cold expert with many tokens goes to the CPU, a hot one with a single token over the link."""
    shape, table = make_shape(top_k=4), np.arange(5, dtype=np.int64)
    chosen = Settings.parse({"miss_action": "split", "split_rule": "tau", "utility": {"tau": 2}})
    brain = Brain(shape, chosen, (0,) * LAYERS, SplitCosts(100, table, 100 * table))
    brain.state.score[0, [1, 3]] = [1, 2]
    assert brain.begin(0, int32([1, 3, 5]), int32([4, 1, 9])).tolist() == [Action.CPU, Action.FETCH, Action.CPU]
    assert brain.state.tau.tolist() == [2, 0, 0]


@pytest.mark.unit
@pytest.mark.parametrize("admission", ["demand", "none"])
def test_a_long_copy_in_flight_is_not_waited_for(admission: str) -> None:
    """The CPU has the expert long before it lands; the copy is kept for the next step, or discarded."""
    chosen = Settings.parse(
        {"miss_action": "split", "predictor": "gate", "prefetch_depth": 1, "prefetch_width": 1, "admission": admission}
    )
    expected = {True: [Action.CPU], False: [Action.LATE]}
    for slow in (True, False):
        costs = SplitCosts(2000 if slow else 100, np.array([0, 10, 20]), np.array([0, 200, 400]))
        driver = Driver(chosen, (4,) * LAYERS, Random(0), costs=costs)
        driver.brain.prefetch(1, np.array([3], np.int32))
        driver.issue()
        assert driver.begin(1, [3]) == expected[slow]
        counted = driver.brain.counters[DECODE, 1]
        assert (counted[Counter.MISSES], counted[Counter.LATE]) == ((1, 0) if slow else (0, 1))
        assert (counted[Counter.PREFETCHED], counted[Counter.ON_CPU]) == (1, int(slow))
        driver.wait(1, [3], expected[slow])
        driver.finish(1)
        driver.drain()
        anew = Action.CPU if slow else Action.FETCH
        assert driver.begin(1, [3]) == [Action.HIT if admission == "demand" else anew]
        driver.brain.check_integrity()
