"""Which experts stay: eviction orders and whole-set accounting against plain Python, admission, prompts, settings."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import EXPERTS, LAYERS, SHAPE, Driver, int32

from foreload.backend.policy import Action, Counter, order
from foreload.backend.policy.order import prefers, random_rank, worst_of_layer
from foreload.backend.policy.rules import rules_of
from foreload.backend.policy.state import DECODE, HISTORY, KEPT, LANDED, N_QUEUED, QUEUED, STEP, UPLOAD, WORST_UNKNOWN
from foreload.backend.policy.warm import steady_weight
from foreload.settings import MAX_HALF_LIFE, Settings

RANDOM = st.randoms(use_true_random=False)
RUNS = settings(max_examples=60, deadline=None)
Key = Callable[[int], tuple[Any, ...]]
EVICTIONS = ("lru", "lfu", "lfru", "aged", "static", "utility", "random")
HALF_LIFE = 5


class PlainCache:
    """One layer's cache as section 3 words it: after a layer-step the C largest of residents and demand stay."""

    def __init__(self, capacity: int, eviction: str, layer: int, warm: Any, weight: Any) -> None:
        self.capacity, self.eviction, self.layer = capacity, eviction, layer
        self.residents: set[int] = set()
        self.last, self.tokens, self.uses, self.score = (
            dict.fromkeys(range(EXPERTS), start) for start in (-1, 0, 0, 0)
        )
        self.before = dict.fromkeys(range(EXPERTS), 0)
        self.weight = dict(enumerate(weight))
        self.warm = warm
        self.hits = 0

    def key(self, now: int) -> Key:
        """Larger stays."""
        orders: dict[str, Key] = {
            "lru": lambda e: (self.last[e], self.tokens[e], -e),
            "lfu": lambda e: (self.uses[e], self.last[e], -e),
            "lfru": lambda e: (Fraction(self.uses[e], now - self.last[e] + 1), self.last[e], -e),
            "aged": lambda e: (order.faded(self.weight[e], now - self.last[e], HALF_LIFE), self.last[e], -e),
            "static": lambda e: (self.warm[e], -e),
            "utility": lambda e: (self.score[e], self.last[e], -e),
            "random": lambda e: (random_rank(now, self.layer, e), -e),
        }
        return orders[self.eviction]

    def step(self, now: int, demand: dict[int, int]) -> None:
        self.hits += len(self.residents & demand.keys())
        for expert, tokens in demand.items():
            self.weight[expert] = order.faded(self.weight[expert], now - self.last[expert], HALF_LIFE) + order.ONE_USE
            self.last[expert], self.tokens[expert] = now, tokens
            self.uses[expert] += 1
        for expert in range(EXPERTS):  # signal delta, boundaries of 1/2 that do not move
            tokens = demand.get(expert, 0)
            rise = (tokens > self.before[expert]) - (tokens < self.before[expert])
            self.score[expert] = min(4, max(0, self.score[expert] + rise))
            self.before[expert] = tokens
        ordered = sorted(self.residents | demand.keys(), key=self.key(now), reverse=True)
        self.residents = set(ordered[: self.capacity])


def random_demand(random: Random, most: int = 2) -> dict[int, int]:
    """Experts -> tokens, ascending by expert."""
    return {e: random.randint(1, 3) for e in sorted(random.sample(range(EXPERTS), random.randint(1, most)))}


@pytest.mark.unit
@pytest.mark.parametrize("eviction", EVICTIONS)
@RUNS
@given(random=RANDOM, capacity=st.integers(0, EXPERTS))
def test_hits_and_residents_equal_plain_python(eviction: str, random: Random, capacity: int) -> None:
    chosen = Settings.parse({"eviction": eviction, "half_life": HALF_LIFE, "utility": {"adapt": "off"}})
    driver = Driver(chosen, (capacity,) * LAYERS, random)
    state = driver.brain.state
    plain = [
        PlainCache(capacity, eviction, at, state.warm[at].tolist(), state.weight[at].tolist()) for at in range(LAYERS)
    ]
    for now in range(20):
        for layer in range(LAYERS):
            demand = random_demand(random)
            driver.layer_step(layer, list(demand), list(demand.values()))
            plain[layer].step(now, demand)
            assert driver.kept(layer) == plain[layer].residents
        driver.brain.end_step()
    assert driver.brain.counters[DECODE, :, Counter.HITS].tolist() == [cache.hits for cache in plain]


