"""A step over several tokens: its demand, its merged predictions, its results, and rolling it back."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from foreload.backend.engine import Engine
from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE
from foreload.backend.policy.window import demand_of, merge_predictions
from foreload.settings import Settings

PROMPT = [3, 14, 15, 9, 26, 53, 58]
WINDOW = [11, 12, 13, 11, 40]
ROOM: dict[str, Any] = {"admission": "background", "admit_per_step": 16}
"""Staging that holds a window's demand."""
MakeEngine = Callable[..., Engine]


@st.composite
def routings(draw: st.DrawFn) -> NDArray[np.int64]:
    """Experts of 1 to 6 tokens, 1 to 4 distinct of 9 each."""
    k = draw(st.integers(1, 4))
    row = st.lists(st.integers(0, 8), min_size=k, max_size=k, unique=True)
    return np.asarray(draw(st.lists(row, min_size=1, max_size=6)), np.int64)


@pytest.mark.unit
@given(routings())
def test_demand_of_a_window(routed: NDArray[np.int64]) -> None:
    demand = demand_of(routed)
    expected = Tally(routed.ravel().tolist())
    assert demand.experts.tolist() == sorted(expected)
    assert demand.counts.tolist() == [expected[expert] for expert in sorted(expected)]
    starts = demand.starts()
    for i, expert in enumerate(demand.experts):
        places = demand.places[starts[i] : starts[i + 1]].tolist()
        assert places == np.flatnonzero(routed.ravel() == expert).tolist()


@pytest.mark.unit
@given(routings(), st.data())
def test_merged_predictions(predicted: NDArray[np.int64], data: st.DataObject) -> None:
    """Votes, then the best rank, then the smaller id; absent ones (-1) are no votes."""
    absent = data.draw(st.integers(0, predicted.shape[1]))
    predicted[-1, predicted.shape[1] - absent :] = -1
    votes: dict[int, list[int]] = {}
    for row in predicted.tolist():
        for rank, expert in enumerate(row):
            if expert >= 0:
                votes.setdefault(expert, []).append(rank)
    expected = sorted(votes, key=lambda expert: (-len(votes[expert]), min(votes[expert]), expert))
    assert merge_predictions(predicted).tolist() == expected


def windows(engine: Engine) -> list[torch.Tensor]:
    """The logits of three windows after a prompt, the second over the first, which is thus rolled back in part."""
    forward = engine.forward
    with torch.inference_mode(), engine.copies.lock:
        engine.brain.start_request()
    with torch.inference_mode():
        forward.prefill(PROMPT, 0, True)
        at = len(PROMPT)
        return [
            forward.decode(WINDOW, at).clone(),
            forward.decode([11, *WINDOW[::-1]], at).clone(),
            forward.decode([5], at + 2).clone(),
        ]


SETTINGS: dict[str, dict[str, Any]] = {
    "nothing_kept": {"cache_ratio": 0.0},
    "some": {"cache_ratio": 0.25, "eviction": "lfu"},
    "prefetch": {"cache_ratio": 0.25, "predictor": "gate", "prefetch_depth": 2},
    "cpu": {"cache_ratio": 0.25, "miss_action": "cpu", "cpu_threads": 2},
    "split": {"cache_ratio": 0.25, "miss_action": "split"},
}


@pytest.mark.integration
@pytest.mark.parametrize("name", SETTINGS)
def test_windows_are_bit_identical_to_fully_resident(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Also where torch runs experts on the CPU: on this device it is the same arithmetic."""
    monkeypatch.setenv("FORELOAD_CPU_ISA", "torch")
    expected = windows(make_engine(Settings(cache_ratio=1.0)))
    engine = make_engine(Settings.parse({**ROOM, **SETTINGS[name]}), debug_seed=len(name))
    found = windows(engine)
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    engine.brain.check_integrity()
    counted = engine.brain.counters[DECODE].sum(axis=0)
    assert (counted[Counter.ON_CPU] > 0) == (engine.settings.miss_action != "fetch")
    assert counted[: Counter.MISSES + 1].sum() < 2 * engine.shape.n_moe_layers * (len(WINDOW) + len(WINDOW) + 2)


@pytest.mark.integration
def test_a_window_equals_its_tokens_one_by_one(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings.parse({"cache_ratio": 0.5, **ROOM}))
    at = len(PROMPT)
    together = windows(engine)[0]
    with torch.inference_mode():
        one_by_one = [engine.forward.decode([token], at + n)[0].clone() for n, token in enumerate(WINDOW)]
    torch.testing.assert_close(together, torch.stack(one_by_one), rtol=1e-4, atol=1e-4)


@pytest.mark.integration
@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 63), min_size=1, max_size=6), st.integers(0, 6))
def test_rolled_back_tokens_leave_nothing_behind(rolled: Callable[..., Any], tokens: list[int], kept: int) -> None:
    """A window whose tail was fed and rejected gives the bits of one whose tail was never fed."""
    accepted = tokens[: min(kept, len(tokens) - 1) + 1]
    fresh, used = rolled(accepted, []), rolled(tokens, tokens[len(accepted) :])
    assert torch.equal(fresh, used)


@pytest.fixture(scope="module")
def rolled(tiny: Any) -> Any:
    """Logits of a token after a window of which `rejected` tokens at the end were rolled back."""
    from foreload.backend.engine import EngineOptions
    from foreload.backend.models.checkpoint import Checkpoint

    with Engine(Checkpoint.open(str(tiny)), EngineOptions(context_tokens=64), Settings(cache_ratio=1.0)) as engine:

        def run(window: list[int], rejected: list[int]) -> torch.Tensor:
            kept = len(window) - len(rejected)
            with torch.inference_mode():
                engine.forward.prefill(PROMPT, 0, True)
                for at, token in enumerate(window[:kept]):
                    engine.forward.decode([token], len(PROMPT) + at)
                if rejected:
                    engine.forward.decode(rejected, len(PROMPT) + kept)
                return engine.forward.decode([1], len(PROMPT) + kept)[0].clone()

        yield run
