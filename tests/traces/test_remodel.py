"""Recordings turned into others: what is kept, what is assumed, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreload.errors import MismatchError, UsageError
from foreload.shape import ModelShape
from foreload.traces.io import read_trace
from foreload.traces.remodel import (
    acceptance,
    as_deep,
    better_of,
    cut_windows,
    executing,
    of_shape,
    renamed,
    with_windows,
    without_windows,
)
from foreload.traces.schema import DRAFT_VERIFY, PREFILL, PredictionColumn, Trace

MakeTrace = Callable[..., Trace]
GATE = PredictionColumn(predictor="gate", depth=1, width=4)


@pytest.mark.unit
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gamma=st.integers(1, 5), seed=st.integers(0, 99), share=st.floats(0, 1), tokens=st.integers(1, 30))
def test_windows_hold_the_text_in_order(
    make_trace: MakeTrace, gamma: int, seed: int, share: float, tokens: int
) -> None:
    """Accepted rows are the recording; each window follows on the last token that was kept."""
    plain = make_trace(tokens=tokens, predictions=[GATE])
    made = with_windows(plain, "ngram", gamma, [share], seed)
    kept = made.take(np.flatnonzero(made.accepted))
    for name in ("request", "position", "token_id", "experts"):
        assert np.array_equal(getattr(kept, name), getattr(plain, name))
    for request in plain.requests():
        mine = made.select([request])
        expected, end = 5, 5 + tokens
        for first, last in pairwise(mine.step_starts().tolist()):
            if mine.phase[first] == PREFILL:
                continue
            assert mine.phase[first:last].tolist() == [DRAFT_VERIFY] * (last - first)
            assert last - first == min(gamma + 1, end - expected)
            assert mine.position[first:last].tolist() == list(range(expected, expected + last - first))
            emitted = int(mine.accepted[first:last].sum())
            assert mine.accepted[first:last].tolist() == [True] * emitted + [False] * (last - first - emitted)
            for row in range(first, last):
                source = np.flatnonzero((plain.request == request) & (plain.position == mine.position[row]))
                assert np.array_equal(mine.experts[row], plain.experts[source[0]])
                assert np.array_equal(mine.predictions["gate", 1][row], plain.predictions["gate", 1][source[0]])
            expected += emitted
        assert expected == end
    assert made.meta.sampling["draft"] == "ngram"
    assert "assumed: verify windows" in made.meta.source


@pytest.mark.unit
def test_acceptance_is_found_again(make_trace: MakeTrace) -> None:
    plain = make_trace(requests=1, tokens=4000)
    for shares in ([0.8, 0.5, 0.3], [1.0], [0.0]):
        made = with_windows(plain, "model", 3, shares, seed=1, model="small")
        assert made.meta.sampling["draft_model"] == "small"
        found, wanted = acceptance(made), [*shares, *[shares[-1]] * 3][:3]
        assert found == pytest.approx(wanted, abs=0.05)
    with pytest.raises(UsageError, match="no verify windows"):
        acceptance(plain)


@pytest.mark.unit
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(recorded=st.integers(1, 8), gamma=st.integers(1, 8), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_windows_cut_short_keep_the_text(
    make_trace: MakeTrace, recorded: int, gamma: int, seed: int, share: float
) -> None:
    """None is too long; where a recorded one kept no more than is wanted, the cut one keeps and rejects the same."""
    made = with_windows(make_trace(tokens=40, predictions=[GATE]), "ngram", recorded, [share], seed)
    found = cut_windows(made, gamma)
    if gamma >= recorded:
        assert found is made
        return
    for name in ("request", "phase", "position", "token_id", "experts"):
        whole, cut = (getattr(one.take(np.flatnonzero(one.accepted)), name) for one in (made, found))
        assert np.array_equal(whole, cut)
    starts = {}
    for first, last in pairwise(found.step_starts().tolist()):
        kept = int(found.accepted[first:last].sum())
        assert found.accepted[first:last].tolist() == [True] * kept + [False] * (last - first - kept)
        if found.phase[first] == DRAFT_VERIFY:
            assert 1 <= last - first <= gamma + 1
            starts[found.request[first], found.position[first]] = (first, last, kept)
    for first, last in pairwise(made.step_starts().tolist()):
        kept = int(made.accepted[first:last].sum())
        if made.phase[first] == DRAFT_VERIFY and kept <= gamma + 1:
            here, until, still = starts[made.request[first], made.position[first]]
            assert (still, until - here) == (kept, min(gamma + 1, last - first))
            assert np.array_equal(found.experts[here:until], made.experts[first : first + until - here])
    assert found.meta.sampling["gamma"] == gamma
    assert "assumed: verify windows" in found.meta.source
    assert cut_windows(found, gamma) is found


@pytest.mark.unit
def test_windows_taken_away_leave_the_text(make_trace: MakeTrace) -> None:
    plain = make_trace()
    assert without_windows(plain) is plain
    found = without_windows(with_windows(plain, "ngram", 3, [0.6]))
    for name in ("request", "step", "phase", "position", "token_id", "accepted", "experts"):
        assert np.array_equal(getattr(found, name), getattr(plain, name)), name
    assert found.meta.sampling == plain.meta.sampling


@pytest.mark.unit
def test_made_windows_can_be_written(make_trace: MakeTrace, write_trace: Callable[..., None], tmp_path: Path) -> None:
    made = with_windows(make_trace(predictions=[GATE]), "ngram", 2, [0.5])
    write_trace(tmp_path / "t.parquet", made)
    found = read_trace(tmp_path / "t.parquet")
    assert np.array_equal(found.accepted, made.accepted)
    assert found.meta == made.meta


@pytest.mark.unit
def test_what_makes_no_windows_is_refused(make_trace: MakeTrace) -> None:
    for trace, gamma in ((make_trace(), 2), (with_windows(make_trace(), "ngram", 4, [0.5]), 0)):
        with pytest.raises(UsageError, match=f"gamma {gamma} must be at least 1, and the trace must hold windows"):
            cut_windows(trace, gamma)
    plain = make_trace()
    for gamma, shares in ((0, [0.5]), (2, []), (2, [1.5])):
        with pytest.raises(UsageError, match="gamma"):
            with_windows(plain, "ngram", gamma, shares)
    with pytest.raises(UsageError, match="holds verify windows already"):
        with_windows(with_windows(plain, "ngram", 2, [0.5]), "ngram", 2, [0.5])


@pytest.mark.unit
def test_another_shape(make_trace: MakeTrace, shape: ModelShape) -> None:
    trace, wider = make_trace(), replace(shape, hidden=64)
    assert of_shape(trace, shape) is trace
    found = of_shape(trace, wider)
    assert (found.meta.shape_hash, found.meta.model_shape()) == (wider.hash, wider)
    assert found.experts is trace.experts
    with pytest.raises(MismatchError, match="8 experts, top-2; the model has 3 of 16, top-2"):
        of_shape(trace, replace(shape, experts=16))


@pytest.mark.unit
def test_executed_predictions_take_the_place_of_what_was_routed(make_trace: MakeTrace) -> None:
    trace = make_trace(predictions=[GATE])
    found, decode = executing(trace, "gate", (1, 2)), trace.phase != PREFILL
    table = trace.predictions["gate", 1]
    assert np.array_equal(found.experts[decode, 1:], table[decode, 1:, :2])
    assert np.array_equal(found.experts[~decode], trace.experts[~decode])
    assert np.array_equal(found.experts[:, 0], trace.experts[:, 0])
    assert (found.meta.speculated, found.meta.speculated_by) == ((1, 2), "gate")
    with pytest.raises(MismatchError, match="predictions of estimator"):
        executing(trace, "estimator", (1,))
    with pytest.raises(MismatchError, match="predictions of gate"):
        executing(trace, "gate", (0,))


@pytest.mark.unit
def test_predictions_under_other_names_and_the_better_per_layer(make_trace: MakeTrace) -> None:
    columns = [GATE, PredictionColumn(predictor="estimator", depth=1, width=4)]
    trace = make_trace(predictions=columns)
    true = np.zeros_like(trace.predictions["gate", 1])
    true[:, :, :2] = trace.experts
    true[:, :, 2:] = -1
    trace.predictions["gate", 1][:, 1] = true[:, 1]
    trace.predictions["estimator", 1][:, 2] = true[:, 2]
    mixed = better_of(trace, ("gate", "estimator"), "hybrid", slice(None))
    assert np.array_equal(mixed.predictions["hybrid", 1][:, 1:, :2], trace.experts[:, 1:])
    alone = renamed(mixed, {"hybrid": "gate"})
    assert list(alone.predictions) == [("gate", 1)]
    assert alone.meta.predictions == (GATE,)
    assert np.array_equal(alone.predictions["gate", 1], mixed.predictions["hybrid", 1])
    assert "predictions of hybrid as gate" in alone.meta.source


@pytest.mark.unit
def test_predictions_made_earlier_than_they_were(make_trace: MakeTrace) -> None:
    """The same lists for a layer, none for layers that nothing so far ahead could name; the source says so."""
    trace = make_trace(predictions=[GATE])
    found = as_deep(trace, "gate", 2)
    assert (found.predictions["gate", 2][:, 2:] == trace.predictions["gate", 1][:, 2:]).all()
    assert (found.predictions["gate", 2][:, :2] == -1).all()
    assert [(p.predictor, p.depth) for p in found.meta.predictions] == [("gate", 1), ("gate", 2)]
    assert "assumed: predictions of gate no worse 2 layers ahead" in found.meta.source
