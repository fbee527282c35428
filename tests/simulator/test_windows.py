"""Verify windows in the simulator: what a recording holds, what steps over several tokens cost, what they decide."""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_inputs import make_profile, make_shape, make_trace, make_windows

from foreload.backend.policy import Counter
from foreload.errors import FileError, MismatchError
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, staging_slots
from foreload.simulator import CostModel, load_requests, simulate, split_costs
from foreload.simulator.bounds import belady_loads, bounds
from foreload.simulator.replay import replay
from foreload.simulator.result import shared_ns
from foreload.traces.remodel import cut_windows
from foreload.traces.schema import DECODE, PREFILL, Trace

SHAPE = make_shape(layers=4, experts=12, top_k=3)
GAMMA = 3


def drafting(**fields: object) -> Settings:
    return Settings.parse({"draft": {"kind": "ngram", "gamma": GAMMA}, **fields})


def accepted_only(trace: Trace) -> Trace:
    """The same text, recorded by plain decoding."""
    kept = trace.take(np.flatnonzero(trace.accepted))
    plain = np.where(kept.phase == PREFILL, PREFILL, DECODE).astype(np.int8)
    step = np.cumsum(np.diff(kept.position, prepend=-1) != 0).astype(np.int32)
    return replace(kept, phase=plain, step=np.where(plain == PREFILL, kept.step, 1000 + step).astype(np.int32))


# What a recording holds


@pytest.mark.unit
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_windows_of_a_recording(seed: int) -> None:
    trace = make_windows(SHAPE, GAMMA, seed=seed)
    for request in load_requests(trace, SHAPE, drafting(predictor="gate", prefetch_depth=1)):
        rows = trace.select([request.number])
        rows = rows.take(np.flatnonzero(rows.phase != PREFILL))
        starts = rows.step_starts()
        for step, (first, last) in enumerate(pairwise(starts)):
            window = rows.take(slice(int(first), int(last)))
            assert request.fed[step] == window.rows
            assert request.emitted[step] == window.accepted.sum()
            assert request.context[step] == window.position[-1] + 1
            for layer in range(SHAPE.n_moe_layers):
                expected = Tally(window.experts[:, layer].ravel().tolist())
                distinct = len(expected)
                assert request.demand[step, layer, :distinct].tolist() == sorted(expected)
                assert request.counts[step, layer, :distinct].tolist() == [expected[e] for e in sorted(expected)]
                assert (request.demand[step, layer, distinct:] == -1).all()
                assert (request.counts[step, layer, distinct:] == 0).all()
                guessed = set(window.predictions["gate", 1][:, layer].ravel().tolist()) - {-1}
                assert set(request.predicted[0][step, layer].tolist()) - {-1} == guessed


@pytest.mark.unit
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_draft_the_text_is_decoded_token_by_token(device: str) -> None:
    trace, profile = make_windows(SHAPE, GAMMA), make_profile(SHAPE, device, gpu_us=3.0)
    chosen = Settings(predictor="gate", prefetch_depth=1)
    found = simulate(trace, profile, SHAPE, chosen, (4,) * 4)
    plain = simulate(accepted_only(trace), profile, SHAPE, chosen, (4,) * 4)
    assert found.token_ns.tolist() == plain.token_ns.tolist()
    assert np.array_equal(found.counters, plain.counters)
    assert found.tokens_per_step == 1.0


@pytest.mark.unit
def test_fewer_drafts_than_recorded_are_cut_from_those() -> None:
    trace, profile = make_windows(SHAPE, 3), make_profile(SHAPE)
    fewer = Settings.parse({"draft": {"kind": "ngram", "gamma": 1}})
    found, cut = (simulate(one, profile, SHAPE, fewer, (4,) * 4) for one in (trace, cut_windows(trace, 1)))
    assert found.token_ns.tolist() == cut.token_ns.tolist()
    assert 1 < found.tokens_per_step <= 2


@pytest.mark.unit
def test_drafts_that_are_not_recorded_are_refused() -> None:
    profile = make_profile(SHAPE)

    def refused(said: str, trace: Trace, kind: str, gamma: int) -> None:
        with pytest.raises(MismatchError) as caught:
            simulate(trace, profile, SHAPE, Settings.parse({"draft": {"kind": kind, "gamma": gamma}}), (4,) * 4)
        assert said in str(caught.value)

    refused("draft 'ngram' with gamma 4, but those of draft 'ngram' with gamma 3", make_windows(SHAPE, 3), "ngram", 4)
    refused("no verify windows of draft 'ngram' with gamma 2, but plain decode", make_trace(SHAPE), "ngram", 2)


