"""What the tuner answers where the right answer is known beforehand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sim_inputs import make_profile, make_shape, make_trace, manual_trace

from foreload.backend.policy import Counter
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.compiled import simulate
from foreload.simulator.tune import TuneResult, tune
from foreload.traces.schema import Trace

pytestmark = pytest.mark.integration
SHAPE = make_shape(layers=4, experts=16, top_k=2)


def without_cpu(profile: HardwareProfile) -> HardwareProfile:
    """The profile of a machine whose CPU runs no experts: a missing one must be fetched."""
    kept = tuple(m for m in profile.measurements if "threads" not in m.at)
    return HardwareProfile(meta=profile.meta, measurements=kept)


def fetching(trace: Trace, copy_us: float, shape: ModelShape = SHAPE, slots: int = 24, **more: Any) -> TuneResult:
    """Tuned where fetching is the only miss action."""
    return tune(trace, without_cpu(make_profile(shape, copy_us=copy_us)), shape, "float32", slots=slots, **more)


SATURATED_US = 600.0
"""Of one copy, where a layer without experts takes about 60."""


def test_a_saturated_link_and_recall_of_6_in_10_gives_depth_0() -> None:
    """Copies of what is not needed only delay those that are."""
    trace = make_trace(SHAPE, requests=4, prompt=4, tokens=24, recall=0.6, repeat=0.1)
    found = fetching(trace, SATURATED_US)
    assert found.best.settings.prefetch_depth == 0
    stalled = sum(found.default.result.stall_ns.values())
    assert stalled > 0.7 * found.default.result.total_ns  # the link is what bounds it


def test_a_saturated_link_and_perfect_recall_gives_depth_1() -> None:
    """Then nothing is copied in vain, and the layer before hides part of it."""
    trace = make_trace(SHAPE, requests=4, prompt=4, tokens=24, recall=1.0, repeat=0.1)
    found = fetching(trace, SATURATED_US)
    assert found.best.settings.prefetch_depth == 1
    assert found.best.result.count(Counter.WASTED) == 0
    assert found.speedup > 1.01


def test_an_idle_link_and_recall_of_6_in_10_gives_a_depth() -> None:
    """Copies that nobody waits for cost nothing."""
    trace = make_trace(SHAPE, requests=4, prompt=4, tokens=24, recall=0.6, repeat=0.1)
    found = fetching(trace, copy_us=40.0)
    assert found.best.settings.prefetch_depth > 0
    assert found.speedup > 1.01


def test_a_small_model_on_a_slow_link_is_better_left_to_the_cpu() -> None:
    """8 experts, top-2, uniform routing: where missing experts must be fetched, no cache beats CPU experts alone."""
    shape = make_shape(layers=4, experts=8, top_k=2)
    rng = np.random.default_rng(1)
    routed = [[rng.permutation(8)[:2].tolist() for _ in range(4)] for _ in range(64)]
    trace = manual_trace(shape, routed)
    profile = make_profile(shape, copy_us=800.0)
    alone = Settings(slots_per_layer=(0,) * 4, miss_action="cpu", cpu_threads=2, admission="none")
    on_cpu = simulate(trace, profile, shape, alone, (0,) * 4)
    found = tune(trace, without_cpu(profile), shape, "float32", slots=10)
    assert on_cpu.tpot_ns / found.best.tpot_ns <= 1.0
    told = tune(trace, profile, shape, "float32", slots=10, base=alone.changed(slots_per_layer=None, cache_ratio=0.0))
    assert told.best.settings.miss_action == "cpu"
    assert not any(c.settings.miss_action == "fetch" and c.tpot_ns <= on_cpu.tpot_ns for c in told.candidates)


def recency(shape: ModelShape, tokens: int) -> Trace:
    """Each layer goes on with the experts of a slowly moving window, so that what was used last is used next."""
    routed = []
    for token in range(tokens):
        at = token // 3
        routed.append([[(at + layer) % shape.experts, (at + layer + 1) % shape.experts] for layer in range(4)])
    return manual_trace(shape, routed)


def test_recency_alone_gives_lru() -> None:
    """Counts of a recording say nothing where every expert is used as often as any other."""
    trace = recency(SHAPE, 96)
    found = fetching(trace, copy_us=400.0, slots=4 * 4 + 2, warm=np.ones((4, 16), np.int64))
    assert found.best.settings.eviction == "lru"
    static = [c for c in found.candidates if c.settings.eviction == "static"]
    assert static
    assert min(c.tpot_ns for c in static) > 1.01 * found.best.tpot_ns


def test_a_static_skew_gives_static_or_lfu() -> None:
    """The same few experts most of the time, never twice in a row: recency misleads, counts do not."""
    rng = np.random.default_rng(3)
    routed = []
    for token in range(160):
        hot = [0, 1, 2, 3] if token % 2 else [4, 5, 6, 7]
        routed.append([[int(rng.choice(hot)), int(rng.integers(8, 16))] for _ in range(4)])
    trace = manual_trace(SHAPE, routed)
    counts = np.array([np.bincount(trace.experts[:, at].ravel(), minlength=16) for at in range(4)])
    found = fetching(trace, copy_us=400.0, slots=4 * 8 + 2, warm=counts)
    assert found.best.settings.eviction in ("static", "lfu")
    lru = [c for c in found.candidates if c.settings.eviction == "lru" and c.settings.prefetch_depth == 0]
    assert min(c.tpot_ns for c in lru) > 1.01 * found.best.tpot_ns


def test_no_preset_is_faster() -> None:
    """Every preset that the recording and the profile allow competes, whole."""
    trace = make_trace(SHAPE, requests=4, prompt=4, tokens=16, width=4)
    profile = make_profile(SHAPE)
    counts = np.ones((4, 16), np.int64)
    found = tune(trace, profile, SHAPE, "float32", slots=40, warm=counts)
    names = {c.name for c in found.presets()}
    known = ("on_demand", "mixtral_offloading", "fiddler", "llama_cpp", "llama_cpp_lru", "freetoken", "fate")
    assert names == {f"preset {name}" for name in known}
    assert found.best.tpot_ns <= 1.02 * min(c.tpot_ns for c in found.presets())
    assert all(sum(c.settings.slots_per_layer) + staging_slots(c.settings, SHAPE) <= 40 for c in found.presets())
    cold = tune(trace, without_cpu(profile), SHAPE, "float32", slots=40)
    assert {c.name for c in cold.presets()} == {
        f"preset {name}" for name in ("on_demand", "mixtral_offloading", "fate")
    }