@pytest.mark.unit
@pytest.mark.parametrize("eviction", EVICTIONS)
@RUNS
@given(random=RANDOM)
def test_orders_are_total_and_equal_a_sort_key(eviction: str, random: Random) -> None:
    driver = Driver(Settings(), (0,) * LAYERS, random)
    state = driver.brain.state
    plain = PlainCache(0, eviction, 0, state.warm[0].tolist(), [0] * EXPERTS)
    now = random.randint(0, 5)
    state.scalars[STEP] = state.begun[0] = now
    for e in range(EXPERTS):
        plain.last[e] = state.last_step[0, e] = random.randint(-1, now)
        plain.tokens[e] = state.last_tokens[0, e] = random.randint(0, 2)
        plain.uses[e] = state.uses[0, e] = random.randint(0, 3) if plain.last[e] >= 0 else 0
        plain.score[e] = state.score[0, e] = random.randint(0, 2)
        plain.weight[e] = state.weight[0, e] = random.randint(0, 3) << 20
    key, rules = plain.key(now), rules_of(Settings.parse({"eviction": eviction, "half_life": HALF_LIFE}), SHAPE)
    for a in range(EXPERTS):
        for b in range(EXPERTS):
            assert prefers(state, rules, 0, a, 0, b) == (key(a) > key(b))
    held = random.sample(range(EXPERTS), random.randint(0, EXPERTS))
    state.status[0, held] = KEPT
    state.worst[0] = WORST_UNKNOWN
    assert worst_of_layer(state, rules, 0) == (min(held, key=key) if held else -1)


@pytest.mark.unit
def test_uses_count_within_one_request() -> None:
    driver = Driver(Settings(eviction="lfu"), (1, 1, 1), Random(0))
    for demand in ([3], [3], [3], [5]):
        driver.layer_step(0, demand)
        driver.brain.end_step()
    assert driver.kept(0) == {3}
    driver.brain.start_request()
    driver.layer_step(0, [5])
    assert driver.kept(0) == {5}


# Admission


@pytest.mark.unit
@RUNS
@given(random=RANDOM)
def test_admission_none_never_changes_residency(random: Random) -> None:
    driver = Driver(Settings(), (2, 3, 0), random)
    for _ in range(3):
        driver.step()
    choices: dict[str, Any] = {"miss_action": random.choice(["fetch", "cpu", "split"]), "admission": "none"}
    prefetch = {"predictor": "gate", "prefetch_depth": random.choice([1, 2])}
    driver.reconfigure(Settings.parse({**choices, **prefetch}), (2, 3, 0))
    fixed = [driver.kept(layer) for layer in range(LAYERS)]
    for _ in range(4):
        driver.step()
        assert [driver.kept(layer) for layer in range(LAYERS)] == fixed
    driver.prompt()
    assert [driver.kept(layer) for layer in range(LAYERS)] == fixed


@pytest.mark.unit
def test_cpu_experts_never_enter_without_background() -> None:
    driver = Driver(Settings(miss_action="cpu"), (2, 2, 2), Random(0))
    assert driver.layer_step(0, [1, 2]) == [Action.CPU, Action.CPU]
    driver.drain()
    assert driver.kept(0) == set()


def uploads(driver: Driver, layer: int, status: int) -> set[int]:
    """Experts of `layer` in `status` because of a background upload."""
    state = driver.brain.state
    return {e for e in range(EXPERTS) if state.status[layer, e] == status and state.purpose[layer, e] == UPLOAD}


@pytest.mark.unit
@RUNS
@given(random=RANDOM, limit=st.integers(1, 3))
def test_background_uploads_are_few_and_enter_later(random: Random, limit: int) -> None:
    """At most `admit_per_step` per layer-step; they join the residents before their layer is demanded again."""
    chosen = Settings(miss_action="cpu", admission="background", admit_per_step=limit)
    driver = Driver(chosen, (2,) * LAYERS, random)
    for _ in range(6):
        for layer in range(LAYERS):
            landed, kept = uploads(driver, layer, LANDED), driver.kept(layer)
            queued = driver.brain.state.scalars[N_QUEUED]
            experts = sorted(random.sample(range(EXPERTS), 2))
            actions = driver.begin(layer, experts)
            assert driver.kept(layer) <= kept | landed
            assert not uploads(driver, layer, LANDED)
            assert Action.FETCH not in actions
            driver.wait(layer, experts, actions)
            driver.finish(layer)
            assert driver.brain.state.scalars[N_QUEUED] <= queued + limit
            driver.link()
        driver.brain.end_step()