@pytest.mark.unit
def test_another_draft_model_is_refused() -> None:
    windows = make_windows(SHAPE, GAMMA)
    sampling = {"temperature": 0.0, "draft": "model", "gamma": GAMMA, "draft_model": "small"}
    trace = replace(windows, meta=windows.meta.model_copy(update={"sampling": sampling}))
    measured = make_profile(SHAPE)
    drafted = [m.model_copy(update={"probe": "draft_model"}) for m in measured.points("draft_ngram")]
    profile = HardwareProfile(
        meta=measured.meta.model_copy(update={"draft_model": "small"}), measurements=(*measured.measurements, *drafted)
    )

    def run(model: str, profile: HardwareProfile = profile) -> None:
        chosen = Settings.parse({"draft": {"kind": "model", "gamma": GAMMA, "model": model}})
        assert simulate(trace, profile, SHAPE, chosen, (4,) * 4).time_ns["draft"] > 0

    run("small")
    with pytest.raises(MismatchError, match="drafts are of model 'small', the settings draft with 'large'"):
        run("large")
    with pytest.raises(MismatchError, match="measured with draft model 'none', the settings draft with 'small'"):
        run("small", measured)


# What steps over several tokens cost


@pytest.mark.unit
def test_blocks_cost_what_was_measured_beyond_one_token() -> None:
    costs = CostModel(make_profile(SHAPE), SHAPE)
    one = costs.cost("attention", 101)
    assert costs.block("attention", 101) == one
    assert costs.block("attention", 101, 2).host_ns == one.host_ns + 2_000
    assert costs.block("plan", 0, 5).host_ns == costs.plan.host_ns + 8_000
    assert costs.block("plan", 0, 5).source == "interpolated"


@pytest.mark.unit
def test_experts_cost_by_number_and_tokens() -> None:
    costs = CostModel(make_profile(SHAPE), SHAPE)
    assert costs.experts_gpu_ns(5, 9) == pytest.approx(1000 * (15 * 5 + 5 * 9), abs=2)
    assert costs.experts_cpu_ns(5, 2, 9) == pytest.approx(1000 * (12 + (40 * 5 + 20 * 9) / 2), abs=2)
    assert costs.used["window_experts_gpu"] == "interpolated"
    assert (costs.experts_gpu_ns(0, 0), costs.experts_cpu_ns(0, 1, 0)) == (0, 0)


@pytest.mark.unit
@pytest.mark.parametrize("probe", ["window_route", "window_experts_gpu", "draft_ngram"])
def test_a_profile_without_windows_is_refused_by_name(probe: str) -> None:
    whole = make_profile(SHAPE)
    kept = tuple(m for m in whole.measurements if m.probe != probe)
    profile = HardwareProfile(meta=whole.meta, measurements=kept)
    with pytest.raises(FileError, match=probe):
        simulate(make_windows(SHAPE, GAMMA), profile, SHAPE, drafting(), (12,) * 4)
    simulate(make_windows(SHAPE, GAMMA), profile, SHAPE, Settings(), (12,) * 4)


@pytest.mark.unit
def test_a_resident_window_takes_the_sum_of_its_blocks() -> None:
    trace, profile = make_windows(SHAPE, GAMMA), make_profile(SHAPE)
    prompt = np.flatnonzero(trace.phase == PREFILL)
    trace.experts[prompt] = (3 * np.arange(len(prompt))[:, None, None] + np.arange(3)) % 12  # all of them
    costs = CostModel(profile, SHAPE)
    found = simulate(trace, profile, SHAPE, drafting(), (12,) * 4)
    assert found.hit_rate == 1.0
    at = 0
    for request in load_requests(trace, SHAPE, drafting()):
        for step, (fed, emitted) in enumerate(zip(request.fed, request.emitted, strict=True)):
            blocks = [costs.cost("draft_ngram", max(1, fed - 1)), costs.block("embed", 0, fed)]
            blocks += [costs.block("head", 0, fed)]
            for _ in range(4):
                blocks += [costs.block(name, 0, fed) for name in ("route", "plan", "finish")]
                blocks.append(costs.block("attention", request.context[step], fed))
            total = sum(block.host_ns for block in blocks)
            for layer in range(4):
                experts = int((request.counts[step, layer] > 0).sum())
                total += costs.experts_gpu_ns(experts, 3 * fed if fed > 1 else 0)
            assert found.token_ns[at : at + emitted].sum() == total
            at += emitted
    assert at == found.tokens


