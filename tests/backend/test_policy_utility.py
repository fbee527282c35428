"""Utility from demand: both signals, boundaries real and floored, and faults of public code that must not return."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import EXPERTS, LAYERS, Driver, int32

from foreload.backend.policy.utility import start_boundary
from foreload.settings import Settings


def driver(utility: dict[str, Any], **fields: Any) -> Driver:
    chosen = Settings.parse({"eviction": "utility", "utility": utility, **fields})
    return Driver(chosen, (EXPERTS,) * LAYERS, Random(0))


def feed(made: Driver, tokens: list[int], expert: int = 0) -> list[int]:
    """Layer-steps of layer 0 that route so many tokens to `expert`; its s after each."""
    found = []
    for count in tokens:
        experts, counts = ([expert, 7], [count, 1]) if count else ([7], [1])
        made.layer_step(0, experts, counts)
        made.brain.end_step()
        found.append(int(made.brain.state.score[0, expert]))
    return found


class Plain:
    """Section 5 for one expert, in plain Python."""

    def __init__(self, k: int, signal: str, rate: float, adapt: str, up: float, down: float) -> None:
        self.k, self.signal, self.rate, self.adapt = k, signal, rate, adapt
        self.theta = {1: up, -1: down}
        self.s = self.before = 0

    def step(self, f: int) -> int:
        change = f - (self.before if self.signal == "delta" else self.s)
        self.before = f
        if change:
            sign = 1 if change > 0 else -1
            if abs(change) >= self.theta[sign]:
                self.s = min(self.k, max(0, self.s + sign))
            moved = (1 - self.rate) * self.theta[sign] + self.rate * abs(change)
            self.theta[sign] = {"off": self.theta[sign], "real": moved, "floored": float(math.floor(moved))}[self.adapt]
        return self.s


@pytest.mark.unit
@settings(max_examples=80, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=25),
    k=st.integers(1, 5),
    signal=st.sampled_from(["delta", "level"]),
    rate=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    adapt=st.sampled_from(["real", "floored", "off"]),
    up=st.sampled_from([0.0, 0.5, 2.0, 4.0]),
    down=st.sampled_from([0.5, 1.0, 4.0]),
)
def test_equal_to_plain_python(
    tokens: list[int], k: int, signal: str, rate: float, adapt: str, up: float, down: float
) -> None:
    utility = {"k": k, "signal": signal, "rate": rate, "adapt": adapt, "theta_up": up, "theta_down": down}
    made, plain = driver(utility), Plain(k, signal, rate, adapt, up, down)
    assert feed(made, tokens) == [plain.step(f) for f in tokens]
    state = made.brain.state
    assert (state.theta_up[0, 0], state.theta_down[0, 0]) == (plain.theta[1], plain.theta[-1])
    assert (state.score[1:] == 0).all()


@pytest.mark.unit
def test_boundaries_start_at_half_the_window() -> None:
    assert [start_boundary(gamma) for gamma in (0, 1, 2, 8)] == [0.5, 0.5, 1.0, 4.0]
    made = driver({})
    assert set(made.brain.state.theta_up.ravel().tolist()) == {0.5}


@pytest.mark.unit
@pytest.mark.parametrize(("adapt", "rises"), [("real", True), ("floored", False), ("off", False)])
def test_the_boundary_rises_when_demand_jumps(adapt: str, rises: bool) -> None:
    """Jumps of nine tokens against a boundary of 4: floored updates can only fall, and end at 1."""
    made = driver({"adapt": adapt, "theta_up": 4.0})
    thetas = []
    for _ in range(6):
        feed(made, [9, 0])
        thetas.append(float(made.brain.state.theta_up[0, 0]))
    assert (thetas[-1] > 4.0) == rises
    if rises:
        assert thetas == sorted(thetas)
    made = driver({"adapt": "floored", "theta_up": 4.0})
    for _ in range(6):
        feed(made, [1, 0])
    assert made.brain.state.theta_up[0, 0] == 1.0


@pytest.mark.unit
@pytest.mark.parametrize("signal", ["delta", "level"])
def test_with_plain_decode_a_quiet_expert_does_not_move(signal: str) -> None:
    made = driver({"signal": signal})
    assert feed(made, [0] * 5, expert=3) == [0] * 5
    assert made.brain.state.theta_up[0, 3] == made.brain.state.theta_down[0, 3] == 0.5


@pytest.mark.unit
def test_a_permanently_hot_expert() -> None:
    """Under delta it never rises above 1; under level it follows its demand up to K."""
    assert feed(driver({"theta_up": 0.5}), [5] * 6) == [1] * 6
    assert feed(driver({"signal": "level", "adapt": "off"}), [5] * 6) == [1, 2, 3, 4, 4, 4]


@pytest.mark.unit
def test_the_released_code_s_boundaries() -> None:
    """K = 5, level signal, 5 up and 1 down: only a demand five above s lifts it."""
    utility = {"k": 5, "signal": "level", "theta_up": 5.0, "theta_down": 1.0, "adapt": "off"}
    assert feed(driver(utility), [4, 5, 5, 6, 0, 0, 0]) == [0, 1, 1, 2, 1, 0, 0]


@pytest.mark.unit
def test_utility_is_not_kept_where_nothing_decides_by_it() -> None:
    made = Driver(Settings(), (2,) * LAYERS, Random(0))
    feed(made, [3, 3])
    assert not made.brain.state.score.any()


@pytest.mark.unit
def test_fewer_levels_cut_what_was_reached() -> None:
    made = driver({"signal": "level", "adapt": "off"})
    feed(made, [9] * 4)
    made.reconfigure(Settings.parse({"eviction": "utility", "utility": {"k": 2}}), (EXPERTS,) * LAYERS)
    assert made.brain.state.score.max() == 2


@pytest.mark.unit
def test_done_layers_give_way_if_asked() -> None:
    """`reset_done`: within a step, a layer that is done ranks below one that is still to come; after it, by s again."""
    for reset in (False, True):
        chosen = {"eviction": "utility", "pool": "shared", "utility": {"reset_done": reset, "adapt": "off"}}
        made = Driver(Settings.parse(chosen), (1, 1, 0), Random(0))
        made.layer_step(0, [1])
        made.layer_step(1, [2])
        made.brain.end_step()
        made.brain.state.score[0, 1], made.brain.state.score[1, 2] = 4, 2
        made.layer_step(0, [1])
        made.brain.state.score[1, 5] = 2
        made.layer_step(1, [5])
        assert (made.kept(0), made.kept(1)) == ((set(), {2, 5}) if reset else ({1}, {5}))


@pytest.mark.unit
def test_scores_are_of_a_layer_s_own_demand() -> None:
    made = driver({"signal": "level", "adapt": "off"})
    for layer in range(LAYERS):
        made.layer_step(layer, [layer], [2])
    made.brain.end_step()
    assert np.argwhere(made.brain.state.score == 1).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert made.brain.state.before[2].tolist() == int32([0, 0, 2, 0, 0, 0, 0, 0]).tolist()
