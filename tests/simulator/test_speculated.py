"""Predicted and speculated layers in the simulator, and quality budgets in `tune`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sim_inputs import make_profile, make_shape, make_trace, predict

from foreload.backend.policy import Counter
from foreload.errors import FileError, MismatchError, UsageError
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.quality import Figures, QualityReport, Variant
from foreload.settings import Settings
from foreload.simulator.candidates import Space
from foreload.simulator.costs import CostModel
from foreload.simulator.engine_model import simulate
from foreload.simulator.tune import tune
from foreload.simulator.workload import load_requests
from foreload.traces.schema import DECODE, PredictionColumn, Trace

SHAPE = make_shape(layers=4, experts=8, top_k=2)
CAPACITY = (3,) * 4
GATE: dict[str, Any] = {"predictor": "gate", "prefetch_depth": 1}
WIDE = 4


def with_predictors(trace: Trace, recalls: dict[tuple[str, int], float]) -> Trace:
    """The recording with predictions of other predictors beside the gate's."""
    rng = np.random.default_rng(5)
    found = dict(trace.predictions)
    for key, recall in recalls.items():
        found[key] = predict(trace.experts, SHAPE, WIDE, recall, rng)
        found[key][:, : key[1]] = -1
    columns = tuple(PredictionColumn(predictor=name, depth=depth, width=WIDE) for name, depth in found)
    meta = trace.meta.model_copy(update={"predictions": columns})
    return Trace(**{**trace.__dict__, "meta": meta, "predictions": found})


def with_probes(profile: HardwareProfile, **us: float) -> HardwareProfile:
    """The profile with more probes; keywords name them, `predict_*` at depth 1 and 2."""
    more = []
    for probe, value in us.items():
        points = [{"depth": 1}, {"depth": 2}] if probe.startswith("predict") else [{}]
        more += [Measurement(probe=probe, at=at, p50_us=value, p95_us=value, repeats=1) for at in points]
    return profile.model_copy(update={"measurements": (*profile.measurements, *more)})


@pytest.fixture(scope="module")
def trace() -> Trace:
    plain = make_trace(SHAPE, requests=4, prompt=6, tokens=12, seed=3, width=WIDE)
    recalls = {("estimator", 1): 0.95, ("quasi_hidden", 1): 0.5, ("quasi_hidden", 2): 0.4}
    return with_predictors(plain, {**recalls, ("quasi_hidden_rolled", 2): 0.45})


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    return with_probes(
        make_profile(SHAPE), speculated=2.0, predict_estimator=9.0, predict_quasi_hidden=5.0,
        predict_quasi_hidden_rolled=6.0,
    )  # fmt: skip


@pytest.mark.unit
def test_speculated_layers_demand_what_was_predicted(trace: Trace) -> None:
    chosen = Settings.parse({**GATE, "speculate_layers": [1, 3]})
    exact, guessed = load_requests(trace, SHAPE), load_requests(trace, SHAPE, chosen)
    decode = trace.phase == DECODE
    predicted = trace.predictions["gate", 1][decode][:, :, :2]
    at = 0
    for before, after in zip(exact, guessed, strict=True):
        rows = slice(at, at + len(after.context))
        at += len(after.context)
        assert np.array_equal(after.demand[:, [0, 2]], before.demand[:, [0, 2]])
        assert np.array_equal(after.demand[:, [1, 3]], np.sort(predicted[rows][:, [1, 3]], axis=2))
        assert np.array_equal(after.prompt, before.prompt)
        assert after.assumed
        assert not before.assumed


@pytest.mark.unit
def test_a_simulated_speculation_is_labelled_and_skips_the_gate(trace: Trace, profile: HardwareProfile) -> None:
    plain = simulate(trace, profile, SHAPE, Settings.parse(GATE), CAPACITY)
    chosen = Settings.parse({**GATE, "speculate_layers": "all"})
    guessed = simulate(trace, profile, SHAPE, chosen, CAPACITY)
    assert guessed.sources["speculated_demand"] == "assumed"
    assert "speculated_demand" not in plain.sources
    assert guessed.sources["speculated"] == "measured"
    tokens = guessed.tokens
    assert plain.time_ns["route"] == tokens * 4 * 10_000
    assert guessed.time_ns["route"] == tokens * (10_000 + 3 * 2_000)
    assert guessed.count(Counter.WASTED) == 0  # all that is prefetched is executed
    assert plain.count(Counter.WASTED) > 0


@pytest.mark.unit
def test_every_predictor_has_its_own_cost_and_columns(trace: Trace, profile: HardwareProfile) -> None:
    one = simulate(trace, profile, SHAPE, Settings(predictor="estimator", prefetch_depth=1), CAPACITY)
    assert one.time_ns["predict"] == one.tokens * 3 * 9_000
    deep = {"predictor": "quasi_hidden", "prefetch_depth": 2}
    plain = simulate(trace, profile, SHAPE, Settings.parse(deep), CAPACITY)
    rolled = simulate(trace, profile, SHAPE, Settings.parse({**deep, "prefetch_rolled": True}), CAPACITY)
    assert "predict_quasi_hidden" in plain.sources
    assert "predict_quasi_hidden_rolled" in rolled.sources
    loaded = load_requests(trace, SHAPE, Settings.parse({**deep, "prefetch_rolled": True}))[0]
    decode = (trace.phase == DECODE) & (trace.request == 0)
    assert np.array_equal(loaded.predicted[0], trace.predictions["quasi_hidden", 1][decode][:, :, :2])
    assert np.array_equal(loaded.predicted[1], trace.predictions["quasi_hidden_rolled", 2][decode][:, :, :2])


