"""Steps of graphs against totals worked out by hand, in both models; what else reads such a profile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from sim_inputs import in_formats, make_graph_profile, make_shape, make_trace, make_windows, manual_trace

from foreload.backend.policy import Counter
from foreload.errors import FileError
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Draft, Settings, slot_counts
from foreload.simulator import compiled, engine_model
from foreload.simulator.bounds import bounds
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import CostModel
from foreload.simulator.tune import tune
from foreload.simulator.workload import load_requests
from foreload.traces.schema import PREFILL
from foreload.traces.timings import KINDS

ONE, TWO = make_shape(layers=1), make_shape(layers=2)
BOTH = pytest.mark.parametrize("run", [engine_model.simulate, compiled.simulate], ids=["simpy", "compiled"])

# A step: 12 embed, 4 from the launch to the device's start, 50 entering a layer; told at 66. 10 plan; a launch takes
# the host 3, finishing 9, and the device 40 for the head.


@BOTH
@pytest.mark.unit
def test_misses_then_hits(run):
    found = run(manual_trace(ONE, [[[0, 1]], [[0, 1]]]), make_graph_profile(ONE), ONE, Settings(), (2,))
    # Copies begin at 76, land at 182 (the first takes 6 more) and 282; the last expert runs from 284.5 to 289.5.
    # Resident: launched at 76, run from 80 to 90.
    assert (found.token_ns / 1e3).tolist() == [289.5 + 40, 90 + 40]
    # Issued by 79, told of at 81, both launched at 88, the head at 91; the copies had landed at 282.
    assert found.stall_ns["wait_link"] >= (282 - 91) * 1000
    assert found.hit_rate == 0.5


@BOTH
@pytest.mark.unit
def test_the_device_enters_the_next_layer_while_the_host_ends_this_one(run):
    warm = np.zeros((2, TWO.experts), np.int64)
    warm[:, :2] = 1
    decode = [[[0, 1], [0, 1]]]
    found = run(manual_trace(TWO, decode), make_graph_profile(TWO), TWO, Settings(), (2, 2), warm=warm)
    # Layer 0 runs its experts from 80 to 90 and has entered layer 1 at 140; the host had ended the layer-step at 91.
    assert (found.token_ns / 1e3).tolist() == [140 + 10 + 4 + 10 + 40]
    assert found.warm_experts == 4


@BOTH
@pytest.mark.unit
def test_the_device_goes_on_behind_cpu_experts(run):
    settings = Settings(miss_action="cpu", cpu_threads=2)
    found = run(manual_trace(ONE, [[[0, 1]], [[0, 1]]]), make_graph_profile(ONE), ONE, settings, (0,))
    # Entering takes 3 more. From 79 on two experts take 60, at first 15 more as the workers slept. Of what the device
    # would take for a layer at 64 tokens, 44 are left then; so much less is left of the head as well.
    # The second time the workers had rested for over 100.
    alone = 12 + 4 + 53 + 10 + 60 + 40 - (56.3 + 3 - 44)
    assert (found.token_ns / 1e3).tolist() == [alone + 15, alone + 15]
    assert found.stall_ns["wait_cpu"] == 2 * (60 + 15 - 5 - 3) * 1000  # less submitting, and launching what follows


@BOTH
@pytest.mark.unit
def test_cpu_experts_do_not_wait_for_predictions(run):
    nothing = [[[-1, -1], [-1, -1]]]
    trace = manual_trace(TWO, [[[0, 1], [2, 3]]], nothing)
    plain = Settings(miss_action="cpu", admission="none", cpu_threads=2)
    ahead = plain.changed(predictor="gate", prefetch_depth=1)
    profile = make_graph_profile(TWO)
    long = [m.model_copy(update={"gpu_us": 200.0}) if m.probe == "predict" else m for m in profile.measurements]
    times = [run(trace, profile, TWO, settings, (0, 0)).total_ns / 1e3 for settings in (plain, ahead)]
    # The device predicts for 3 and the host plans for 4, while the CPU computes for 60.
    assert times[0] == times[1]
    slow = profile.model_copy(update={"measurements": tuple(long)})
    # Told at 69, seen at 269 and planned at 273; from then on a layer is entered for 4 + 50 + 3. It began at 84, and
    # 37.7 were left of it when the CPU was done at 154. The next time its workers had rested for over 100.
    assert run(trace, slow, TWO, ahead, (0, 0)).total_ns / 1e3 == times[0] + (273 + 57) - (154 + 37.7) + 15


@BOTH
@pytest.mark.unit
@pytest.mark.parametrize(("second", "less"), [([2, 3], 11.5), ([1, 2], 0.0)])
def test_what_was_read_ahead_takes_the_cpu_less(run, second, less):
    """Of two that are predicted the last is read, if the next layer demands it, as long as the workers have nothing to
    do: the profile says 6 us less after 20 us, 20 after 90.
    """
    predicted = [[[-1, -1], [1, 3]]]
    trace = manual_trace(TWO, [[[0, 1], second]], predicted)
    chosen = Settings(
        miss_action="cpu", admission="none", cpu_threads=2, predictor="gate", prefetch_depth=1, cpu_read_ahead=True
    )
    profile = make_graph_profile(TWO, copy_us=5)  # nothing is copied beside the next layer's
    nothing = [m.model_copy(update={"p50_us": 0.0}) if m.probe == "read_ahead" else m for m in profile.measurements]
    without = profile.model_copy(update={"measurements": tuple(nothing)})
    times = [run(trace, of, TWO, chosen, (0, 0)).total_ns / 1e3 for of in (without, profile)]
    assert times[0] - times[1] == pytest.approx(less, abs=1.0)


@BOTH
@pytest.mark.unit
def test_outputs_that_are_there_early_wait_for_the_device(run):
    profile = make_graph_profile(ONE)
    quick = [m.model_copy(update={"p50_us": 1.0}) if m.probe == "experts_cpu" else m for m in profile.measurements]
    profile = profile.model_copy(update={"measurements": tuple(quick)})
    settings = Settings(miss_action="cpu", cpu_threads=2)
    found = run(manual_trace(ONE, [[[0, 1]]]), profile, ONE, settings, (0,))
    # Told at 69, decided at 79, handed over at 84, when what follows is launched; it begins 4 later.
    assert (found.token_ns / 1e3).tolist() == [84 + 4 + 40]


@BOTH
@pytest.mark.unit
def test_all_resident_is_one_launch(run):
    warm = np.ones((2, TWO.experts), np.int64)
    trace, capacity = make_trace(TWO, requests=1, prompt=0, tokens=3), (TWO.experts,) * 2
    for costs, us in (
        (CostModel(make_graph_profile(TWO), TWO), 0),
        (CostModel(make_graph_profile(TWO), TWO, replayed=True), 5),
    ):
        found = run(trace, costs, TWO, Settings(), capacity, warm=warm)
        assert found.count(Counter.HITS) == 3 * 2 * 2
        base = 2 * (50 + 5 * 2) + 20 + 2 * us
        assert (found.token_ns / 1e3).round().tolist() == pytest.approx([base, base, base], abs=1)
        assert set(found.time_ns) == {"head"}


@BOTH
@pytest.mark.unit
def test_all_resident_in_another_format_takes_what_its_experts_take_longer(run):
    warm, capacity = np.ones((2, TWO.experts), np.int64), (TWO.experts,) * 2
    trace = make_trace(TWO, requests=1, prompt=0, tokens=3)
    costs = CostModel(in_formats(make_graph_profile(TWO), ("fp32", 4.0, 9.0), ("fp8", 7.0, 9.0)), TWO)
    own, fp8 = (
        run(trace, costs.for_settings(chosen), TWO, chosen, capacity, warm=warm)
        for chosen in (Settings(), Settings(expert_format="fp8"))
    )
    assert fp8.token_ns - own.token_ns == pytest.approx(2 * 2 * 3_000)  # 2 experts in 2 layers, 3 us each


@BOTH
@pytest.mark.unit
def test_a_window_of_one_launch_takes_longer_with_more_experts(run):
    warm, costs = np.ones((2, TWO.experts), np.int64), make_graph_profile(TWO)
    settings = Settings(draft=Draft(kind="ngram", gamma=3))
    same = make_windows(TWO, gamma=3, requests=1, steps=6)
    same.experts[:] = [0, 1]
    others = replace(
        same, experts=same.experts + (np.arange(len(same.experts)) % 2 * 2).astype(np.int16)[:, None, None]
    )
    capacity = (TWO.experts,) * 2
    few, many = (run(trace, costs, TWO, settings, capacity, warm=warm) for trace in (same, others))
    starts = same.step_starts()
    sizes = np.diff(starts)[same.phase[starts[:-1]] != PREFILL]
    more = 2 * 2 * 2 * int((sizes > 1).sum())  # 2 us for each of two others in two layers, in windows alone
    assert few.time_ns["head"] + more * 1000 == many.time_ns["head"]
    assert more > 0


@pytest.mark.integration
def test_what_reads_profiles_reads_those_of_graphs():
    """Bounds lie below what is simulated, splits have their costs, the tuner finds something, windows are known."""
    shape = make_shape(layers=3)
    profile, trace = make_graph_profile(shape), make_trace(shape, requests=3, tokens=12)
    costs = CostModel(profile, shape)
    found = bounds(load_requests(trace, shape), costs, 6)
    best = compiled.simulate(trace, profile, shape, Settings(), (2,) * 3)
    assert 0 < found.floor_ns <= best.tpot_ns
    whole = compiled.simulate(trace, profile, shape, Settings(), (8,) * 3, warm=np.ones((3, 8), np.int64))
    assert found.compute_ns <= whole.tpot_ns
    assert len(split_costs(costs, shape, Settings(miss_action="split")).cpu_ns) == shape.top_k + 1
    assert costs.cpu_threads == (1, 2)
    assert costs.has_windows("ngram")
    tuned = tune(trace, profile, shape, "float32", slots=20).best.settings
    assert compiled.simulate(trace, profile, shape, tuned, slot_counts(tuned, shape, 20)).tpot_ns <= best.tpot_ns
    drafting = Settings(draft={"kind": "ngram", "gamma": 3})
    windows = compiled.simulate(make_windows(shape, 3), profile, shape, drafting, (2,) * 3)
    assert windows.tokens > windows.steps


@pytest.mark.integration
@pytest.mark.parametrize(
    "chosen",
    [
        Settings(),
        Settings(miss_action="split", admission="background", predictor="gate", prefetch_depth=1),
        Settings(miss_action="cpu", cpu_threads=2),
    ],
    ids=["fetch", "split", "cpu"],
)
def test_times_add_up_and_tracks_do_not_overlap(chosen):
    shape = make_shape(layers=4, experts=12, top_k=3)
    trace = make_trace(shape, requests=3, prompt=9, tokens=24, seed=1)
    found = engine_model.simulate(trace, make_graph_profile(shape), shape, chosen, (3, 4, 0, 12), timeline=True)
    assert found.total_ns == sum(found.time_ns.values())
    for track in ("host", "gpu", "link", "cpu"):
        spans = sorted((e.start_ns, e.start_ns + e.duration_ns) for e in found.timeline if e.stream == track)
        assert bool(spans) == (track != "cpu" or chosen.miss_action != "fetch")
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    host = sum(e.duration_ns for e in found.timeline if e.stream == "host")
    assert host == found.total_ns + int(found.ttft_ns.sum())
    assert {e.kind for e in found.timeline} <= set(KINDS)


@pytest.mark.unit
@pytest.mark.parametrize("probe", ["launch", "copy_start", "gpu_beside_copy"])
def test_a_profile_without_a_probe_is_refused_by_name(probe):
    whole = make_graph_profile(ONE)
    lacking = HardwareProfile(meta=whole.meta, measurements=tuple(m for m in whole.measurements if m.probe != probe))
    with pytest.raises(FileError, match=f"no measurement of '{probe}'"):
        compiled.simulate(manual_trace(ONE, [[[0, 1]]]), lacking, ONE, Settings(), (2,))
