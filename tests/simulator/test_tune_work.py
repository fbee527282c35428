"""Who does the work of a tune changes nothing, what is finished is kept; several recordings; around the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sim_inputs import in_formats, make_graph_profile, make_profile, make_shape, make_trace

from foreload.errors import BudgetError, FileError, MismatchError, UsageError
from foreload.formats import PackedFormat
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.candidates import Change, Space
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel
from foreload.simulator.tune import TuneResult, prepare, split_requests, tune
from foreload.simulator.tuner import search as searching
from foreload.simulator.tuner.forecast import forecast
from foreload.simulator.tuner.journal import Journal
from foreload.simulator.tuner.moves import neighbours
from foreload.traces.schema import Trace

pytestmark = pytest.mark.integration
SHAPE = make_shape(layers=2, experts=6, top_k=2)
SLOTS = 9


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(SHAPE, requests=4, prompt=3, tokens=8, seed=3, depths=1)


@pytest.fixture(scope="module")
def profile() -> HardwareProfile:
    """Of a machine that runs CPU experts on two threads alone."""
    whole = make_profile(SHAPE)
    kept = tuple(m for m in whole.measurements if m.at.get("threads", 2) == 2)
    return HardwareProfile(meta=whole.meta, measurements=kept)


@pytest.fixture(scope="module")
def alone(trace: Trace, profile: HardwareProfile) -> TuneResult:
    return tune(trace, profile, SHAPE, "float32", slots=SLOTS)


def shown(result: TuneResult) -> str:
    return json.dumps(result.as_dict())


# Who does the work


def test_processes_change_nothing(trace: Trace, profile: HardwareProfile, alone: TuneResult) -> None:
    found = tune(trace, profile, SHAPE, "float32", slots=SLOTS, jobs=2)
    assert shown(found) == shown(alone)


def test_tuned_for_an_engine_that_replays() -> None:
    """Benchmarks replay recordings, which takes graphs some time; a user's own model routes by itself."""
    shape, graphs = SHAPE, make_graph_profile(SHAPE)
    recording = make_trace(shape, requests=2, prompt=3, tokens=6, seed=3, depths=0)
    live, replayed = (tune(recording, graphs, shape, "float32", slots=SLOTS, replayed=on) for on in (False, True))
    for found, costs in ((live, CostModel(graphs, shape)), (replayed, CostModel(graphs, shape).replaying())):
        one = found.default
        simulated = simulate(recording, costs, shape, one.settings, one.settings.slots_per_layer or (), found.select)
        assert one.tpot_ns == simulated.tpot_ns
    assert replayed.default.tpot_ns > live.default.tpot_ns


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two workers of a Dask cluster on this machine."""
    distributed = pytest.importorskip("distributed")
    # Workers run the main module again, which tests of the dashboard leave as a script of theirs.
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    made = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=None
    )
    yield made
    made.close()


@pytest.mark.filterwarnings("ignore")
def test_a_dask_cluster_changes_nothing(
    cluster: Any, trace: Trace, profile: HardwareProfile, alone: TuneResult
) -> None:
    address = cluster.scheduler_address
    found = tune(trace, profile, SHAPE, "float32", slots=SLOTS, backend="dask", address=address)
    assert shown(found) == shown(alone)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"backend": "dask"}, "--backend dask and --address go together"),
        ({"address": "tcp://127.0.0.1:1"}, "--backend dask and --address go together"),
        ({"backend": "dask", "address": "tcp://127.0.0.1:1", "jobs": 2}, "a Dask cluster uses all of its workers"),
        ({"backend": "dask", "address": "nowhere"}, "--address nowhere: no Dask scheduler answers there"),
        ({"jobs": 0}, "--jobs 0: 1 or more is needed"),
    ],
)
def test_workers_that_cannot_be(trace: Trace, profile: HardwareProfile, asked: Any, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        tune(trace, profile, SHAPE, "float32", slots=SLOTS, **asked)


# What is finished is kept


class KilledError(Exception):
    """What a killed tune is here."""


def kill_at(steps: int) -> Callable[[int, int, str], None]:
    left = iter(range(steps))

    def progress(done: int, total: int, what: str) -> None:
        if next(left, None) is None:
            raise KilledError

    return progress


def test_a_killed_tune_goes_on(trace: Trace, profile: HardwareProfile, alone: TuneResult, tmp_path: Path) -> None:
    path, asked = tmp_path / "state" / "tune.jsonl", {"slots": SLOTS}
    with pytest.raises(KilledError):
        tune(trace, profile, SHAPE, "float32", resume=path, progress=kill_at(40), **asked)
    kept = len(path.read_text().splitlines())
    assert kept > 20
    with path.open("a") as file:
        file.write('{"key": "cut o')  # a line that was being written
    with prepare(trace, profile, SHAPE, "float32", resume=path, **asked) as tuning:
        assert shown(tuning.run()) == shown(alone)
        assert tuning.pool.reused == kept
    with prepare(trace, profile, SHAPE, "float32", resume=path, **asked) as tuning:
        assert shown(tuning.run()) == shown(alone)
        assert tuning.pool.reused == len(path.read_text().splitlines())
    other = tune(trace, make_profile(SHAPE, copy_us=30.0), SHAPE, "float32", resume=path, **asked)
    assert shown(other) != shown(alone)  # nothing of another machine was used


def test_corrupt_state_is_refused(trace: Trace, profile: HardwareProfile, tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    with pytest.raises(KilledError):
        tune(trace, profile, SHAPE, "float32", slots=SLOTS, resume=path, progress=kill_at(12))
    good = path.read_text().splitlines(keepends=True)
    for number, line in enumerate((good[0].replace("planned_ns", "planed_ns"), "{}\n", "junk\n"), 1):
        path.write_text("".join([*good[:number], line, *good[number:]]))
        before = path.read_bytes()
        with pytest.raises(FileError, match=rf"tune.jsonl: line {number + 1} is no tuning state"):
            Journal(path)
        assert path.read_bytes() == before
    path.write_text("notes that have nothing to do with it")
    with pytest.raises(FileError, match="holds no tuning state"):
        Journal(path)
    assert path.read_text().startswith("notes")
    with pytest.raises(FileError, match="cannot be"):
        Journal(tmp_path)


# Longer recordings are compared on a part first


def test_a_part_shortens_the_list_and_loses_nothing(
    trace: Trace, profile: HardwareProfile, alone: TuneResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer = make_trace(SHAPE, requests=4, prompt=3, tokens=40, seed=5, depths=1)
    whole = tune(longer, profile, SHAPE, "float32", slots=SLOTS)
    monkeypatch.setattr(searching, "SCREEN_STEPS", 10)
    monkeypatch.setattr(searching, "PLAN_STEPS", 16)
    part = tune(longer, profile, SHAPE, "float32", slots=SLOTS)
    assert len(part.candidates) < len(whole.candidates)
    assert part.passed_over
    assert part.best.tpot_ns <= 1.01 * whole.best.tpot_ns
    assert {c.name for c in part.presets()} == {c.name for c in whole.presets()}
    assert part.default.tpot_ns == whole.default.tpot_ns


# Several recordings, and parts of one


def test_several_recordings_by_their_mean_or_the_slowest(trace: Trace, profile: HardwareProfile) -> None:
    other = make_trace(SHAPE, requests=4, prompt=3, tokens=8, seed=9, depths=1, repeat=0.9)
    both = [trace, other]
    mean = tune(both, profile, SHAPE, "float32", slots=SLOTS)
    worst = tune(both, profile, SHAPE, "float32", slots=SLOTS, robust="worst")
    assert (mean.recordings, mean.robust, worst.robust) == (2, "mean", "worst")
    for candidate in mean.candidates:
        assert candidate.tpot_ns == pytest.approx(sum(candidate.tpots_ns) / 2)  # as many tokens in both
    for candidate in worst.candidates:
        assert candidate.tpot_ns == max(candidate.tpots_ns)
    assert max(worst.best.tpots_ns) <= max(mean.best.tpots_ns)
    assert mean.best.tpot_ns <= sum(worst.best.tpots_ns) / 2 + 1e-6
    bigger = make_trace(make_shape(layers=3, experts=6, top_k=2), depths=1)
    with pytest.raises(MismatchError, match="trace: recorded from model shape"):
        tune([trace, bigger], profile, SHAPE, "float32", slots=SLOTS)


def test_a_seed_draws_the_parts(trace: Trace, profile: HardwareProfile) -> None:
    parts = {split_requests(range(8), seed) for seed in range(5)}
    assert len(parts) > 3
    assert all(sorted(sum(part, ())) == list(range(8)) for part in parts)
    assert split_requests(range(8), 1) == split_requests(range(8), 1)
    found = tune(trace, profile, SHAPE, "float32", slots=SLOTS, seed=1)
    assert (found.fit, found.select, found.held_out) == split_requests(range(4), 1)


# Formats


def with_formats(profile: HardwareProfile) -> HardwareProfile:
    """The profile with experts measured in fp8, which take half the time on the device and on the CPU."""
    return in_formats(profile, ("fp32", 16.0, 24.0), ("bf16", 14.4, 21.6), ("fp8", 8.0, 12.0))


def test_a_format_competes_within_its_loss(trace: Trace, profile: HardwareProfile, alone: TuneResult) -> None:
    both = with_formats(profile)
    asked: dict[str, Any] = {"slots": SLOTS, "format_loss_pct": {"fp8": 0.4, "int8": 0.1}}
    loose = tune(trace, both, SHAPE, "float32", max_quality_loss_pct=0.5, **asked)
    formats = {c.settings.expert_format for c in loose.candidates}
    assert formats == {None, "fp8"}  # int8 was not measured
    assert loose.best.settings.expert_format == "fp8"
    assert loose.changes_text
    assert loose.quality_loss_pct == 0.4
    assert sum(loose.best.settings.slots_per_layer) > SLOTS - 2  # its experts are smaller
    assert [loss for loss, _ in loose.quality_front()] == [0.0, 0.4]
    tight = tune(trace, both, SHAPE, "float32", max_quality_loss_pct=0.3, **asked)
    assert {c.settings.expert_format for c in tight.candidates} == {None}
    assert not tight.changes_text
    with pytest.raises(UsageError, match="go together: give both or none"):
        tune(trace, both, SHAPE, "float32", **asked)


def test_the_same_numbers_in_fewer_bytes_compete_where_experts_may_be_packed_anew() -> None:
    """bf12 holds what bf16 holds; of rows this long it takes four fifths of the bytes."""
    shape = make_shape(layers=2, experts=6, top_k=2, hidden=512, width=512)
    trace = make_trace(shape, requests=4, prompt=3, tokens=8, seed=3, depths=1)
    measured = in_formats(make_profile(shape), ("fp32", 16.0, 24.0), ("bf16", 14.4, 21.6), ("bf12", 14.4, 16.2))
    asked: dict[str, Any] = {"slots": SLOTS, "base": Settings(expert_format="bf16")}
    kept = tune(trace, measured, shape, "float32", **asked)
    assert {c.settings.expert_format for c in kept.candidates} == {"bf16"}
    found = tune(trace, measured, shape, "float32", repack=True, **asked)
    assert {c.settings.expert_format for c in found.candidates} == {"bf16", "bf12"}
    assert found.best.settings.expert_format == "bf12"
    assert found.best.tpot_ns < kept.best.tpot_ns
    assert sum(found.best.settings.slots_per_layer) > sum(kept.best.settings.slots_per_layer)
    assert not found.changes_text
    assert found.quality_loss_pct == 0.0
    with prepare(trace, measured, shape, "float32", repack=True, **asked) as tuning:
        changed = dict(neighbours(tuning.space, kept.best.settings))
        back = dict(neighbours(tuning.space, found.best.settings))
    assert changed["expert_format bf12"].expert_format == "bf12"
    assert back["expert_format bf16"].expert_format == "bf16"


@pytest.mark.parametrize(
    ("shape", "formats", "base"),
    [
        (make_shape(hidden=512, width=512), ("fp32", "bf16", "bf12"), Settings()),  # no format holds fp32's in fewer
        (make_shape(hidden=512, width=512), ("fp32", "bf16"), Settings(expert_format="bf16")),  # not measured
        (make_shape(hidden=32, width=32), ("fp32", "bf16", "bf12"), Settings(expert_format="bf16")),  # larger
    ],
)
def test_nothing_is_packed_anew_without_a_format_that_is_smaller(
    shape: ModelShape, formats: tuple[PackedFormat, ...], base: Settings
) -> None:
    measured = in_formats(make_profile(shape), *((name, 10.0, 10.0) for name in formats))
    trace = make_trace(shape, requests=1, prompt=2, tokens=3)
    with prepare(trace, measured, shape, "float32", slots=12, base=base, repack=True) as tuning:
        assert tuning.space.smaller is None


def test_host_memory_holds_the_experts(trace: Trace, profile: HardwareProfile) -> None:
    both = with_formats(profile)
    costs, packed = CostModel(both, SHAPE), Settings(expert_format="fp8")
    whole, small = (model.expert_bytes * 12 for model in (costs, costs.for_settings(packed)))
    with pytest.raises(BudgetError, match=r"cannot hold the experts, .* in fp32") as refused:
        tune(trace, both, SHAPE, "float32", slots=SLOTS, ram_bytes=whole - 5)
    assert (refused.value.budget, refused.value.shortfall_bytes) == ("ram", 5)
    asked: dict[str, Any] = {"slots": SLOTS, "format_loss_pct": {"bf16": 0.1}, "max_quality_loss_pct": 1.0}
    for ram_bytes, competing in ((small, []), (whole, ["bf16"])):
        with prepare(trace, both, SHAPE, "float32", ram_bytes=ram_bytes, base=packed, **asked) as found:
            assert [change.expert_format for change in found.space.changes] == competing


def test_memory_is_counted_in_the_formats_size(trace: Trace, profile: HardwareProfile) -> None:
    costs = CostModel(with_formats(profile), SHAPE)
    space = Space.of([trace], costs, Settings(), SLOTS, [Change("none", (), "fp8", 0.4)])
    small = costs.for_settings(Settings(expert_format="fp8")).expert_bytes
    assert space.budget(Settings()) == SLOTS
    assert space.budget(Settings(expert_format="fp8")) == SLOTS * costs.expert_bytes // small > 2 * SLOTS
    start = space.uniform()
    assert start is not None
    changed = dict(neighbours(space, start))
    assert changed["expert_format fp8"].expert_format == "fp8"
    assert all(space.fits(settings) for settings in changed.values())


def test_workers_read_ahead_where_the_profile_knows_them() -> None:
    trace, chosen = make_trace(SHAPE, depths=1), {"miss_action": "cpu", "predictor": "gate", "prefetch_depth": 1}
    for made, known in ((make_graph_profile(SHAPE), True), (make_profile(SHAPE), False)):
        space = Space.of([trace], CostModel(made, SHAPE), Settings(), SLOTS)
        start = space.uniform(**chosen, cpu_threads=2, prefetch_width=1)
        assert start is not None
        changed = dict(neighbours(space, start))
        assert ("cpu_read_ahead on" in changed) == ("cpu_read_ahead on, width 2" in changed) == known
        if known:
            reading = changed["cpu_read_ahead on, width 2"]
            assert (reading.cpu_read_ahead, reading.prefetch_width) == (True, 2)
            back = dict(neighbours(space, reading))
            assert not back["cpu_read_ahead off"].cpu_read_ahead
            assert not any(other.cpu_read_ahead for other in back.values() if other.miss_action == "fetch")


# Around the answer


def test_what_lies_around_the_answer(trace: Trace, profile: HardwareProfile, alone: TuneResult) -> None:
    with prepare(trace, profile, SHAPE, "float32", slots=SLOTS) as tuning:
        found = tuning.run(around=True)
    assert found.best.settings == alone.best.settings
    assert found.study is not None
    around = found.study
    assert [single.loss for single in around.singles] == sorted((s.loss for s in around.singles), reverse=True)
    assert all(
        single.loss >= 0 and single.whole for single in around.singles
    )  # the search changed it until none helped
    assert any("eviction" in single.change for single in around.singles)
    sizes, times = [p.slot_bytes for p in around.front], [p.tpot_ns for p in around.front]
    assert sizes == sorted(sizes)
    assert times == sorted(times, reverse=True)
    assert len(around.front) >= 2
    as_is, *others = around.what_if
    assert as_is.name == "as it is"
    assert as_is.tpot_ns <= as_is.same_ns
    assert {p.name for p in others} == {
        "10 % more memory for slots", "a link twice as fast", "CPU experts twice as fast",
    }  # fmt: skip
    assert min(p.tpot_ns for p in others) < as_is.tpot_ns
    json.dumps(found.as_dict(), allow_nan=False)


def test_what_is_proven(alone: TuneResult) -> None:
    plan = alone.plan
    assert plan is not None
    assert plan.outcome == "proven"
    assert plan.relaxed_ns <= plan.bound_ns + 1e-6 <= plan.planned_ns + 2e-6
    assert plan.gap == pytest.approx(0, abs=1e-9)
    assert alone.as_dict()["program"]["relaxed_ms"] == plan.relaxed_ns / 1e6


def test_a_dry_run_says_what_would_be_done(trace: Trace, profile: HardwareProfile, alone: TuneResult) -> None:
    done: list[tuple[int, int, str]] = []
    with prepare(trace, profile, SHAPE, "float32", slots=SLOTS, progress=lambda *step: done.append(step)) as tuning:
        said = forecast(tuning)
    assert done == []
    assert said.candidates[0] == "default"
    assert {c.name for c in alone.presets()} <= set(said.candidates)
    assert said.simulations >= len(alone.candidates)
    assert said.options > 0 < said.replays
    assert said.seconds > 0