@pytest.mark.unit
def test_what_does_not_belong_together(trace: Trace, profile: HardwareProfile) -> None:
    with pytest.raises(MismatchError, match="no predictions of estimator at depth 2"):
        load_requests(trace, SHAPE, Settings(predictor="estimator", prefetch_depth=2))
    narrow = make_trace(SHAPE, width=1)
    with pytest.raises(MismatchError, match="predictions are 1 wide, a speculated layer executes 2"):
        load_requests(narrow, SHAPE, Settings.parse({**GATE, "prefetch_width": 1, "speculate_layers": "all"}))
    meta = trace.meta.model_copy(update={"speculated": (1, 2, 3), "speculated_by": "gate"})
    executed = Trace(**{**trace.__dict__, "meta": meta})
    kept = load_requests(executed, SHAPE, Settings.parse({**GATE, "speculate_layers": "all"}))
    assert not kept[0].assumed
    assert np.array_equal(kept[0].demand, load_requests(trace, SHAPE)[0].demand)
    with pytest.raises(MismatchError, match=r"recorded with layers 1, 2, 3 speculated by gate, .* speculate none"):
        load_requests(executed, SHAPE, Settings.parse(GATE))
    with pytest.raises(FileError, match="no measurement of 'predict_estimator'"):
        simulate(trace, make_profile(SHAPE), SHAPE, Settings(predictor="estimator", prefetch_depth=1), CAPACITY)


# Tuning


def report(trace: Trace, loss: float = 1.02, **fields: Any) -> QualityReport:
    """The estimator on all layers but the first raises perplexity by `loss`."""

    def variant(name: str, predictor: str, layers: tuple[int, ...], perplexity: float) -> Variant:
        figures = Figures(tokens=9, nats_per_token=1.0, perplexity=perplexity, kl=0.1, top1_agreement=0.9)
        return Variant(name=name, predictor=predictor, layers=layers, figures={"all": figures})

    base: dict[str, Any] = {
        "model": "test", "weights_hash": trace.meta.weights_hash, "dtype": "float32", "texts": (), "window": 4,
        "prompt_tokens": 2, "machine": "test", "software": {},
        "variants": (variant("exact", "none", (), 10.0), variant("e", "estimator", (1, 2, 3), 10.0 * loss)),
    }  # fmt: skip
    return QualityReport(**{**base, **fields})


@pytest.mark.unit
def test_predictors_are_ranked_by_what_they_recalled(trace: Trace, profile: HardwareProfile) -> None:
    space = Space.of([trace], CostModel(profile, SHAPE), Settings(), 20)
    assert space.looks[1][0] == ("estimator", False)
    assert set(space.looks[1]) == {("estimator", False), ("gate", False), ("quasi_hidden", False)}
    assert ("quasi_hidden", True) in space.looks[2]
    assert ("estimator", False) not in space.looks[2]
    only_gate = Space.of([trace], CostModel(make_profile(SHAPE), SHAPE), Settings(), 20)
    assert only_gate.looks[1] == (("gate", False),)


@pytest.mark.unit
def test_a_calibration_takes_slots(trace: Trace, profile: HardwareProfile) -> None:
    space = Space.of([trace], CostModel(profile, SHAPE), Settings(), 20)
    assert space.budget(Settings.parse(GATE)) == 20
    assert space.budget(Settings(predictor="estimator", prefetch_depth=1)) < 20


@pytest.mark.integration
def test_only_a_quality_budget_lets_speculation_compete(trace: Trace, profile: HardwareProfile) -> None:
    given: dict[str, Any] = {"slots": 22}
    exact = tune(trace, profile, SHAPE, "float32", **given)
    assert all(not c.settings.speculate_layers for c in exact.candidates)
    assert exact.quality_loss_pct == 0
    tight = tune(trace, profile, SHAPE, "float32", quality=report(trace), max_quality_loss_pct=1.0, **given)
    assert all(not c.settings.speculate_layers for c in tight.candidates)
    loose = tune(trace, profile, SHAPE, "float32", quality=report(trace), max_quality_loss_pct=5.0, **given)
    found = [c for c in loose.candidates if c.settings.speculate_layers]
    assert {(c.settings.predictor, c.settings.speculated(SHAPE)) for c in found} == {("estimator", (1, 2, 3))}
    assert loose.quality_loss_pct in (0.0, pytest.approx(2.0))
    assert loose.as_dict()["quality_loss_pct"] == loose.quality_loss_pct


@pytest.mark.unit
def test_refused_quality_budgets(trace: Trace, profile: HardwareProfile) -> None:
    speculating = Settings(predictor="estimator", prefetch_depth=1, speculate_layers="all")
    with pytest.raises(UsageError, match="the settings to beat speculate"):
        tune(trace, profile, SHAPE, "float32", slots=22, base=speculating)
    with pytest.raises(UsageError, match="go together: give both or none"):
        tune(trace, profile, SHAPE, "float32", slots=22, max_quality_loss_pct=1.0)
    other = report(trace, weights_hash="feed")
    with pytest.raises(MismatchError, match="quality report: of 'test' with weights feed"):
        tune(trace, profile, SHAPE, "float32", slots=22, quality=other, max_quality_loss_pct=1.0)
