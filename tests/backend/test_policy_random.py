"""The brain under random use: nothing is lost, held twice or over capacity, whatever happens in whatever order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import COSTS, Driver, digest, make_shape, random_capacity, random_settings

from foreload.backend.policy import Action, Brain, Counter
from foreload.backend.policy.state import (
    ABSENT,
    DECODE,
    DISCARD,
    IN_FLIGHT,
    KEPT,
    LANDED,
    N_UNFILLED,
    PREFILL,
    QUEUED,
    UPLOAD,
)

RANDOM = st.randoms(use_true_random=False)
RUNS = settings(max_examples=60, deadline=None)


@pytest.mark.unit
@RUNS
@given(random=RANDOM)
def test_anything_in_any_order(random: Random) -> None:
    """The driver checks integrity after every call, and that no demand ever lacks a staging slot."""
    driver = Driver(random_settings(random), random_capacity(random), random)
    for _ in range(25):
        driver.anything()
    driver.settle()
    state = driver.brain.state
    assert set(np.unique(state.status).tolist()) <= {ABSENT, KEPT}
    assert (driver.brain.counters >= 0).all()


@pytest.mark.unit
@RUNS
@given(random=RANDOM, layers=st.integers(1, 4), top_k=st.integers(1, 4), more=st.integers(0, 6))
def test_any_shape(random: Random, layers: int, top_k: int, more: int) -> None:
    shape = make_shape(layers, max(3, top_k + more), top_k)
    driver = Driver(random_settings(random), random_capacity(random, shape), random, shape)
    for _ in range(12):
        driver.anything()


@pytest.mark.unit
@RUNS
@given(random=RANDOM)
def test_counters_account_for_everything(random: Random) -> None:
    """Every demanded expert is counted once, every copy once, and nothing is wasted that was not prefetched."""
    driver = Driver(random_settings(random), random_capacity(random), random)
    demanded = copies = 0
    for _ in range(15):
        before = len(driver.log)
        driver.step()
        new = driver.log[before:]
        demanded += sum(len(entry[2]) for entry in new if entry[0] == "begin")
        copies += sum(entry[0] == "issue" for entry in new)
    before = len(driver.log)
    driver.drain()
    copies += len(driver.log) - before
    total = driver.brain.counters[DECODE].sum(axis=0)
    assert total[[Counter.HITS, Counter.LATE, Counter.MISSES]].sum() == demanded
    assert total[[Counter.FETCHED, Counter.PREFETCHED, Counter.UPLOADED]].sum() == copies
    assert total[Counter.WASTED] <= total[Counter.PREFETCHED]
    assert total[Counter.ON_CPU] <= total[Counter.MISSES]
    assert total[Counter.FETCHED] >= total[Counter.MISSES] - total[Counter.ON_CPU]
    assert (driver.brain.counters[PREFILL] == 0).all()


@pytest.mark.unit
@RUNS
@given(random=RANDOM)
def test_actions_say_where_an_expert_is(random: Random) -> None:
    """Hits are usable at once, late ones under way, fetched ones queued, CPU experts absent, or copied for later."""
    driver = Driver(random_settings(random), random_capacity(random), random)
    for _ in range(6):
        driver.step()
    where = {
        Action.HIT: (KEPT, LANDED),
        Action.LATE: (QUEUED, IN_FLIGHT),
        Action.FETCH: (QUEUED,),
        Action.CPU: (ABSENT, QUEUED, IN_FLIGHT),
    }
    for layer in range(driver.shape.n_moe_layers):
        experts = sorted(random.sample(range(driver.shape.experts), driver.shape.top_k))
        actions = driver.begin(layer, experts)
        for expert, action in zip(experts, actions, strict=True):
            status, purpose = driver.status(layer, expert), driver.brain.state.purpose[layer, expert]
            assert status in where[action]
            if action == Action.CPU and status == QUEUED:
                assert purpose == UPLOAD
            if action == Action.CPU and status == IN_FLIGHT:
                assert purpose == (DISCARD if driver.brain.settings.admission == "none" else UPLOAD)
        driver.wait(layer, experts, actions)
        driver.finish(layer)


@pytest.mark.unit
def test_no_slot_is_left_unused_when_capacity_is_whole() -> None:
    """With room for all, every expert fetched stays and everything is a hit the second time."""
    random = Random(0)
    driver = Driver(random_settings(random).changed(admission="demand", miss_action="fetch"), (8, 8, 8), random)
    for _ in range(2):
        for expert in range(0, 8, 2):
            for layer in range(3):
                actions = driver.layer_step(layer, [expert, expert + 1])
            driver.brain.end_step()
    assert actions == [Action.HIT, Action.HIT]
    assert driver.brain.counters[DECODE, :, Counter.FETCHED].tolist() == [8, 8, 8]


@pytest.mark.integration
def test_compiled_and_plain_decide_alike() -> None:
    """The same random runs with and without numba's compiler."""
    script = Path(__file__).with_name("policy_driver.py")
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    found = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True, cwd=script.parent
    )
    assert found.stdout.split() == [digest(seed, 40) for seed in range(4)]


@pytest.mark.unit
@RUNS
@given(random=RANDOM)
def test_same_run_same_decisions(random: Random) -> None:
    seed = random.randrange(1000)
    assert digest(seed, 8) == digest(seed, 8)


@pytest.mark.unit
def test_integrity_check_notices_damage() -> None:
    """The check that the other tests rely on can fail."""
    from foreload.errors import InternalError

    def damaged(harm: str) -> Brain:
        random = Random(1)
        driver = Driver(random_settings(random).changed(admission="demand", miss_action="fetch"), (2, 2, 2), random)
        driver.layer_step(0, [1, 2])
        state = driver.brain.state
        if harm == "slot":
            state.slot[0, 1] = state.slot[0, 2]
        elif harm == "status":
            state.status[0, 5] = KEPT
        elif harm == "kept":
            state.kept[0] = 1
        else:
            state.scalars[N_UNFILLED] += 1
        return driver.brain

    for harm, said in (
        ("slot", "held twice"),
        ("status", "does not go with its slot"),
        ("kept", "kept counts"),
        ("unfilled", "unfilled"),
    ):
        with pytest.raises(InternalError, match=said):
            damaged(harm).check_integrity()


@pytest.mark.unit
def test_split_without_costs_is_refused() -> None:
    from foreload.errors import SettingsError

    settings = random_settings(Random(0)).changed(miss_action="split")
    with pytest.raises(SettingsError, match="needs measured costs: give a profile"):
        Brain(make_shape(), settings, (1, 1, 1))
    brain = Brain(make_shape(), settings, (1, 1, 1), COSTS)
    with pytest.raises(SettingsError, match="needs measured costs"):
        brain.reconfigure(settings, (2, 2, 2))
    assert brain.state.capacity.tolist() == [1, 1, 1]