@pytest.mark.unit
def test_an_uploaded_expert_is_a_hit_next_time() -> None:
    driver = Driver(Settings(miss_action="cpu", admission="background", admit_per_step=1), (2, 2, 2), Random(0))
    assert driver.layer_step(0, [1, 2]) == [Action.CPU, Action.CPU]
    assert driver.brain.state.scalars[N_QUEUED] == 0, "not while the CPU reads it"
    driver.layer_step(1, [3])
    assert uploads(driver, 0, QUEUED) == {1}
    driver.drain()
    assert driver.kept(0) == set()
    assert driver.layer_step(0, [1, 2]) == [Action.HIT, Action.CPU]
    assert driver.kept(0) == {1}
    assert driver.brain.counters[DECODE, 0, Counter.UPLOADED] == 1


@pytest.mark.unit
def test_uploads_of_every_layer_find_staging_slots() -> None:
    """An upload that has landed is a resident from the next layer-step on: its staging slot is free."""
    driver = Driver(Settings(miss_action="cpu", admission="background", admit_per_step=1), (2,) * LAYERS, Random(0))
    for layer in range(LAYERS):
        driver.layer_step(layer, [1, 2])
        driver.drain()
    driver.brain.end_step()
    assert [driver.kept(layer) for layer in range(LAYERS)] == [{1}] * (LAYERS - 2) + [set()] * 2
    for layer in range(LAYERS):
        assert driver.layer_step(layer, [1]) == [Action.HIT]
        driver.drain()


@pytest.mark.unit
def test_uploads_wait_where_the_link_fetches() -> None:
    """A layer-step that fetches queues none, those of the layer before are given up, and none goes beside a copy."""
    chosen = Settings(miss_action="split", admission="background", admit_per_step=2)
    driver = Driver(chosen, (8,) * LAYERS, Random(0))
    assert driver.layer_step(0, [1]) == [Action.CPU]
    assert sorted(driver.layer_step(1, [1, 2])) == sorted([Action.CPU, Action.FETCH])
    assert driver.brain.state.scalars[N_QUEUED] == 0
    assert driver.layer_step(2, [1]) == [Action.CPU]
    assert len(uploads(driver, 1, QUEUED)) == driver.brain.state.scalars[N_QUEUED] == 1
    alone = Driver(Settings(miss_action="cpu", admission="background", admit_per_step=2), (8,) * LAYERS, Random(0))
    alone.layer_step(0, [1, 2])
    alone.layer_step(1, [3])
    assert (alone.brain.next_copy(), alone.brain.can_issue()) == (1, False)
    alone.brain.complete(1)
    assert (alone.brain.can_issue(), alone.brain.next_copy()) == (True, 2)
    assert alone.begin(2, [4]) == [Action.CPU]
    assert alone.kept(0) == {1}
    assert uploads(alone, 1, QUEUED) == {3}
    alone.finish(2)
    assert alone.begin(0, [5]) == [Action.CPU]
    assert not uploads(alone, 2, QUEUED), "as many as may be are under way"


@pytest.mark.unit
def test_an_upload_joins_whatever_is_demanded_next() -> None:
    driver = Driver(Settings(miss_action="cpu", admission="background", admit_per_step=2), (2, 2, 2), Random(0))
    driver.layer_step(0, [1, 2])
    driver.layer_step(1, [])
    driver.drain()
    assert driver.begin(0, [5]) == [Action.CPU]
    assert driver.kept(0) == {1, 2}


@pytest.mark.unit
def test_an_upload_must_rank_above_a_resident() -> None:
    driver = Driver(Settings(eviction="lfu"), (1, 1, 1), Random(0))
    for _ in range(3):
        driver.layer_step(0, [7])
        driver.brain.end_step()
    driver.reconfigure(Settings(eviction="lfu", miss_action="cpu", admission="background"), (1, 1, 1))
    for _ in range(2):
        driver.layer_step(0, [1])
        driver.layer_step(1, [])
        assert driver.issue() == -1
    assert driver.kept(0) == {7}
    driver.layer_step(0, [1])
    driver.layer_step(0, [1])
    driver.layer_step(1, [])
    assert driver.issue() == 1


# Prompts


@pytest.mark.unit
@RUNS
@given(random=RANDOM, capacity=st.integers(0, EXPERTS))
def test_last_chunk_decides_what_a_prompt_leaves(random: Random, capacity: int) -> None:
    """The most used of residents and demanded, then lower ids; recency and uses stay as they were."""
    driver = Driver(Settings(), (capacity,) * LAYERS, random)
    for _ in range(3):
        driver.step()
    driver.settle()
    state = driver.brain.state
    history = [state.last_step.copy(), state.last_tokens.copy(), state.uses.copy()]
    first, last = ([random.choice([0, 0, 1, 2, 3]) for _ in range(EXPERTS)] for _ in range(2))
    before = driver.kept(0)
    driver.prompt_layer(0, first, False)
    assert driver.kept(0) == before
    candidates = before | {e for e in range(EXPERTS) if last[e]}
    driver.prompt_layer(0, last, True)
    assert driver.kept(0) == set(sorted(candidates, key=lambda e: (-last[e], e))[:capacity])
    for was, array in zip(history, (state.last_step, state.last_tokens, state.uses), strict=True):
        assert np.array_equal(was, array)


