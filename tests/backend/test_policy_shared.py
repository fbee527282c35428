"""One pool for all layers: against plain Python, the victim among equals, prompts, and changes between pools."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import EXPERTS, LAYERS, SHAPE, Driver, int32, make_shape

from foreload.backend.policy import Action, Brain, Counter
from foreload.backend.policy.order import faded, random_rank
from foreload.backend.policy.state import DECODE, PREFILL
from foreload.errors import BudgetError
from foreload.settings import Settings, check_slots

RANDOM = st.randoms(use_true_random=False)
RUNS = settings(max_examples=20, deadline=None)
EVICTIONS = ("lru", "lfu", "lfru", "aged", "static", "utility", "random")
HALF_LIFE = 5


class PlainPool:
    """After a layer-step the C largest of all residents and the demand stay; `at` is the computing layer."""

    def __init__(self, capacity: int, eviction: str, warm: Any, weight: Any) -> None:
        self.capacity, self.eviction, self.warm = capacity, eviction, warm
        every = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
        self.residents: set[tuple[int, int]] = set()
        self.last: dict[tuple[int, int], int] = {}  # own layer-steps
        self.tokens, self.uses, self.score, self.before = (dict.fromkeys(every, 0) for _ in range(4))
        self.weight = {who: weight[who[0]][who[1]] for who in every}
        self.steps = [0] * LAYERS

    def key(self, at: int, who: tuple[int, int]) -> tuple[Any, ...]:
        """Larger stays."""
        layer, expert = who
        age = self.steps[layer] - 1 - self.last[who] if who in self.last else 10**9
        orders: dict[str, tuple[Any, ...]] = {
            "lru": (-age, self.tokens[who]),
            "lfu": (self.uses[who], -age),
            "lfru": (Fraction(self.uses[who], age + 1), -age),
            "aged": (self.faded(who), -age),
            "static": (self.warm[layer][expert],),
            "utility": (self.score[who], -age),
            "random": (random_rank(self.steps[layer] - 1, layer, expert),),
        }
        return (*orders[self.eviction], -((layer - at) % LAYERS), -expert)

    def faded(self, who: tuple[int, int]) -> int:
        """Its uses that fade, over the layer's own steps."""
        return faded(self.weight[who], self.steps[who[0]] - 1 - self.last.get(who, -1), HALF_LIFE)

    def step(self, layer: int, demand: dict[int, int]) -> None:
        self.steps[layer] += 1
        for expert, tokens in demand.items():
            who = (layer, expert)
            self.weight[who] = self.faded(who) + (1 << 20)
            self.last[who], self.tokens[who] = self.steps[layer] - 1, tokens
            self.uses[who] += 1
        for expert in range(EXPERTS):
            who, tokens = (layer, expert), demand.get(expert, 0)
            rise = (tokens > self.before[who]) - (tokens < self.before[who])
            self.score[who], self.before[who] = min(4, max(0, self.score[who] + rise)), tokens
        everyone = self.residents | {(layer, expert) for expert in demand}
        ordered = sorted(everyone, key=lambda who: self.key(layer, who), reverse=True)
        self.residents = set(ordered[: self.capacity])


def held(driver: Driver) -> set[tuple[int, int]]:
    return {(layer, expert) for layer in range(LAYERS) for expert in driver.kept(layer)}


@pytest.mark.unit
@pytest.mark.parametrize("eviction", EVICTIONS)
@RUNS
@given(random=RANDOM, capacity=st.tuples(*[st.integers(0, EXPERTS)] * LAYERS))
def test_residents_equal_plain_python(eviction: str, random: Random, capacity: tuple[int, ...]) -> None:
    fields = {"pool": "shared", "eviction": eviction, "half_life": HALF_LIFE, "utility": {"adapt": "off"}}
    chosen = Settings.parse(fields)
    driver = Driver(chosen, capacity, random)
    plain = PlainPool(sum(capacity), eviction, driver.brain.state.warm.tolist(), driver.brain.state.weight.tolist())
    for _ in range(8):
        for layer in range(LAYERS):
            demand = {e: random.randint(1, 3) for e in sorted(random.sample(range(EXPERTS), random.randint(1, 2)))}
            driver.layer_step(layer, list(demand), list(demand.values()))
            plain.step(layer, demand)
            assert held(driver) == plain.residents
        driver.brain.end_step()


@pytest.mark.unit
@pytest.mark.parametrize("eviction", ["lru", "lfu", "lfru", "aged", "utility"])
@pytest.mark.parametrize("computing", range(4))
def test_the_victim_among_equals_is_needed_latest(eviction: str, computing: int) -> None:
    """All alike but for their layers: the one that computed just before goes, not the one that computes next."""
    shape = make_shape(layers=4)
    brain = Brain(shape, Settings.parse({"pool": "shared", "eviction": eviction}), (1,) * 4)

    def layer_step(layer: int, expert: int) -> None:
        brain.begin(layer, int32([expert]), int32([1]))
        while (key := brain.next_copy()) >= 0:
            brain.complete(key)
        brain.finish(layer)

    for layer in range(4):
        layer_step(layer, 0)
    brain.end_step()
    for layer in range(computing):
        layer_step(layer, 0)
    brain.begin(computing, int32([0]), int32([1]))
    brain.finish(computing)
    state = brain.state
    state.uses[:, :2], state.score[:, :2], state.last_tokens[:, :2], state.weight[:, :2] = 2, 1, 1, 1 << 20
    state.last_step[:, :2] = state.begun[:, None]
    state.worst[:] = -2
    brain.begin(computing, int32([1]), int32([1]))
    state.uses[computing, 1] = state.score[computing, 1] = 9
    state.weight[computing, 1] = 9 << 20
    while (key := brain.next_copy()) >= 0:
        brain.complete(key)
    brain.finish(computing)
    gone = [layer for layer in range(4) if not brain.status(layer, 0)]
    assert gone == [(computing - 1) % 4]


