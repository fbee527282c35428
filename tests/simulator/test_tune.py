"""`tune` end to end on small models: the default is beaten where it can be, and kept where not."""

import json
from dataclasses import replace

import pytest
from sim_inputs import make_profile, make_shape, make_trace, make_windows

from foreload.errors import BudgetError, MismatchError, UsageError
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, staging_slots
from foreload.simulator.tune import split_requests, tune
from foreload.traces.remodel import with_windows
from foreload.traces.schema import PREFILL

SHAPE = make_shape(layers=3, experts=8, top_k=2)


@pytest.fixture(scope="module")
def trace():
    return make_trace(SHAPE, requests=4, prompt=6, tokens=16, seed=3)


@pytest.fixture(scope="module")
def tuned(trace):
    seen = []
    result = tune(trace, make_profile(SHAPE), SHAPE, "float32", slots=14, progress=lambda *step: seen.append(step))
    return result, seen


@pytest.mark.integration
def test_beats_a_default_bound_by_the_link(tuned):
    result, _ = tuned
    assert not result.kept_default
    assert result.best.report.tpot_ns < 0.8 * result.default.report.tpot_ns
    assert result.speedup == result.default.report.tpot_ns / result.best.report.tpot_ns
    assert result.default.settings == Settings(slots_per_layer=(4, 4, 4))
    assert result.bounds.floor_ns <= result.best.tpot_ns


@pytest.mark.integration
def test_every_candidate_fits_and_is_ranked(tuned):
    result, _ = tuned
    for candidate in result.candidates:
        assert sum(candidate.settings.slots_per_layer) + staging_slots(candidate.settings, SHAPE) <= 14
    times = [candidate.tpot_ns for candidate in result.candidates]
    assert times == sorted(times)
    assert result.candidates[0].settings == result.best.settings
    families = [candidate.family for candidate in result.families()]
    assert len(families) == len(set(families))
    assert {"fetch", "cpu", "split", "fetch, cache off", "fetch, depth 1"} <= set(families)
    for candidate in result.families():
        assert candidate.tpot_ns == min(c.tpot_ns for c in result.candidates if c.family == candidate.family)


@pytest.mark.integration
def test_reports_progress_and_json(tuned):
    result, seen = tuned
    assert {"plan", "simulate"} <= {what for _, _, what in seen}
    assert all(0 <= done <= total for done, total, _ in seen)
    values = json.loads(json.dumps(result.as_dict()))
    assert values["requests"] == {"fit": [0, 1], "select": [2], "held_out": [3]}
    assert Settings.parse(values["best"]["settings"]) == result.best.settings


@pytest.mark.integration
def test_recorded_drafts_compete_and_others_do_not(trace):
    windows = make_windows(SHAPE, 2, requests=4, steps=10)
    result = tune(windows, make_profile(SHAPE), SHAPE, "float32", slots=16)
    drafted = [c for c in result.candidates if c.settings.draft.kind != "none"]
    assert {(c.settings.draft.kind, c.settings.draft.gamma) for c in drafted} == {("ngram", 2), ("ngram", 1)}
    assert {c.family for c in drafted} >= {"fetch, ngram draft", "cpu, ngram draft", "split, ngram draft"}
    assert all(sum(c.settings.slots_per_layer) + staging_slots(c.settings, SHAPE) <= 16 for c in drafted)
    assert any(c.settings.draft.kind == "none" for c in result.candidates)
    assert result.bounds.floor_ns <= result.candidates[0].tpot_ns
    whole = make_profile(SHAPE)
    lacking = tuple(m for m in whole.measurements if m.probe != "draft_ngram")
    uncosted = tune(windows, HardwareProfile(meta=whole.meta, measurements=lacking), SHAPE, "float32", slots=16)
    plain = tune(trace, whole, SHAPE, "float32", slots=16)
    assert not [c for r in (uncosted, plain) for c in r.candidates if c.settings.draft.kind != "none"]


