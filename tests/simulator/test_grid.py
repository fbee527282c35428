"""The grid of a validation holds what profile, recording and memory allow, each setting once."""

from __future__ import annotations

import pytest
from sim_inputs import make_profile, make_shape, make_trace, make_windows

from foreload.settings import slot_counts, staging_slots
from foreload.simulator.costs import CostModel
from foreload.simulator.grid import grid

pytestmark = pytest.mark.unit
SHAPE = make_shape(experts=16)
COSTS = CostModel(make_profile(SHAPE), SHAPE)


def test_everything_that_is_recorded() -> None:
    found = grid(make_windows(SHAPE, 3), COSTS, 1000)
    assert len(found) == len(set(found)) == 38
    assert {s.prefetch_depth for s in found} == {0, 1, 2}
    assert {s.miss_action for s in found} == {"fetch", "cpu", "split"}
    assert {s.draft.gamma for s in found} == {0, 3}
    assert {s.admission for s in found} == {"demand", "background"}
    assert {s.eviction for s in found} == {"lru", "lfu"}
    assert {s.cpu_threads for s in found if s.miss_action != "fetch"} == {2}


def test_what_is_not_recorded_is_left_out() -> None:
    found = grid(make_trace(SHAPE, depths=0), COSTS, 1000)
    assert {(s.prefetch_depth, s.draft.kind) for s in found} == {(0, "none")}


def test_what_does_not_fit_is_left_out() -> None:
    found = grid(make_trace(SHAPE), COSTS, 30)
    assert found
    assert all(sum(slot_counts(s, SHAPE)) + staging_slots(s, SHAPE) <= 30 for s in found)
    assert max(s.cache_ratio or 0 for s in found) == 0.25