@pytest.mark.unit
def test_drawing_tokens_costs_time_in_verify_steps() -> None:
    trace, profile = make_windows(SHAPE, GAMMA), make_profile(SHAPE)
    meta = trace.meta.model_copy(update={"sampling": {**trace.meta.sampling, "temperature": 0.8}})
    greedy = simulate(trace, profile, SHAPE, drafting(), (12,) * 4)
    drawn = simulate(replace(trace, meta=meta), profile, SHAPE, drafting(), (12,) * 4)
    assert drawn.total_ns - greedy.total_ns == drawn.time_ns["sample"] > 0


@pytest.mark.unit
@given(st.integers(0, 10**9), st.integers(1, 9))
def test_a_steps_time_is_shared_out_whole(time_ns: int, tokens: int) -> None:
    shared = shared_ns([time_ns], [tokens])
    assert (len(shared), sum(shared)) == (tokens, time_ns)
    assert max(shared) - min(shared) <= 1


# What they decide


@pytest.mark.unit
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("miss_action", ["fetch", "cpu", "split"])
def test_windows_run_under_every_miss_action(device: str, miss_action: str) -> None:
    trace, profile = make_windows(SHAPE, GAMMA, steps=20), make_profile(SHAPE, device, gpu_us=3.0)
    chosen = drafting(miss_action=miss_action, predictor="gate", prefetch_depth=2, admission="background")
    found = simulate(trace, profile, SHAPE, chosen, (4, 0, 12, 1))
    demanded = sum(int((r.counts > 0).sum()) for r in load_requests(trace, SHAPE, chosen))
    assert found.demanded == demanded
    assert found.tokens == int(trace.accepted[trace.phase != PREFILL].sum())
    assert found.steps == 40
    assert found.time_ns["draft"] > 0
    assert (found.count(Counter.ON_CPU) > 0) == (miss_action != "fetch")


@pytest.mark.unit
@pytest.mark.parametrize("eviction", ["lru", "lfu", "lfru", "aged"])
def test_replay_finds_the_simulators_hits(eviction: str) -> None:
    trace, chosen = make_windows(SHAPE, GAMMA, steps=20), drafting(eviction=eviction)
    replayed = replay(load_requests(trace, SHAPE, chosen), SHAPE, chosen, (5, 0, 2, 12))
    simulated = simulate(trace, make_profile(SHAPE), SHAPE, chosen, (5, 0, 2, 12))
    assert np.array_equal(replayed.counters, simulated.counters)
    assert replayed.histogram.sum() == 4 * replayed.tokens == 4 * 40


@pytest.mark.unit
@pytest.mark.parametrize("slots", [0, 2, 6])
def test_no_setting_is_below_the_windows_bound(slots: int) -> None:
    trace, costs = make_windows(SHAPE, GAMMA, steps=15), CostModel(make_profile(SHAPE), SHAPE)
    for chosen in (drafting(), drafting(miss_action="cpu"), drafting(miss_action="split", cpu_threads=2)):
        floor = bounds(load_requests(trace, SHAPE, chosen), costs, 4 * slots + staging_slots(chosen, SHAPE))
        assert simulate(trace, costs, SHAPE, chosen, (slots,) * 4).tpot_ns >= floor.floor_ns * (1 - 1e-9)


@pytest.mark.unit
def test_the_best_cache_loads_least_windows() -> None:
    trace, chosen = make_windows(SHAPE, GAMMA, steps=20), drafting()
    requests = load_requests(trace, SHAPE, chosen)
    loads = belady_loads(requests, SHAPE)
    distinct = sum((request.counts > 0).sum(axis=(0, 2)) for request in requests)
    assert loads[:, 0].tolist() == distinct.tolist()
    for slots in (1, 4, 9):
        misses = replay(requests, SHAPE, chosen, (slots,) * 4).counters[0, :, Counter.MISSES]
        assert (loads[:, slots] <= misses).all()


@pytest.mark.unit
def test_split_costs_reach_as_far_as_a_window() -> None:
    costs, chosen = make_profile(SHAPE), drafting(miss_action="split")
    found = split_costs(costs, SHAPE, chosen)
    assert len(found.gpu_ns) == len(found.cpu_ns) == 12 + 1
    assert (np.diff(found.cpu_ns) > 0).all()
