"""Cost look-ups: verbatim at measured points, linear between, marked outside, refused where nothing is known."""

import numpy as np
import pytest
from sim_inputs import in_formats, make_graph_profile, make_profile, make_shape, make_trace, with_parts

from foreload.errors import FileError, MismatchError
from foreload.formats import block_layout
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.simulator.compiled import simulate
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import SCALE, CostModel, as_costs, worst
from foreload.simulator.lookup import on_line
from foreload.simulator.machines import assume

SHAPE = make_shape()


def costs_without(*probes: str) -> CostModel:
    profile = make_profile(SHAPE)
    kept = tuple(m for m in profile.measurements if m.probe not in probes)
    return CostModel(HardwareProfile(meta=profile.meta, measurements=kept), SHAPE)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("context", "ns", "source"),
    [
        (1, 30_000, "measured"),
        (201, 60_000, "measured"),
        (51, 35_000, "interpolated"),
        (2, 30_100, "interpolated"),
        (301, 80_000, "extrapolated"),
    ],
)
def test_attention_by_context(context, ns, source):
    found = CostModel(make_profile(SHAPE), SHAPE).cost("attention", context)
    assert (found.host_ns, found.source) == (ns, source)


@pytest.mark.unit
def test_counts_beyond_the_profile_hold_the_rate():
    costs = CostModel(make_profile(SHAPE), SHAPE)
    found = costs.cost("experts_gpu", 5)
    assert (found.host_ns, found.source) == (100_000, "extrapolated")
    assert costs.experts_gpu_ns(0) == 0