@pytest.mark.unit
def test_prompt_larger_than_staging_runs_in_waves() -> None:
    driver = Driver(Settings(), (1, 1, 1), Random(0))
    assert driver.brain.slots == 3 + 2
    driver.prompt_layer(0, [1] * EXPERTS, True)
    assert driver.kept(0) == {0}
    assert driver.brain.counters[1, 0, Counter.FETCHED] == EXPERTS
    target = driver.brain.prefill_targets(0, int32([1] * EXPERTS), False)
    assert not target.any()


# Settings


@pytest.mark.unit
@RUNS
@given(random=RANDOM)
def test_reconfigure_keeps_what_fits(random: Random) -> None:
    """The driver checks that contents follow the moves and how many stay; here: which."""
    driver = Driver(Settings(), tuple(random.randint(0, EXPERTS) for _ in range(LAYERS)), random)
    for _ in range(6):
        driver.step()
    driver.settle()
    state = driver.brain.state
    last, tokens = state.last_step, state.last_tokens
    ranks = [sorted(driver.kept(at), key=lambda e: (-last[at, e], -tokens[at, e], e)) for at in range(LAYERS)]
    capacity = tuple(random.randint(0, EXPERTS) for _ in range(LAYERS))
    driver.reconfigure(Settings(), capacity)
    assert [driver.kept(at) for at in range(LAYERS)] == [
        set(rank[:size]) for rank, size in zip(ranks, capacity, strict=True)
    ]


@pytest.mark.unit
def test_shrinking_moves_experts_out_of_lost_slots() -> None:
    driver = Driver(Settings(), (4, 4, 4), Random(0))
    for layer in range(LAYERS):
        for experts in ([0, 1], [2, 3]):
            driver.layer_step(layer, experts)
    slots, held = driver.brain.slots, driver.residents()
    assert len(held) == 12
    driver.reconfigure(Settings(), (2, 2, 2))
    assert driver.brain.slots == slots - 6
    assert set(driver.residents().values()) <= set(range(driver.brain.slots))
    driver.reconfigure(Settings(), (4, 4, 4))
    assert len(driver.residents()) == 6


@pytest.mark.unit
def test_history_survives_a_reconfiguration() -> None:
    driver = Driver(Settings(), (2, 2, 2), Random(0))
    for _ in range(4):
        driver.step()
    state = driver.brain.state
    driver.reconfigure(Settings(eviction="lfu"), (1, 1, 1))
    again = driver.brain.state
    for name in HISTORY:
        assert np.array_equal(getattr(again, name), getattr(state, name))
    assert again.scalars[STEP] == state.scalars[STEP] == 4


@pytest.mark.unit
@given(
    weight=st.integers(0, 6000 * order.ONE_USE), steps=st.integers(0, 10**6),
    half_life=st.integers(1, MAX_HALF_LIFE),
)  # fmt: skip
def test_uses_fade_by_half_in_a_half_life(weight: int, steps: int, half_life: int) -> None:
    found = order.faded(weight, steps, half_life)
    exact = weight * 2 ** -(steps / half_life)
    assert abs(found - exact) <= 2e-4 * exact + 1.5  # the series, and two roundings down
    assert order.faded(weight, steps + 1, half_life) <= found
    assert order.faded(weight, steps + half_life, half_life) == found // 2


@pytest.mark.unit
@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_warm_start_weighs_what_its_uses_would(every: int) -> None:
    """An expert demanded in each `every`-th of many steps has the weight that it goes on having; of few, their sum."""
    half_life, steps, weight = 64, 700, 0
    for _ in range(steps // every):
        weight = order.faded(weight, every, half_life) + order.ONE_USE
    mean = sum(order.faded(weight, at, half_life) for at in range(every)) / every
    counts = np.zeros((1, 16), np.int64)
    counts[0, 0], counts[0, 1] = steps // every, 2 * steps - steps // every
    assert steady_weight(counts, 2, half_life)[0, 0] == pytest.approx(mean, rel=0.05)
    few = np.array([[3, 5]], np.int64)
    assert steady_weight(few, 2, half_life).tolist() == [[3 * order.ONE_USE, 5 * order.ONE_USE]]
