"""Belady against brute force and all policies; floors below every simulated time."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_inputs import make_profile, make_shape, make_trace

from foreload.backend.policy import Counter
from foreload.settings import Settings, staging_slots
from foreload.simulator import CostModel, belady_loads, load_requests, simulate
from foreload.simulator.bounds import bounds, experts_per_second, fewest_loads
from foreload.simulator.replay import replay


def fewest_by_search(demands, capacity):
    """Fewest loads over all ways to keep experts after each step."""

    @cache
    def best(at, kept):
        if at == len(demands):
            return 0
        pool = sorted(kept | demands[at])
        loads = len(demands[at] - kept)
        choices = (frozenset(c) for n in range(min(capacity, len(pool)) + 1) for c in combinations(pool, n))
        return loads + min(best(at + 1, choice) for choice in choices)

    return best(0, frozenset())


@pytest.mark.integration
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 999), top_k=st.integers(1, 3))
def test_equals_exhaustive_search(seed, top_k):
    shape = make_shape(layers=1, experts=5, top_k=top_k)
    requests = load_requests(make_trace(shape, requests=1, prompt=0, tokens=6, seed=seed, depths=0), shape)
    loads = belady_loads(requests, shape)[0]
    demands = tuple(frozenset(token[0].tolist()) for token in requests[0].demand)
    for capacity in range(6):
        assert loads[capacity] == fewest_by_search(demands, capacity)


SHAPE = make_shape(layers=2, experts=9, top_k=3)
POLICIES = [
    Settings(eviction=eviction, admission=admission)
    for eviction in ("lru", "lfu", "lfru", "aged", "utility", "random")
    for admission in ("demand", "none")
] + [Settings(miss_action="cpu", admission="background", admit_per_step=3)]


@pytest.mark.integration
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 999), prompt=st.sampled_from([0, 4]))
def test_no_policy_loads_less(seed, prompt):
    trace = make_trace(SHAPE, requests=2, prompt=prompt, tokens=10, seed=seed, depths=0)
    requests = load_requests(trace, SHAPE)
    loads = belady_loads(requests, SHAPE)
    assert (np.diff(loads, axis=1) <= 0).all()
    assert (np.diff(loads, 2, axis=1) >= 0).all()
    for chosen in POLICIES:
        for size in (0, 2, 5, 9 if chosen.admission != "none" else 8):  # whole layers are loaded before the start
            found = replay(requests, SHAPE, chosen, (size, size)).counters[0]
            assert (found[:, Counter.MISSES] + found[:, Counter.LATE] >= loads[:, size]).all()


@pytest.mark.unit
def test_slots_go_where_they_save_most():
    loads = np.array([[10, 4, 2, 1], [9, 8, 7, 6]])
    assert [fewest_loads(loads, n) for n in range(7)] == [19, 13, 11, 10, 9, 8, 7]


@pytest.mark.unit
def test_link_and_cpu_together_are_contended():
    # Link 10,000 per second at .8, two threads 33,333 at 2/3.
    costs = CostModel(make_profile(SHAPE), SHAPE)
    assert experts_per_second(costs) == pytest.approx(max(1e9 / 30_000, 8_000 + 2 / 3 * 1e9 / 30_000), rel=1e-4)


@pytest.mark.integration
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "chosen",
    [
        Settings(),
        Settings(miss_action="cpu", cpu_threads=2),
        Settings(miss_action="split", predictor="gate", prefetch_depth=2, cpu_threads=2),
        Settings(miss_action="split", admission="background"),
    ],
    ids=Settings.describe,
)
def test_no_simulated_run_is_below_the_floor(chosen, device):
    trace = make_trace(SHAPE, requests=2, prompt=5, tokens=15, seed=2)
    costs = CostModel(make_profile(SHAPE, device, gpu_us=5.0), SHAPE)
    for size in (0, 3, 9):
        floor = bounds(load_requests(trace, SHAPE), costs, 2 * size + staging_slots(chosen, SHAPE))
        found = simulate(trace, costs, SHAPE, chosen, (size, size))
        assert found.tpot_ns >= floor.floor_ns
        assert floor.floor_ns == max(floor.link_ns, floor.compute_ns) <= max(floor.link_ns, floor.resident_ns)
        assert set(floor.as_dict()) >= {"floor_ms", "bytes_per_token"}