@pytest.mark.unit
def test_copies_hold_the_bandwidth_outside_the_measured_sizes():
    costs = CostModel(make_profile(SHAPE), SHAPE)
    assert costs.copy_ns == 100_000
    assert costs.cost("copy", 3 * costs.expert_bytes, pinned=0).host_ns == 300_000
    small = costs.cost("copy", costs.expert_bytes // 8, pinned=0)
    assert (small.host_ns, small.source) == (13_000, "extrapolated")


@pytest.mark.unit
def test_pinned_copies_are_preferred():
    profile = make_profile(SHAPE)
    pinned = tuple(
        m.model_copy(update={"at": {**m.at, "pinned": 1}, "p50_us": 40.0})
        for m in profile.measurements
        if m.probe == "copy" and m.at["bytes"] == profile.meta.expert_bytes
    )
    both = HardwareProfile(meta=profile.meta, measurements=profile.measurements + pinned)
    assert CostModel(both, SHAPE).copy_ns == 40_000


@pytest.mark.unit
def test_an_assumed_measurement_stays_assumed():
    profile = make_profile(SHAPE)
    assumed = tuple(
        m.model_copy(update={"source": "assumed"}) if m.probe == "route" else m for m in profile.measurements
    )
    costs = CostModel(HardwareProfile(meta=profile.meta, measurements=assumed), SHAPE)
    assert costs.cost("route").source == "assumed"
    assert costs.used == {"route": "assumed"}
    assert worst("measured", "extrapolated", "interpolated") == "extrapolated"


@pytest.mark.unit
def test_refusals_name_what_is_missing():
    with pytest.raises(FileError, match="no measurement of 'head'"):
        costs_without("head").cost("head")
    with pytest.raises(MismatchError, match="cpu_threads 8: it was at 1, 2"):
        CostModel(make_profile(SHAPE), SHAPE).experts_cpu_ns(1, 8)
    with pytest.raises(MismatchError, match="model shape"):
        CostModel(make_profile(SHAPE), make_shape(layers=3))
    with pytest.raises(MismatchError, match="model shape"):
        as_costs(CostModel(make_profile(SHAPE), SHAPE), make_shape(layers=3))
    with pytest.raises(MismatchError, match="bfloat16"):
        CostModel(make_profile(SHAPE), SHAPE, "bfloat16")


@pytest.mark.unit
def test_corrupt_profiles_are_refused():
    profile = make_profile(SHAPE)
    twice = HardwareProfile(meta=profile.meta, measurements=profile.measurements * 2)
    with pytest.raises(FileError, match="measured twice"):
        CostModel(twice, SHAPE).cost("head")
    bare = tuple(m.model_copy(update={"at": {}}) if m.probe == "attention" else m for m in profile.measurements)
    with pytest.raises(FileError, match="lacks the coordinate 'context'"):
        CostModel(HardwareProfile(meta=profile.meta, measurements=bare), SHAPE).cost("attention", 1)
    wrong = HardwareProfile(meta=profile.meta.model_copy(update={"expert_bytes": 7}), measurements=profile.measurements)
    with pytest.raises(FileError, match="expert_bytes is 7"):
        CostModel(wrong, SHAPE)


@pytest.mark.unit
def test_thread_counts_are_those_every_cpu_probe_knows():
    assert CostModel(make_profile(SHAPE), SHAPE).cpu_threads == (1, 2)
    assert costs_without("both").cpu_threads == ()


@pytest.mark.unit
def test_contended_rates():
    costs = CostModel(make_profile(SHAPE), SHAPE)
    assert costs.copy_rate(1) == SCALE * 100 // 125
    assert costs.cpu_rate(1, 1) == SCALE * 60 // 90
    assert costs.both_rate(1, 1, 1) == SCALE * 20 // 24
    free = CostModel(make_profile(SHAPE, contended=False), SHAPE)
    assert {free.copy_rate(1), free.cpu_rate(2, 2), free.both_rate(1, 1, 1)} == {SCALE}


@pytest.mark.unit
def test_split_costs_are_contended():
    found = split_costs(make_profile(SHAPE), SHAPE, Settings(miss_action="split"))
    assert found.io_ns == pytest.approx(125_000, abs=2)
    assert found.cpu_ns.tolist() == pytest.approx([0, 90_000, 180_000], abs=2)
    assert found.gpu_ns.tolist() == pytest.approx([0, 24_000, 48_000], abs=2)


@pytest.mark.unit
def test_another_format_shifts_experts_and_scales_copies() -> None:
    profile = in_formats(make_profile(SHAPE), ("fp32", 10.0, 50.0), ("int8", 15.0, 20.0), ("bf16", 10.0, 5.0))
    own = CostModel(profile, SHAPE)
    gpu, cpu = own.experts_gpu_ns(2), own.experts_cpu_ns(2, 1)
    assert own.for_settings(Settings()) is own
    int8 = own.for_settings(Settings(expert_format="int8"))
    assert int8.expert_bytes == block_layout("int8", SHAPE).bytes < own.expert_bytes
    assert int8.for_settings(Settings(expert_format=("int8",) * 4)) is int8
    assert (int8.experts_gpu_ns(0), int8.experts_gpu_ns(2)) == (0, gpu + 10_000)
    assert (int8.experts_cpu_ns(0, 1), int8.experts_cpu_ns(2, 1)) == (0, cpu * 20 // 50)
    assert int8.copy_ns < own.copy_ns
    assert int8.copy_rate(1) == own.copy_rate(1)
    assert int8.cpu_rate(2, 1) == own.cpu_rate(2, 1)
    assert int8.both_rate(1, 1, 1) == own.both_rate(1, 1, 1)
    assert own.for_settings(Settings(expert_format="bf16")).experts_cpu_ns(2, 1) == cpu * 5 // 50
    assert int8.fresh().experts_cpu_ns(2, 1) == cpu * 20 // 50
    split = split_costs(profile, SHAPE, Settings(expert_format="int8", miss_action="split"))
    assert split.io_ns == int8.copy_ns * SCALE // int8.copy_rate(1)


@pytest.mark.unit
def test_copies_of_another_format_follow_copies_of_its_size() -> None:
    """Those of the engine run behind each other; single ones of other sizes say how much less a smaller one takes."""
    profile = in_formats(make_profile(SHAPE), ("fp32", 10.0, 50.0), ("int8", 15.0, 20.0))
    own = CostModel(profile, SHAPE)
    size = own.expert_bytes
    (mine,) = (m for m in profile.measurements if m.probe == "copy" and m.at["bytes"] == size)
    others = tuple(m for m in profile.measurements if m.probe != "copy")
    us = mine.p50_us
    single = [(size // 8, 30.0), (size // 2, 30.0 + 0.3 * us), (2 * size, 30.0 + 1.5 * us)]
    copies = (mine, *(mine.model_copy(update={"at": {**mine.at, "bytes": b}, "p50_us": us}) for b, us in single))
    several = CostModel(profile.model_copy(update={"measurements": (*others, *copies)}), SHAPE)
    assert several.copy_ns == own.copy_ns
    int8 = several.for_settings(Settings(expert_format="int8"))
    slope = (single[1][1] - single[0][1]) / (single[1][0] - single[0][0])
    here = 30.0 + slope * (int8.expert_bytes - size // 8)
    whole = single[1][1] + (single[2][1] - single[1][1]) / 3  # a third of the way from a half to twice the size
    assert int8.copy_ns == pytest.approx(own.copy_ns + 1e3 * (here - whole), rel=0.01)
    assert int8.used["copy"] == "interpolated"
    assert int8.copy_rate(1) == several.copy_rate(1)


@pytest.mark.unit
def test_formats_that_were_not_measured_are_refused() -> None:
    costs = CostModel(in_formats(make_profile(SHAPE), ("fp32", 18.0, 50.0), ("fp8", 23.0, 20.0)), SHAPE)
    with pytest.raises(MismatchError, match="expert_format mxfp4 was not measured: it was fp32, fp8"):
        costs.for_settings(Settings(expert_format="mxfp4"))
    with pytest.raises(MismatchError, match="expert_format bf16 was not measured"):
        costs.for_settings(Settings(expert_format=("fp8", "bf16", "fp8", "fp8")))
    assert worst("measured", "extrapolated", "interpolated") == "extrapolated"


@pytest.mark.unit
def test_layers_in_different_formats() -> None:
    measured = in_formats(make_profile(SHAPE), ("fp32", 18.0, 50.0), ("fp8", 23.0, 20.0), ("bf16", 9.0, 9.0))
    own = CostModel(measured, SHAPE)
    fp8, bf16 = (own.for_settings(Settings(expert_format=name)) for name in ("fp8", "bf16"))
    chosen = Settings(expert_format=("fp8", "bf16", "fp8", "fp8"), miss_action="split")
    mixed = own.for_settings(chosen).fresh()
    assert mixed.formats == chosen.expert_format == mixed.replaying().formats
    assert mixed.for_settings(chosen) is mixed
    assert mixed.for_settings(Settings()).formats == own.formats
    assert mixed.layer_bytes == (fp8.expert_bytes, bf16.expert_bytes, fp8.expert_bytes, fp8.expert_bytes)
    for layer, alone in enumerate((fp8, bf16, fp8, fp8)):
        assert mixed.at(layer).copy_ns == alone.copy_ns
        assert mixed.at(layer).experts_cpu_ns(2, 1) == alone.experts_cpu_ns(2, 1)
    assert {"copy", "experts_cpu"} <= mixed.used.keys()  # whichever layer it was that asked
    parts = [split_costs(measured, SHAPE, chosen.changed(expert_format=name)) for name in ("fp8", "bf16")]
    mean = split_costs(measured, SHAPE, chosen)
    assert mean.io_ns == (3 * parts[0].io_ns + parts[1].io_ns) // 4
    np.testing.assert_array_equal(mean.cpu_ns, (3 * parts[0].cpu_ns + parts[1].cpu_ns) // 4)


@pytest.mark.unit
def test_what_is_read_ahead_is_saved_by_idle_time():
    costs = CostModel(make_graph_profile(SHAPE), SHAPE)
    chosen = Settings(miss_action="cpu", predictor="gate", prefetch_depth=1, cpu_threads=2, cpu_read_ahead=True)
    found = costs.read_ahead(chosen)
    assert found == ((0, 0), (20_000, 6_000), (90_000, 20_000))
    assert [on_line(found, at) for at in (0, 10_000, 20_000, 55_000, 90_000, 900_000)] == [
        0, 3_000, 6_000, 13_000, 20_000, 20_000
    ]  # fmt: skip
    assert costs.used["read_ahead"] == "interpolated"
    assert costs.read_ahead(chosen.changed(cpu_read_ahead=False)) == ()
    faster = CostModel(assume(costs.profile, None, 2.0, None).profile, SHAPE)
    assert faster.read_ahead(chosen)[-1] == (90_000, 10_000)
    assert faster.used["read_ahead"] == "assumed"
    with pytest.raises(MismatchError, match="read_ahead was not measured at cpu_threads 7"):
        costs.read_ahead(chosen.changed(cpu_threads=7))


@pytest.mark.unit
def test_cpu_experts_vary_as_they_were_measured():
    plain, one = make_profile(SHAPE), with_parts(make_profile(SHAPE), (60.0,))
    assert CostModel(plain, SHAPE).varies("experts_cpu", 1) == (SCALE,)
    assert set(CostModel(one, SHAPE).varies("experts_cpu", 1)) == {SCALE}
    varied = with_parts(plain, (30.0, 60.0, 90.0))
    found = CostModel(varied, SHAPE).varies("experts_cpu", 1)
    assert list(found) == sorted(found)
    assert sum(found) == pytest.approx(SCALE * len(found), rel=1e-6)
    assert (found[0] / SCALE, found[-1] / SCALE) == (pytest.approx(0.5), pytest.approx(1.5))
    assert CostModel(assume(varied, None, 0.25, None).profile, SHAPE).varies("experts_cpu", 1) == found
    assert CostModel(varied, SHAPE).varies("experts_cpu", 7) == (SCALE,)
    assert CostModel(varied, SHAPE).varies("copy_beside_cpu", 1) == found


@pytest.mark.integration
def test_variation_costs_where_others_are_waited_for():
    """CPU experts alone take as long in the mean; beside copies the later of both is what counts."""
    shape = make_shape(top_k=4)
    steady = make_graph_profile(shape, copy_us=60)  # some of four take the link as long as the others take the CPU
    varied, trace = with_parts(steady, (20.0, 50.0, 70.0, 100.0)), make_trace(shape, requests=1, tokens=96)
    took = {}
    for miss, threads in (("cpu", 1), ("split", 1)):
        chosen = Settings.parse({"miss_action": miss, "admission": "none", "cpu_threads": threads})
        for name, profile in (("steady", steady), ("varied", varied)):
            took[miss, name] = simulate(trace, profile, shape, chosen, (0,) * shape.n_moe_layers).tpot_ns
    copies = tuple(m for m in varied.measurements if m.probe == "copy_beside_cpu")
    others = tuple(m for m in steady.measurements if m.probe != "copy_beside_cpu")
    copies_alone = steady.model_copy(update={"measurements": (*others, *copies)})
    chosen = Settings.parse({"miss_action": "split", "admission": "none", "cpu_threads": 1})
    found = simulate(trace, copies_alone, shape, chosen, (0,) * shape.n_moe_layers).tpot_ns
    assert found > took["split", "steady"] * 1.01
    assert took["cpu", "varied"] == pytest.approx(took["cpu", "steady"], rel=0.01)
    assert took["split", "varied"] > took["split", "steady"] * 1.04