@pytest.mark.unit
def test_layers_take_from_each_other() -> None:
    driver = Driver(Settings(pool="shared"), (1, 1, 1), Random(0))
    driver.layer_step(0, [1, 2])
    driver.layer_step(1, [4])
    assert held(driver) == {(0, 1), (0, 2), (1, 4)}
    assert driver.layer_step(0, [1, 2]) == [Action.HIT, Action.HIT]


@pytest.mark.unit
@RUNS
@given(random=RANDOM, capacity=st.tuples(*[st.integers(0, EXPERTS)] * LAYERS))
def test_a_prompt_leaves_its_most_used(random: Random, capacity: tuple[int, ...]) -> None:
    """From an empty pool: layer by layer the most used so far, then those needed soonest, then lower ids, in whatever
    order the copies were served; and the prompt copies no expert twice.
    """
    driver = Driver(Settings(pool="shared"), capacity, random)
    driver.brain.start_request()
    counts = [[random.choice([0, 0, 1, 2, 5]) for _ in range(EXPERTS)] for _ in range(LAYERS)]
    plain: list[tuple[int, int]] = []
    for at in range(LAYERS):
        driver.prompt_layer(at, counts[at], True)
        plain += [(at, expert) for expert in range(EXPERTS) if counts[at][expert]]
        plain.sort(key=lambda who: (-counts[who[0]][who[1]], (who[0] - at) % LAYERS, who[1]))
        del plain[sum(capacity) :]
        assert held(driver) == set(plain)
    demanded = sum(c > 0 for row in counts for c in row)
    assert driver.brain.counters[PREFILL, :, Counter.FETCHED].sum() == demanded


@pytest.mark.unit
def test_a_prompt_leaves_layers_alone_that_it_has_not_reached() -> None:
    driver = Driver(Settings(pool="shared"), (1, 1, 1), Random(0))
    driver.layer_step(2, [3, 4])
    driver.layer_step(0, [0])
    driver.brain.end_step()
    driver.brain.start_request()
    driver.prompt_layer(0, [0, 7, 9, 0, 0, 0, 0, 0], True)
    assert held(driver) == {(0, 2), (2, 3), (2, 4)}
    driver.prompt_layer(1, [0] * 8, True)
    driver.prompt_layer(2, [0, 0, 0, 0, 1, 0, 0, 2], True)
    assert held(driver) == {(0, 2), (2, 4), (2, 7)}


@pytest.mark.unit
@RUNS
@given(random=RANDOM)
def test_between_pools_what_fits_stays(random: Random) -> None:
    """The driver checks that contents follow the moves and how many stay."""
    driver = Driver(Settings(pool="shared"), (4, 4, 4), random)
    for _ in range(6):
        driver.step()
    driver.settle()
    before = held(driver)
    driver.reconfigure(Settings(), (2, 3, 4))
    assert held(driver) <= before
    driver.reconfigure(Settings(pool="shared", eviction="lfu"), (0, 1, 2))
    assert len(held(driver)) == min(3, len(before))
    for _ in range(3):
        driver.step()
    assert driver.brain.counters[DECODE, :, Counter.HITS].sum() > 0


@pytest.mark.unit
def test_a_shared_pool_uses_every_slot_there_is() -> None:
    assert check_slots(Settings(), SHAPE, 2 + 7, 1) == (2, 2, 2)
    assert check_slots(Settings(pool="shared"), SHAPE, 2 + 7, 1) == (3, 2, 2)
    with pytest.raises(BudgetError, match=r"need 9 and 2 for staging: 1 \(1 bytes\) short|short"):
        check_slots(Settings(pool="shared", slots_per_layer=(8, 1, 0)), SHAPE, 10, 1)


@pytest.mark.unit
def test_the_order_is_total_over_layers() -> None:
    from foreload.backend.policy.order import prefers
    from foreload.backend.policy.rules import rules_of

    driver = Driver(Settings(pool="shared"), (4, 4, 4), Random(3))
    for _ in range(5):
        driver.step()
    state = driver.brain.state
    everyone = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
    for eviction in EVICTIONS:
        rules = rules_of(Settings.parse({"pool": "shared", "eviction": eviction}), SHAPE)
        wins = [sum(prefers(state, rules, *a, *b) for b in everyone if a != b) for a in everyone]
        assert sorted(wins) == list(range(len(everyone))), eviction
    assert np.unique(state.status).size > 1
