"""Belady beside the simulated engine: its misses are the bound's, and no order that can be run has fewer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_inputs import make_profile, make_shape, make_trace

from foreload.backend.policy import Counter
from foreload.settings import Settings
from foreload.simulator import belady_loads, simulate
from foreload.simulator.workload import load_requests

SHAPE = make_shape(layers=2, experts=9, top_k=3)


@pytest.mark.integration
@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), prompt=st.sampled_from([0, 4]), size=st.integers(0, 9))
def test_misses_are_the_bound(seed, prompt, size):
    trace = make_trace(SHAPE, requests=2, prompt=prompt, tokens=8, seed=seed, depths=0)
    loads = belady_loads(load_requests(trace, SHAPE), SHAPE)
    found = simulate(trace, make_profile(SHAPE), SHAPE, Settings(), (size, size), oracle=True)
    assert found.counters[0, :, Counter.MISSES].tolist() == loads[:, size].tolist()


@pytest.mark.integration
def test_no_order_misses_less_in_a_shared_pool_either():
    trace = make_trace(SHAPE, requests=2, prompt=0, tokens=20, seed=3, depths=0)
    profile = make_profile(SHAPE)

    def misses(oracle=False, **fields):
        chosen = Settings(pool="shared", **fields)
        return simulate(trace, profile, SHAPE, chosen, (4, 4), oracle=oracle).count(Counter.MISSES)

    best = misses(oracle=True)
    assert best < min(misses(eviction=name) for name in ("lru", "lfu", "lfru", "aged", "utility", "random"))