@pytest.mark.integration
def test_fewer_drafts_than_recorded_where_the_later_ones_are_refused():
    windows = with_windows(make_trace(SHAPE, 4, 6, 24), "ngram", 4, (1.0, 0.0))
    result = tune(windows, make_profile(SHAPE), SHAPE, "float32", slots=24)
    drafted = [c for c in result.candidates if c.settings.draft.kind != "none"]
    assert {c.settings.draft.gamma for c in drafted} == {4, 2, 1}
    assert min(drafted, key=lambda c: c.tpot_ns).settings.draft.gamma == 1


@pytest.mark.integration
def test_a_draft_models_memory_is_taken_from_the_slots():
    windows, whole = make_windows(SHAPE, 2, requests=4, steps=10), make_profile(SHAPE)
    sampling = {"temperature": 0.0, "draft": "model", "gamma": 2, "draft_model": "small"}
    trace = replace(windows, meta=windows.meta.model_copy(update={"sampling": sampling}))
    drafted = [m.model_copy(update={"probe": "draft_model"}) for m in whole.points("draft_ngram")]
    meta = whole.meta.model_copy(update={"draft_model": "small"})
    profile = HardwareProfile(meta=meta, measurements=(*whole.measurements, *drafted))
    size = 3 * whole.meta.expert_bytes - 1
    found = tune(trace, profile, SHAPE, "float32", slots=20, draft_bytes=size)
    with_model = [c.settings for c in found.candidates if c.settings.draft.kind == "model"]
    assert {s.draft.model for s in with_model} == {"small"}
    assert max(sum(s.slots_per_layer) + staging_slots(s, SHAPE) for s in with_model) == 17
    unknown = tune(trace, profile, SHAPE, "float32", slots=20)
    assert not [c for c in unknown.candidates if c.settings.draft.kind != "none"]


@pytest.mark.integration
def test_is_deterministic(trace, tuned):
    again = tune(trace, make_profile(SHAPE), SHAPE, "float32", slots=14)
    assert again.as_dict() == tuned[0].as_dict()


@pytest.mark.integration
def test_keeps_the_default_when_nothing_helps(trace):
    # All experts fit, the link is fast, and the profile knows no CPU experts.
    profile = make_profile(SHAPE, copy_us=1.0)
    device_only = tuple(m for m in profile.measurements if "threads" not in m.at)
    profile = HardwareProfile(meta=profile.meta, measurements=device_only)
    result = tune(trace, profile, SHAPE, "float32", slots=3 * 8 + 2)
    assert result.kept_default
    assert result.best is result.default
    assert result.speedup == 1.0


@pytest.mark.integration
def test_a_base_is_the_default_to_beat(trace):
    base = Settings(eviction="lfu", headroom_bytes=5, prefill_chunk_tokens=3, cache_ratio=0.9)
    result = tune(trace, make_profile(SHAPE), SHAPE, "float32", slots=14, base=base)
    assert result.default.settings == base.changed(cache_ratio=None, slots_per_layer=(4, 4, 4))
    assert result.best.settings.prefill_chunk_tokens == 3


@pytest.mark.unit
def test_bad_input_is_refused(trace):
    profile = make_profile(SHAPE)
    with pytest.raises(BudgetError) as refused:
        tune(trace, profile, SHAPE, "float32", slots=1)
    assert refused.value.shortfall_bytes == profile.meta.expert_bytes
    with pytest.raises(BudgetError, match="cannot hold"):
        tune(trace, profile, SHAPE, "float32", vram_bytes=1000)
    with pytest.raises(UsageError, match="one of vram_bytes and slots"):
        tune(trace, profile, SHAPE, "float32")
    with pytest.raises(MismatchError, match="bfloat16"):
        tune(trace, profile, SHAPE, "bfloat16", slots=14)
    prompts = make_trace(SHAPE, requests=1, prompt=4, tokens=2)
    prompts.phase[:] = PREFILL
    with pytest.raises(MismatchError, match="no decode steps"):
        tune(prompts, profile, SHAPE, "float32", slots=14)


@pytest.mark.unit
def test_requests_are_parted():
    assert split_requests([5]) == ((5,), (5,), ())
    assert split_requests([5, 6]) == ((5,), (6,), ())
    assert split_requests(range(3)) == ((0,), (1,), (2,))
    assert split_requests(range(8)) == ((0, 1, 2, 3), (4, 5), (6, 7))
