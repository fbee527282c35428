"""Profiles of the graph path, on a played device: its times mean nothing; what is asked for and left behind does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from played import accelerate
from probe_contract import contract
from tiny_models import save_calibration, save_tiny

from foreload.backend.cuda.forward import FastForward
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.experts.transfer import CopySpan
from foreload.backend.made_up import recording
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE, KEPT
from foreload.backend.predict import PREDICTORS
from foreload.profiler import graph_windows, probes
from foreload.profiler.graph_bench import Asked, GraphBench, LayerTimes, StepTimes, demand_at
from foreload.profiler.graph_cpu import asked_for, followed_us
from foreload.profiler.graph_probes import Basis
from foreload.profiler.probes import QUICK, thread_counts
from foreload.profiler.run import bench_settings, profile
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.simulator import split_costs
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel

EFFORT = replace(probes.QUICK, rounds=3, contexts=(1, 32), chunks=(1, 8), sizes=(1 << 14,), seconds=0.02, depth=2)
EAGER_ALONE = {"route", "both", "interrupt", "window_route"}
MAY_LACK = {"draft_model", "to_host", "both_ways", "storage"}
"""Without a draft model or a GPU."""
pytestmark = pytest.mark.filterwarnings("ignore:profile. a fixed block varied")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
    save_calibration(folder / "calibration", folder)
    checkpoint = Checkpoint.open(str(folder))
    settings = bench_settings(checkpoint.shape).changed(eviction="lfu")
    with Engine(checkpoint, EngineOptions(context_tokens=64), settings) as made:
        device = accelerate(made, 3, poison=False)
        yield made
        made.copies.close()
        device.close()
        made.copies = type("Closed", (), {"close": lambda _: None})()


@pytest.fixture(scope="module")
def measured(engine: Engine) -> HardwareProfile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "QUICK", EFFORT)
        return profile(engine, "quick")


@pytest.fixture
def bench(engine: Engine) -> Iterator[GraphBench]:
    made = GraphBench(engine)
    yield made
    made.close()


@pytest.mark.integration
def test_every_probe_of_the_contract_is_there(measured: HardwareProfile) -> None:
    graphs = contract(1)
    held = {**{probe: at for probe, at in contract().items() if probe not in EAGER_ALONE}, **graphs}
    predictors = {f"predict_{name}{form}" for name in PREDICTORS for form in ("", "_rolled")} - {"predict_gate"}
    assert {m.probe for m in measured.measurements} | MAY_LACK == {*held, *predictors} | MAY_LACK
    for m in measured.measurements:
        assert set(m.at) == held.get(m.probe, {"depth"}), m
        assert m.source == "measured"
        assert min(m.p50_us, m.gpu_us) >= 0
        assert m.gpu_p95_us >= m.gpu_us or m.gpu_p95_us == 0
    points = [(m.probe, tuple(sorted(m.at.items()))) for m in measured.measurements]
    assert len(set(points)) == len(points)
    assert measured.meta.path == "graphs"


@pytest.mark.integration
def test_the_engine_is_left_as_it_was(engine: Engine, measured: HardwareProfile) -> None:
    assert engine.settings == bench_settings(engine.shape).changed(eviction="lfu")
    assert not (engine.brain.state.status == KEPT).any()
    assert isinstance(engine.forward, FastForward)
    assert engine.forward.steer is None is engine.forward.replay
    engine.brain.check_integrity()
    assert len(engine.generate([1, 2, 3], 4, stop=False).token_ids) == 4


@pytest.mark.integration
@pytest.mark.parametrize(
    "chosen",
    [
        {"cache_ratio": 0.25},
        {"cache_ratio": 1.0},
        {"cache_ratio": 0.5, "predictor": "gate", "prefetch_depth": 1, "speculate_layers": "all"},
        {"cache_ratio": 0.25, "miss_action": "split", "admission": "background"},
    ],
)
def test_the_simulator_reads_it(engine: Engine, measured: HardwareProfile, chosen: dict) -> None:
    """What any setting needs is there, and what was replayed takes longer."""
    settings, shape = Settings.parse({**chosen, "cpu_threads": thread_counts()[-1]}), engine.shape
    costs = CostModel(measured, shape)
    if settings.needs_costs:
        assert len(split_costs(costs, shape, settings).gpu_ns) == shape.top_k + 1
    slots = (round(chosen["cache_ratio"] * shape.experts),) * shape.n_moe_layers
    live, replayed = (simulate(recording(shape), c, shape, settings, slots) for c in (costs, costs.replaying()))
    assert live.tokens == 16
    assert replayed.total_ns >= live.total_ns > 0
    assert "attention" in live.sources
    assert "route" not in live.sources


@pytest.mark.integration
def test_steps_execute_what_is_asked_for(bench: GraphBench) -> None:
    """The brain hears of the chosen demand and prefetches, in whole steps and in those with decisions."""
    stage, layers, k = bench.stage("fetch", depth=1), bench.shape.n_moe_layers, bench.shape.top_k
    before = bench.engine.brain.counters.copy()
    bench.engine.copies.spans = []
    absent, resident = Asked.of(stage.absent[:k]), Asked.of(stage.resident[:k], stage.absent[-1:])
    step = bench.step([absent, resident, resident])
    counted = (bench.engine.brain.counters - before)[DECODE]
    assert counted[:, Counter.MISSES].tolist() == [k, 0, 0]
    assert counted[:, Counter.HITS].tolist() == [0, k, k]
    assert counted[:, Counter.PREFETCHED].sum() <= 1
    assert len(step.layers[0].copies) == k
    assert all({"route", "plan", "experts_gpu", "finish"} <= times.host.keys() for times in step.layers)
    told = [times.told_ns for times in step.layers]
    assert step.begun_ns < step.launched_ns < told[0] < told[-1] < step.decoded_ns < step.done_ns
    assert 0 < step.turn_us(layers - 1) <= (step.done_ns - step.begun_ns) / 1e3
    bench.engine.copies.spans = None
    whole = bench.step([resident] * layers, slots=bench.anywhere())
    assert all(not times.host for times in whole.layers)
    assert bench.entering_us(layers) > 0


@pytest.mark.integration
def test_where_experts_are_read_in_a_step_of_one_launch(bench: GraphBench) -> None:
    bench.stage("fetch")
    slots, every = bench.anywhere(), bench.engine.brain.slots
    assert slots.shape == (bench.shape.n_moe_layers, bench.shape.experts)
    assert every >= bench.engine.slot_limit or every >= bench.shape.all_experts
    assert set(slots.ravel().tolist()) == set(range(min(every, bench.shape.all_experts)))
    assert all(len(set(row.tolist())) == min(every, bench.shape.experts) for row in slots)


@pytest.mark.integration
def test_steps_of_one_launch_execute_what_is_probed(bench: GraphBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host decides nothing there, so what it is asked for does not count."""
    step, executed = GraphBench.step, list[tuple[list[list[int]], list[list[int]]]]()

    def watched(self: GraphBench, asked: Sequence[Asked], *more: Any) -> StepTimes:
        times = step(self, asked, *more)
        if len(more) > 1:
            rows = len(asked[-1].experts)
            executed.append((asked[-1].experts.tolist(), self.forward._program(rows).pieces.m.ids[:rows].tolist()))
        return times

    monkeypatch.setattr(GraphBench, "step", watched)
    found = list(graph_windows.resident_windows(bench, replace(QUICK, rounds=1), Basis()))
    assert {len(asked) for asked, _ in executed} == set(graph_windows.TOKENS)
    assert all(asked == ran for asked, ran in executed)
    assert {m.at["tokens"] for m in found if m.probe == "window_whole_expert"} == set(graph_windows.TOKENS[1:])


