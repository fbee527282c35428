"""The copy queue: demand before prefetches before uploads, two at a time, prefetches overtaken, cancelled, wasted."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from policy_driver import EXPERTS, LAYERS, Driver, int32

from foreload.backend.policy import Action, Counter
from foreload.backend.policy.state import ABSENT, DECODE, DEMAND, DISCARD, IN_FLIGHT, LANDED, QUEUED
from foreload.settings import Settings

COLD = (0,) * LAYERS


def make_driver(capacity: tuple[int, ...] = COLD, **fields: Any) -> Driver:
    """A driver that prefetches four wide, two deep, unless told otherwise."""
    base = {"predictor": "gate", "prefetch_depth": 2, "prefetch_width": 4}
    return Driver(Settings.parse({**base, **fields}), capacity, Random(0))


def key(layer: int, expert: int) -> int:
    return layer * EXPERTS + expert


def order(driver: Driver) -> list[tuple[int, int]]:
    """(layer, expert) of all queued copies as the link takes them."""
    found = []
    while (issued := driver.issue()) >= 0:
        found.append(divmod(issued, EXPERTS))
        driver.land()
    return found


def count(driver: Driver, counter: Counter, layer: int = 0) -> int:
    return int(driver.brain.counters[DECODE, layer, counter])


@pytest.mark.unit
def test_two_copies_at_a_time() -> None:
    driver = make_driver()
    driver.brain.prefetch(1, int32([0, 1, 2]))
    assert [driver.issue(), driver.issue(), driver.issue()] == [key(1, 0), key(1, 1), -1]
    driver.land()
    assert driver.issue() == key(1, 2)
    assert driver.issue() == -1


@pytest.mark.unit
def test_prefetches_go_best_first_and_nearest_layer_first() -> None:
    driver = make_driver()
    driver.brain.prefetch(2, int32([5, 3]))
    driver.brain.prefetch(1, int32([7, 0, 4]))
    assert order(driver) == [(1, 7), (1, 0), (1, 4), (2, 5), (2, 3)]


@pytest.mark.unit
def test_demand_overtakes_prefetches_and_uploads() -> None:
    """With these costs a lone miss goes to the CPU and is uploaded, of two misses one is fetched."""
    driver = make_driver((2, 2, 2), miss_action="split", admission="background")
    assert driver.layer_step(0, [1]) == [Action.CPU]
    assert driver.layer_step(1, [2]) == [Action.CPU]
    driver.brain.prefetch(1, int32([3]))
    assert driver.begin(2, [6, 7]) == [Action.FETCH, Action.CPU]
    assert order(driver) == [(2, 6), (1, 3), (0, 1)]


@pytest.mark.unit
def test_a_copy_in_flight_is_not_overtaken() -> None:
    driver = make_driver()
    driver.brain.prefetch(1, int32([0, 1, 2]))
    assert [driver.issue(), driver.issue()] == [key(1, 0), key(1, 1)]
    driver.begin(0, [4, 5])
    assert driver.issue() == -1
    driver.land()
    assert driver.issue() == key(0, 4)


@pytest.mark.unit
def test_a_demanded_queued_prefetch_moves_to_the_front() -> None:
    driver = make_driver()
    driver.brain.prefetch(1, int32([0, 1, 2, 3]))
    assert driver.begin(1, [3, 6]) == [Action.LATE, Action.FETCH]
    assert order(driver) == [(1, 3), (1, 6), (1, 0), (1, 1), (1, 2)]
    driver.finish(1)
    assert count(driver, Counter.LATE, 1) == 1
    assert count(driver, Counter.FETCHED, 1) == 2
    assert count(driver, Counter.PREFETCHED, 1) == count(driver, Counter.WASTED, 1) == 3


@pytest.mark.unit
def test_a_landed_prefetch_is_a_hit_and_stays_if_there_is_room() -> None:
    driver = make_driver((0, 1, 0))
    driver.brain.prefetch(1, int32([3, 4]))
    driver.drain()
    assert driver.layer_step(1, [3]) == [Action.HIT]
    assert driver.kept(1) == {3}
    assert count(driver, Counter.PREFETCHED, 1) == 2
    assert count(driver, Counter.WASTED, 1) == 1


@pytest.mark.unit
def test_unused_prefetches_are_cancelled_discarded_or_dropped() -> None:
    """Queued: cancelled. In flight: discarded on arrival. Landed: dropped. The last two are waste."""
    driver = make_driver()
    driver.brain.prefetch(1, int32([0, 1, 2]))
    driver.issue()
    driver.land()
    driver.issue()
    assert [driver.status(1, e) for e in range(3)] == [LANDED, IN_FLIGHT, QUEUED]
    driver.begin(1, [])
    driver.finish(1)
    assert [driver.status(1, e) for e in range(3)] == [ABSENT, IN_FLIGHT, ABSENT]
    assert driver.brain.state.purpose[1, 1] == DISCARD
    assert count(driver, Counter.CANCELLED, 1) == 1
    assert count(driver, Counter.WASTED, 1) == 2
    driver.land()
    assert driver.status(1, 1) == ABSENT
    driver.brain.check_integrity()


@pytest.mark.unit
def test_a_better_prediction_cancels_what_it_no_longer_names() -> None:
    driver = make_driver()
    driver.brain.prefetch(2, int32([0, 1, 2]))
    driver.brain.prefetch(2, int32([2, 5, -1]))
    assert order(driver) == [(2, 2), (2, 5)]
    assert count(driver, Counter.CANCELLED, 2) == 2


def discarded_in_flight() -> Driver:
    """A driver whose expert (1, 0) is in flight and wanted by nobody."""
    driver = make_driver()
    driver.brain.prefetch(1, int32([0]))
    driver.issue()
    driver.begin(1, [])
    driver.finish(1)
    assert count(driver, Counter.WASTED, 1) == 1
    return driver


@pytest.mark.unit
def test_a_discarded_copy_predicted_again_is_no_waste() -> None:
    driver = discarded_in_flight()
    driver.brain.prefetch(1, int32([0]))
    assert count(driver, Counter.WASTED, 1) == 0
    driver.land()
    assert driver.layer_step(1, [0]) == [Action.HIT]
    assert (count(driver, Counter.PREFETCHED, 1), count(driver, Counter.WASTED, 1)) == (1, 0)


@pytest.mark.unit
def test_a_discarded_copy_demanded_again_is_late_and_no_waste() -> None:
    driver = discarded_in_flight()
    assert driver.layer_step(1, [0]) == [Action.LATE]
    assert (count(driver, Counter.PREFETCHED, 1), count(driver, Counter.WASTED, 1)) == (1, 0)
    assert count(driver, Counter.FETCHED, 1) == 0


@pytest.mark.unit
def test_a_queued_upload_that_is_demanded_is_a_miss() -> None:
    """Uploads are last in the queue; a demand does not wait for one that has not begun."""
    driver = make_driver((2, 2, 2), miss_action="cpu", admission="background")
    driver.layer_step(0, [1, 2])
    driver.layer_step(1, [])
    assert [driver.status(0, e) for e in (1, 2)] == [QUEUED, QUEUED]
    driver.issue()
    assert driver.begin(0, [1, 2]) == [Action.LATE, Action.CPU]
    assert driver.brain.state.purpose[0, 1] == DEMAND
    assert count(driver, Counter.CANCELLED) == 1


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "action"),
    [
        ({"miss_action": "fetch"}, Action.LATE),
        ({"miss_action": "cpu"}, Action.CPU),
        ({"miss_action": "split", "split_rule": "bandwidth"}, Action.FETCH),
        ({"miss_action": "split", "split_rule": "tau"}, Action.LATE),
    ],
)
def test_a_queued_prefetch_is_decided_anew_where_the_cpu_may_have_it(fields: Any, action: Action) -> None:
    """What is in flight is waited for; what is not would keep the CPU idle for as long as the link has other work."""
    driver = make_driver(prefetch_depth=1, **fields)
    driver.brain.prefetch(1, int32([0, 1, 2]))
    driver.issue()
    driver.issue()
    assert [driver.status(1, e) for e in (0, 1, 2)] == [IN_FLIGHT, IN_FLIGHT, QUEUED]
    assert driver.begin(1, [0, 2]) == [Action.LATE, action]
    assert count(driver, Counter.CANCELLED, 1) == int(action != Action.LATE)


@pytest.mark.unit
@pytest.mark.parametrize("capacity", [0, EXPERTS])
def test_prefetches_leave_room_for_the_next_demand(capacity: int) -> None:
    """Staging is one demand and one width per depth; prefetches take neither that demand's part nor the cache's."""
    driver = make_driver((capacity,) * LAYERS, prefetch_depth=1)
    driver.brain.prefetch(1, int32([0, 1, 2, 3]))
    driver.brain.prefetch(2, int32([0, 1, 2, 3]))
    driver.drain()
    assert sum(driver.status(layer, e) == LANDED for layer in (1, 2) for e in range(EXPERTS)) == 4
    assert driver.begin(0, [0, 1]) == [Action.FETCH, Action.FETCH]


@pytest.mark.unit
def test_quiesce_leaves_only_the_cache() -> None:
    driver = make_driver((1, 1, 1))
    driver.layer_step(0, [4])
    driver.brain.prefetch(1, int32([0, 1, 2]))
    driver.issue()
    driver.land()
    driver.issue()
    driver.settle()
    assert list(driver.residents()) == [(0, 4)]
    assert driver.issue() == -1
    driver.brain.drop_cache()
    driver.brain.check_integrity()
    assert driver.residents() == {}
    assert (driver.brain.state.last_step == -1).all()
