"""The compiled engine model equals the SimPy model to the nanosecond."""

from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from sim_inputs import in_formats, make_graph_profile, make_profile, make_shape, make_trace, make_windows, with_parts

from foreload.errors import FileError, MismatchError, SettingsError
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.settings import Settings
from foreload.simulator import compiled, engine_model
from foreload.simulator.costs import CostModel

SHAPE, GAMMA = make_shape(layers=3, experts=6, top_k=2), 3
MACHINES = [("cpu", 100, 0), ("cpu", 13.7, 0), ("cuda", 100, 11.3), ("cuda", 9.1, 40), ("cuda", 45, 1)]
SPECULATED = Measurement(probe="speculated", at={}, p50_us=2, p95_us=2, gpu_us=1, repeats=1)
PROFILES = [
    HardwareProfile(meta=found.meta, measurements=(*found.measurements, SPECULATED))
    for found in (make_profile(SHAPE, device=device, copy_us=copy, gpu_us=gpu) for device, copy, gpu in MACHINES)
]
PROFILES += [make_graph_profile(SHAPE, copy_us=copy, slow_us=slow) for copy, slow in ((100, 1), (9.3, 1), (45, 2.7))]
PROFILES += [with_parts(found, (30.0, 55.5, 60.0, 94.5)) for found in (PROFILES[0], PROFILES[3], *PROFILES[-2:])]
PROFILES = [in_formats(found, ("fp32", 18, 50), ("int8", 14, 31), ("mxfp4", 25, 12)) for found in PROFILES]
FORMATS = [None, None, "int8", ("int8", "mxfp4", "int8"), ("mxfp4", "mxfp4", "int8")]
FIELDS = {
    "expert_format": st.sampled_from(FORMATS),
    "pool": st.sampled_from(["layer", "shared"]),
    "eviction": st.sampled_from(["lru", "lfu", "lfru", "aged", "static", "utility", "random"]),
    "admission": st.sampled_from(["demand", "background", "none"]),
    "admit_per_step": st.integers(1, 3),
    "predictor": st.sampled_from(["none", "gate", "previous_step", "utility"]),
    "miss_action": st.sampled_from(["fetch", "cpu", "split"]),
    "split_rule": st.sampled_from(["makespan", "bandwidth", "tau", "per_expert"]),
    "cpu_threads": st.sampled_from([1, 2]),
    "prefill_chunk_tokens": st.integers(1, 9),
}


@cache
def trace_of(windows, seed):
    if windows:
        return make_windows(SHAPE, GAMMA, seed=seed)
    return make_trace(SHAPE, prompt=seed % 12, tokens=12, seed=seed)


@st.composite
def drawn_settings(draw, windows):
    fields = {name: draw(strategy) for name, strategy in FIELDS.items()}
    fields["prefetch_depth"] = draw(st.integers(1, 2)) if fields["predictor"] == "gate" else 0
    if fields["prefetch_depth"] and fields["miss_action"] != "fetch":
        fields["cpu_read_ahead"] = draw(st.booleans())
    if windows:
        fields["draft"] = {"kind": "ngram", "gamma": GAMMA}
    if fields["predictor"] == "gate" and draw(st.booleans()):
        fields["speculate_layers"] = draw(st.sampled_from([(1,), (2,), "all"]))
    try:
        return Settings.parse(fields)
    except SettingsError:
        assume(False)


def assert_equal(fast, slow):
    np.testing.assert_array_equal(fast.token_ns, slow.token_ns)
    np.testing.assert_array_equal(fast.ttft_ns, slow.ttft_ns)
    np.testing.assert_array_equal(fast.counters, slow.counters)
    assert dict(fast.time_ns) == {kind: ns for kind, ns in slow.time_ns.items() if ns}
    assert dict(fast.prefill_time_ns) == {kind: ns for kind, ns in slow.prefill_time_ns.items() if ns}
    assert dict(fast.sources) == dict(slow.sources)
    np.testing.assert_array_equal(fast.token_part, slow.token_part)
    assert (fast.capacity, fast.layer_bytes, fast.settings) == (slow.capacity, slow.layer_bytes, slow.settings)
    assert (fast.warm_ns, fast.steps) == (slow.warm_ns, slow.steps)


@pytest.mark.integration
@pytest.mark.parametrize("windows", [False, True], ids=["tokens", "windows"])
@settings(max_examples=120, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(data=st.data(), capacity=st.tuples(*[st.integers(0, 6)] * 3), machine=st.integers(0, len(PROFILES) - 1))
def test_equal_to_the_nanosecond(windows, data, capacity, machine):
    chosen = data.draw(drawn_settings(windows))
    seed, warmed = data.draw(st.integers(0, 20)), chosen.eviction == "static" or data.draw(st.booleans())
    warm = np.random.default_rng(seed).integers(0, 9, (3, 6)) if warmed else None
    profile = CostModel(PROFILES[machine], SHAPE, replayed=data.draw(st.booleans()))
    run = (trace_of(windows, seed), profile, SHAPE, chosen, capacity)
    if chosen.cpu_read_ahead and not profile.graphs:
        for simulate in (compiled.simulate, engine_model.simulate):
            with pytest.raises(FileError, match="no measurement of 'read_ahead'"):
                simulate(*run, warm=warm)
        return
    assert_equal(compiled.simulate(*run, warm=warm), engine_model.simulate(*run, warm=warm))


@pytest.mark.integration
def test_the_stream_may_be_behind_a_layer_whose_copies_have_landed():
    """A layer that executes predictions waits for nothing: launches behind copies of the one before are pending."""
    chosen = Settings(
        pool="shared", eviction="aged", half_life=64, predictor="gate", prefetch_depth=2, speculate_layers=(2,),
        miss_action="split", split_rule="tau", cpu_threads=1, draft={"kind": "ngram", "gamma": 3},
        expert_format=("int8", "mxfp4", "int8"), prefill_chunk_tokens=7,
    )  # fmt: skip
    warm = np.random.default_rng(4).integers(0, 9, (3, 6))
    run = (trace_of(True, 4), CostModel(PROFILES[3], SHAPE, replayed=True), SHAPE, chosen, (0, 0, 2))
    assert_equal(compiled.simulate(*run, warm=warm), engine_model.simulate(*run, warm=warm))


@pytest.mark.unit
def test_refuses_what_the_simpy_model_refuses():
    with pytest.raises(MismatchError, match="capacity has 1 entries"):
        compiled.simulate(trace_of(False, 0), PROFILES[0], SHAPE, Settings(), (1,))


@pytest.mark.integration
@pytest.mark.parametrize("run", [compiled.simulate, engine_model.simulate], ids=["compiled", "simpy"])
def test_a_layer_step_ends_when_its_copies_have_landed(run):
    """Where the last layer executes predictions, nothing else makes the host wait for those of the layer before."""
    chosen = Settings(pool="shared", predictor="gate", prefetch_depth=1, speculate_layers="all", prefill_chunk_tokens=3)
    found = run(trace_of(False, 7), PROFILES[2], SHAPE, chosen, (0, 0, 0))
    assert found.tokens == 24
