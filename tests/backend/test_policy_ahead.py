"""Prefetch for the next step: what is chosen, what makes room, what it may cost, and what becomes of it."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from policy_driver import EXPERTS, LAYERS, Driver, int32

from foreload.backend.policy import Action, Counter, SplitCosts
from foreload.backend.policy.state import AHEAD, DECODE, QUEUED
from foreload.settings import Settings

TABLE = np.arange(5, dtype=np.int64)
IDLE = SplitCosts(100, 10 * TABLE, 100 * TABLE, dense_ns=200, layer_ns=400)
"""A link that is idle for two copies per layer-step, with no demand copies for four."""


def make_driver(capacity: tuple[int, ...] = (2, 2, 2), costs: SplitCosts = IDLE, **fields: Any) -> Driver:
    base = {"predictor": "utility", "eviction": "utility", "miss_action": "cpu", "prefetch_width": 4}
    return Driver(Settings.parse({**base, **fields}), capacity, Random(0), costs=costs)


def queued(driver: Driver) -> list[tuple[int, int]]:
    """(layer, expert) of all copies for a next step that are queued, in the order they will be issued."""
    state = driver.brain.state
    count = int(state.scalars[1])
    keys = sorted(range(count), key=lambda at: state.rank[at])
    found = [divmod(int(state.queue[at]), EXPERTS) for at in keys]
    return [key for key in found if state.purpose[key] == AHEAD and state.status[key] == QUEUED]


def count(driver: Driver, counter: Counter) -> int:
    return int(driver.brain.counters[DECODE, :, counter].sum())


@pytest.mark.unit
def test_hot_absent_experts_are_fetched_for_the_next_step() -> None:
    """The CPU served both; s reached tau, so both are copied, and hit when they are demanded again."""
    driver = make_driver()
    assert driver.layer_step(0, [3, 5], [2, 2]) == [Action.CPU, Action.CPU]
    assert queued(driver) == [(0, 3), (0, 5)]
    driver.drain()
    driver.brain.end_step()
    assert driver.layer_step(0, [3, 5], [2, 2]) == [Action.HIT, Action.HIT]
    assert driver.kept(0) == {3, 5}
    assert (count(driver, Counter.PREFETCHED), count(driver, Counter.WASTED)) == (2, 0)


@pytest.mark.unit
def test_highest_utility_first_and_only_from_tau_on() -> None:
    driver = make_driver((4, 4, 4), utility={"tau": 2, "adapt": "off"}, miss_action="split", split_rule="tau")
    driver.brain.state.score[0] = int32([0, 1, 2, 3, 4, 0, 0, 0])
    driver.layer_step(0, [7])
    assert queued(driver) == [(0, 4), (0, 3), (0, 2)]


@pytest.mark.unit
def test_only_while_the_link_is_idle() -> None:
    """Four copies fit into a layer-step without demand copies, two into one with three; a part is carried on."""
    driver = make_driver((8, 8, 8))
    driver.brain.state.score[:2, 1:] = 3
    driver.layer_step(0, [0])
    assert len(queued(driver)) == 4
    driver = make_driver((8, 8, 8), miss_action="fetch", prefetch_width=8)
    driver.brain.state.score[1, :6] = 3
    driver.begin(1, [6, 7])
    driver.wait(1, [6, 7], [Action.FETCH] * 2)
    driver.finish(1)
    assert len(queued(driver)) == 2
    slow = make_driver((8, 8, 8), costs=IDLE._replace(io_ns=1000))
    slow.brain.state.score[0, 1:] = 3
    copies = []
    for _ in range(5):
        slow.layer_step(0, [0])
        slow.brain.end_step()
        copies.append(len(queued(slow)))
    assert copies == [0, 0, 1, 1, 2]


@pytest.mark.unit
def test_nothing_without_idle_time_or_slots() -> None:
    busy = make_driver(costs=SplitCosts(100, 10 * TABLE, 100 * TABLE))
    busy.layer_step(0, [3], [2])
    assert queued(busy) == []
    none = make_driver((0, 0, 0))
    none.layer_step(0, [3], [2])
    assert queued(none) == []


@pytest.mark.unit
def test_only_a_resident_that_ranks_below_makes_room() -> None:
    driver = make_driver((1, 1, 1))
    driver.layer_step(0, [1], [2])
    driver.drain()
    driver.brain.end_step()
    driver.layer_step(0, [1], [2])
    assert driver.kept(0) == {1}
    driver.brain.end_step()
    driver.brain.state.score[0, 1] = 3
    driver.layer_step(0, [2], [2])  # s of 2 rises to 1, below 3 - 1
    assert queued(driver) == []
    assert driver.kept(0) == {1}
    driver.brain.end_step()
    driver.brain.state.score[0, [1, 2]] = [1, 4]
    driver.layer_step(0, [6])
    assert queued(driver) == [(0, 2)]
    assert driver.kept(0) == set()


@pytest.mark.unit
def test_the_computing_layer_is_frozen() -> None:
    """In a shared pool the victim is of another layer, even if one of the computing layer ranks lower."""
    driver = make_driver((1, 1, 0), pool="shared", miss_action="fetch", utility={"adapt": "off"})
    driver.layer_step(0, [1])
    driver.layer_step(1, [2])
    driver.brain.end_step()
    driver.brain.state.score[0, [1, 5]] = [1, 4]
    driver.brain.state.score[1, 2] = 2
    driver.layer_step(0, [1])
    assert queued(driver) == [(0, 5)]
    assert (driver.kept(0), driver.kept(1)) == ({1}, set())
    own = make_driver((1, 1, 1), miss_action="fetch")
    own.layer_step(0, [1])
    own.brain.end_step()
    own.brain.state.score[0, [1, 5]] = [0, 4]
    own.layer_step(0, [1])  # 1 is being computed: nothing makes room in its layer's own pool
    assert queued(own) == []
    own.brain.end_step()
    own.reconfigure(own.brain.settings.changed(miss_action="cpu"), (1, 1, 1))
    own.brain.state.score[0, [1, 5]] = [0, 4]
    own.layer_step(0, [7])
    assert queued(own) == [(0, 5)]


@pytest.mark.unit
def test_what_is_not_demanded_is_dropped_unless_wanted_again() -> None:
    driver = make_driver((2, 2, 2), utility={"adapt": "off"})
    driver.layer_step(0, [3, 5], [2, 2])
    driver.drain()
    driver.brain.end_step()
    driver.brain.state.score[0, [3, 5]] = [4, 1]
    driver.layer_step(0, [7])  # both fall by one: 3 is still hot, 5 is not
    assert driver.kept(0) == {3}
    assert count(driver, Counter.WASTED) == 2
    driver.settle()
    driver.brain.check_integrity()


@pytest.mark.unit
def test_a_demand_takes_over_a_copy_that_is_queued_or_in_flight() -> None:
    driver = make_driver()
    driver.layer_step(0, [3, 5], [2, 2])
    driver.issue()
    driver.brain.end_step()
    assert driver.begin(0, [3, 5], [2, 2]) == [Action.LATE, Action.LATE]
    driver.wait(0, [3, 5], [Action.LATE] * 2)
    driver.finish(0)
    assert driver.kept(0) == {3, 5}


@pytest.mark.unit
def test_they_wait_behind_this_step_s_copies() -> None:
    driver = make_driver((4, 4, 4))
    driver.layer_step(0, [3], [2])
    assert queued(driver) == [(0, 3)]
    driver.brain.end_step()
    driver.layer_step(1, [4], [2])
    assert queued(driver) == [(0, 3), (1, 4)]


@pytest.mark.unit
def test_the_previous_step_s_demand() -> None:
    """What the CPU served or the cache did not keep, most tokens first, as far as there is room."""
    driver = make_driver((3, 3, 3), predictor="previous_step", eviction="lru", admission="demand")
    driver.layer_step(0, [2, 6], [1, 3])
    assert queued(driver) == [(0, 6), (0, 2)]
    driver.drain()
    driver.brain.end_step()
    assert driver.layer_step(0, [2, 7]) == [Action.HIT, Action.CPU]
    assert driver.kept(0) == {2}
    assert queued(driver) == [(0, 7)]
    assert count(driver, Counter.WASTED) == 1


@pytest.mark.unit
def test_a_request_that_begins_takes_them_back() -> None:
    driver = make_driver()
    driver.layer_step(0, [3, 5], [2, 2])
    driver.issue()
    driver.brain.start_request()
    driver.land()
    driver.brain.check_integrity()
    assert driver.brain.state.kept.tolist() == [0] * LAYERS
    assert driver.brain.state.scalars[0] == driver.brain.slots
