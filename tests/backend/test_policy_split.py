"""How many absent experts are fetched: against a search over all counts, and against all subsets."""

from __future__ import annotations

from itertools import combinations
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import LAYERS, Driver, make_shape

from foreload.backend.policy import Action, Brain, Counter, SplitCosts
from foreload.backend.policy.split import (
    CPU,
    FETCH,
    SPLIT_BANDWIDTH,
    SPLIT_MAKESPAN,
    fetch_count,
    link_backlog_ns,
)
from foreload.backend.policy.state import DECODE
from foreload.settings import Settings

MOST = 8
COUNT = st.integers(0, MOST)


@st.composite
def costs(draw: st.DrawFn) -> SplitCosts:
    """Any table that does not fall."""
    rise = st.lists(st.integers(0, 1000), min_size=MOST, max_size=MOST)
    tables = [np.concatenate([[0], np.cumsum(draw(rise))]).astype(np.int64) for _ in range(2)]
    return SplitCosts(draw(st.integers(1, 2000)), *tables)


def end_ns(fetched: int, absent: int, resident: int, late: int, backlog: int, costs: SplitCosts) -> int:
    """max(T_gpu(resident), R + n t_io + t_gpu(1), t_cpu(m - n)); without copies there is no link term."""
    ends = [int(costs.gpu_ns[resident]), int(costs.cpu_ns[absent - fetched])]
    if fetched + late:
        ends.append(backlog + fetched * costs.io_ns + int(costs.gpu_ns[1]))
    return max(ends)


@pytest.mark.unit
@settings(max_examples=300, deadline=None)
@given(costs=costs(), absent=COUNT, resident=COUNT, late=COUNT, backlog=st.integers(0, 5000))
def test_makespan_is_the_best_of_all_counts(
    costs: SplitCosts, absent: int, resident: int, late: int, backlog: int
) -> None:
    """Ties go to fetching more, which also warms the cache."""
    found = fetch_count(SPLIT_MAKESPAN, absent, resident, late, backlog, costs)
    best = min(range(absent + 1), key=lambda n: (end_ns(n, absent, resident, late, backlog, costs), -n))
    assert found == best


@pytest.mark.unit
@settings(max_examples=100, deadline=None)
@given(costs=costs(), absent=st.integers(0, 5), resident=COUNT)
def test_no_subset_is_better(costs: SplitCosts, absent: int, resident: int) -> None:
    """All copies cost the same, so a choice of how many is a choice of which."""
    found = fetch_count(SPLIT_MAKESPAN, absent, resident, 0, 0, costs)
    subsets = [chosen for n in range(absent + 1) for chosen in combinations(range(absent), n)]
    ends = [end_ns(len(chosen), absent, resident, 0, 0, costs) for chosen in subsets]
    assert end_ns(found, absent, resident, 0, 0, costs) == min(ends)


@pytest.mark.unit
@settings(max_examples=100, deadline=None)
@given(absent=COUNT, io=st.integers(1, 10_000), cpu=st.integers(1, 10_000))
def test_bandwidth_shares_by_rate(absent: int, io: int, cpu: int) -> None:
    """n = m B_link / (B_link + B_cpu) to the nearest whole number, rates being one expert per time."""
    table = np.arange(MOST + 1, dtype=np.int64)
    found = fetch_count(SPLIT_BANDWIDTH, absent, 0, 0, 0, SplitCosts(io, table, cpu * table))
    assert abs(found - absent * (1 / io) / (1 / io + 1 / cpu)) <= 0.5 + 1e-9
    assert 0 <= found <= absent


@pytest.mark.unit
@settings(max_examples=50, deadline=None)
@given(costs=costs(), absent=COUNT)
def test_fetch_and_cpu_take_all(costs: SplitCosts, absent: int) -> None:
    assert fetch_count(FETCH, absent, 0, 0, 0, costs) == absent
    assert fetch_count(CPU, absent, 0, 0, 0, costs) == 0


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