@pytest.mark.unit
def test_places_are_those_of_the_first_ranks() -> None:
    found = demand_at(np.array([[5, 2], [2, 7]]), 4)
    assert found.experts.tolist() == [2, 5, 7]
    assert found.counts.tolist() == [2, 1, 1]
    assert found.places.tolist() == [1, 4, 0, 5]


@pytest.mark.unit
@pytest.mark.parametrize(("layers", "most"), [(2, 8), (48, 8), (3, 2)])
def test_cpu_experts_are_asked_for_in_every_number_and_in_the_largest_without_a_rest(layers: int, most: int) -> None:
    turns = [asked_for(layers, most, turn) for turn in range(4 * most)]
    assert [set(counts) for counts in turns[3::4]] == [{most}] * most
    mixed = [counts for turn, counts in enumerate(turns) if turn % 4 != 3]
    assert {n for counts in mixed for n in counts} == set(range(1, most + 1))


@pytest.mark.unit
def test_copies_beside_the_cpu_are_those_that_followed_each_other() -> None:
    def copy(issued: int, landed: int) -> CopySpan:
        return CopySpan(0, 1, issued, landed)

    busy = LayerTimes(
        {"submit": 1.0, "wait_cpu": 99.0}, planned_ns=1_000, copies=[copy(0, 20_000), copy(5_000, 50_000)]
    )
    late = LayerTimes({"wait_cpu": 10.0}, planned_ns=200_000, copies=[copy(60_000, 90_000), copy(95_000, 150_000)])
    assert followed_us(StepTimes([busy, late], 0, 0, 0, 0)) == [30.0]
