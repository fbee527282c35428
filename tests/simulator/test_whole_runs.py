"""Whole simulated runs with prompts, verify windows and graphs: every nanosecond has a cause and a place on a track."""

from __future__ import annotations

from itertools import pairwise

import pytest
from sim_inputs import make_graph_profile, make_profile, make_shape, make_trace, make_windows

from foreload.backend.policy import Counter
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.simulator.costs import CostModel
from foreload.simulator.engine_model import simulate
from foreload.simulator.perfect import perfect, truthful, with_the_truth
from foreload.simulator.result import SimResult
from foreload.traces.timings import KINDS, TRACKS, check_spans, spans_of

pytestmark = pytest.mark.integration
SHAPE, GAMMA = make_shape(layers=4, experts=12, top_k=3), 3
MACHINES: dict[str, HardwareProfile] = {
    "cpu": make_profile(SHAPE),
    "cuda": make_profile(SHAPE, "cuda", gpu_us=9.0),
    "graphs": make_graph_profile(SHAPE),
}
AHEAD = {"predictor": "gate", "prefetch_depth": 2}
SCENARIOS = {
    "fetch": {},
    "ahead": AHEAD,
    "split": {"miss_action": "split", "admission": "background", "cpu_threads": 2},
    "windows": {"draft": {"kind": "ngram", "gamma": GAMMA}},
    "windows on the CPU": {"draft": {"kind": "ngram", "gamma": GAMMA}, "miss_action": "cpu", **AHEAD},
}
PINNED = {
    "windows, cpu": (28755400, 7775000),
    "windows on the CPU, cpu": (21593471, 7678000),
    "windows, cuda": (26997800, 7775000),
    "windows on the CPU, cuda": (21304129, 7678000),
    "fetch, graphs": (23113200, 6554000),
    "ahead, graphs": (21317860, 6554000),
    "split, graphs": (14512785, 6654000),
    "windows, graphs": (27559190, 7686500),
    "windows on the CPU, graphs": (20896371, 7589500),
}


def run(name: str, machine: str, timeline: bool = False) -> SimResult:
    settings = Settings.parse(SCENARIOS[name])
    windows = settings.draft.kind != "none"
    trace = (
        make_windows(SHAPE, GAMMA, seed=2) if windows else make_trace(SHAPE, requests=2, prompt=9, tokens=12, seed=2)
    )
    return simulate(trace, MACHINES[machine], SHAPE, settings, (3, 4, 0, 12), timeline=timeline)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_nanosecond_has_a_cause_and_a_place(name: str, machine: str) -> None:
    """Decode and prefill times add up by kind; spans do not overlap; their names are those of measured timelines."""
    found = run(name, machine, timeline=True)
    assert sum(found.time_ns.values()) == found.total_ns
    assert sum(found.prefill_time_ns.values()) == int(found.ttft_ns.sum()) > 0
    assert sum(found.stall_ns.values()) <= found.total_ns
    spans = spans_of(found.timeline)
    check_spans(spans)
    assert {span.track for span in spans} <= set(TRACKS)
    assert {span.kind for span in spans} <= set(KINDS)
    for track in TRACKS:
        placed = sorted((e.start_ns, e.start_ns + e.duration_ns) for e in found.timeline if e.stream == track)
        assert all(a[1] <= b[0] for a, b in pairwise(placed)), track
    host = sum(e.duration_ns for e in found.timeline if e.stream == "host")
    assert host == found.total_ns + int(found.ttft_ns.sum())
    assert max(e.step for e in found.timeline) == found.steps - 1


@pytest.mark.parametrize("machine", MACHINES)
def test_what_becomes_of_prefetches_is_counted(machine: str) -> None:
    """Some are late, some cancelled while they wait, some carried in vain; on a slow link more than on a fast one."""
    settings = Settings.parse({**AHEAD, "prefetch_width": 6})
    trace = make_trace(SHAPE, requests=1, prompt=0, tokens=40, seed=3, width=6, recall=0.4)
    made = make_graph_profile if machine == "graphs" else make_profile
    device = {} if machine == "graphs" else {"device": machine}
    slow, fast = (simulate(trace, made(SHAPE, copy_us=us, **device), SHAPE, settings, (3,) * 4) for us in (200, 2))
    for counter in (Counter.LATE, Counter.CANCELLED, Counter.WASTED):
        assert slow.count(counter) > 0, counter
    assert fast.count(Counter.LATE) < slow.count(Counter.LATE)
    assert fast.count(Counter.CANCELLED) < slow.count(Counter.CANCELLED)


@pytest.mark.parametrize("machine", MACHINES)
def test_true_predictions(machine: str) -> None:
    """Nothing is carried in vain but what the window had no time for, and on a fast link nothing is missed."""
    made = make_graph_profile if machine == "graphs" else make_profile
    device = {} if machine == "graphs" else {"device": machine}
    costs = CostModel(made(SHAPE, copy_us=1, **device), SHAPE)
    trace = make_trace(SHAPE, requests=1, prompt=0, tokens=20, recall=0.3)
    found = perfect(trace, costs, Settings(), (0,) * 4)
    assert found.settings == truthful(Settings())
    assert found.count(Counter.WASTED) == 0
    first = found.counters[0, 0]
    assert first[Counter.MISSES] == 20 * SHAPE.top_k
    assert found.count(Counter.MISSES) == int(first[Counter.MISSES])


def test_the_truth_is_what_was_executed() -> None:
    trace = make_trace(SHAPE, requests=1)
    told = with_the_truth(trace, Settings.parse(AHEAD))
    assert (told.predictions["gate", 2][:, 2:, :3] == trace.experts[:, 2:]).all()
    assert (told.predictions["gate", 2][:, :2] == -1).all()
    assert truthful(Settings.parse({**AHEAD, "speculate_layers": "all"})).speculate_layers == ()


@pytest.mark.parametrize("key", sorted(PINNED))
def test_pinned_totals(key: str) -> None:
    """Same recording, profile and settings: the same nanoseconds of decode and of prompts, always."""
    name, machine = key.split(", ")
    found = run(name, machine)
    assert (found.total_ns, int(found.ttft_ns.sum())) == PINNED[key]
