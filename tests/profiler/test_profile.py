"""What `profile` measures: every probe of the contract, in figures that can be, leaving the engine as it was."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from probe_contract import contract
from tiny_models import save_tiny, vram_for

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.predict import PREDICTORS
from foreload.errors import BudgetError, UsageError
from foreload.profiler import probes, run
from foreload.profiler.bench import Bench
from foreload.profiler.probes import thread_counts
from foreload.profiler.run import bench_settings, profile
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.profiler.stats import host_samples, summarise
from foreload.settings import Settings
from foreload.simulator.costs import CostModel

RATE = 10**8
pytestmark = pytest.mark.filterwarnings("ignore:profile. a fixed block varied")
MAY_BE_ZERO = ("wait", "interrupt")


def at(profile: HardwareProfile, probe: str, **fixed: int) -> Measurement:
    [only] = profile.points(probe, **fixed)
    return only


@pytest.mark.unit
def test_the_contract_is_read() -> None:
    found = contract()
    assert len(found) >= 17
    assert found["copy"] == {"bytes", "pinned"}
    assert found["experts_cpu_beside_copy"] == {"experts", "threads"}
    assert found["route"] == set()


@pytest.mark.integration
def test_every_probe_of_the_contract_is_there(profiled: Any) -> None:
    measured = profiled.profile
    others = {m.probe for m in measured.measurements if m.probe.startswith("predict_")}
    without = {"to_host", "both_ways"} | (set() if measured.meta.draft_model else {"draft_model"})
    found = {m.probe for m in measured.measurements} - others
    assert found | {"storage"} == set(contract()) - without  # no storage where the model's file stays in memory
    forms = {f"predict_{name}{form}" for name in PREDICTORS for form in ("", "_rolled")}
    assert others == (forms - {"predict_gate"} if profiled.calibrated else set())
    for m in measured.measurements:
        assert set(m.at) == ({"depth"} if m.probe in others else contract()[m.probe]), m.probe
        assert m.source == "measured"
    points = [(m.probe, tuple(sorted(m.at.items()))) for m in measured.measurements]
    assert len(set(points)) == len(points)


@pytest.mark.integration
def test_figures_are_finite_and_positive(profiled: Any) -> None:
    for m in profiled.profile.measurements:
        assert math.isfinite(m.p50_us)
        assert m.p95_us >= m.p50_us >= 0
        assert m.p50_us > 0 or m.probe in MAY_BE_ZERO, m
        assert m.gpu_us == 0


@pytest.mark.integration
def test_grids_cover_what_the_model_does(profiled: Any) -> None:
    measured, shape = profiled.profile, profiled.shape
    experts = list(range(1, shape.top_k + 1))
    assert [m.at["experts"] for m in measured.points("experts_gpu")] == experts
    for threads in thread_counts():
        for probe in ("experts_cpu", "experts_cpu_beside_copy"):
            assert [m.at["experts"] for m in measured.points(probe, threads=threads)] == experts
        shares = {(m.at["gpu"], m.at["cpu"]) for m in measured.points("both", threads=threads)}
        assert shares == {(g, c) for c in experts for g in experts if g + c <= shape.top_k}
    depths = list(range(1, min(4, shape.n_moe_layers - 1) + 1))
    assert [m.at["depth"] for m in measured.points("predict")] == depths
    if profiled.calibrated:
        assert [m.at["depth"] for m in measured.points("predict_hybrid")] == depths
        assert [m.at["depth"] for m in measured.points("predict_gate_rolled")] == depths[1:]
    assert [m.at["context"] for m in measured.points("attention")] == [1, 32]


@pytest.mark.integration
def test_copies_are_no_faster_than_the_emulated_link(profiled: Any) -> None:
    """A single copy never is. Of back-to-back copies only arrivals are seen, whose gaps waver with the scheduler."""
    measured, size = profiled.profile, profiled.profile.meta.expert_bytes
    for m in measured.points("copy"):
        if m.at["bytes"] != size:
            assert m.p50_us >= m.at["bytes"] * 1e6 / RATE
    assert at(measured, "copy", bytes=size).at["pinned"] == 0
    assert measured.meta.emulated_link_bytes_per_s == RATE


@pytest.mark.integration
def test_the_engine_is_left_as_it_was(profiled: Any) -> None:
    assert profiled.after == profiled.before
    assert profiled.capacity == profiled.before.slots_per_layer
    assert profiled.residents == 0
    assert profiled.text[0] == profiled.text[1]


@pytest.mark.integration
def test_progress_names_each_group_and_ends(profiled: Any) -> None:
    calls = profiled.progress
    total = calls[0][2]
    assert [(done, of) for _, done, of in calls] == [(n, total) for n in range(total + 1)]
    assert calls[-1][0] == "done"
    assert len({name for name, _, _ in calls}) == total + 1


@pytest.mark.integration
def test_the_profile_says_what_it_is_of(profiled: Any) -> None:
    meta, shape = profiled.profile.meta, profiled.shape
    assert (meta.device, meta.dtype, meta.mode) == ("cpu", "float32", "quick")
    assert (meta.shape_hash, meta.expert_bytes) == (shape.hash, shape.expert_bytes("float32"))
    assert {"python", "torch", "foreload"} <= meta.software.keys()
    assert meta.cores >= 1
    assert meta.machine
    profiled.profile.check_model(shape, "float32")


@pytest.mark.integration
def test_the_cost_model_reads_it(profiled: Any) -> None:
    """What the simulator asks for is there, for every miss action and depth."""
    from foreload.simulator import split_costs

    costs = CostModel(profiled.profile, profiled.shape)
    split = split_costs(costs, profiled.shape, Settings(miss_action="split"))
    assert split.io_ns >= 0.5 * profiled.profile.meta.expert_bytes * 10**9 / RATE
    assert len(split.gpu_ns) == len(split.cpu_ns) == profiled.shape.top_k + 1
    assert split.cpu_ns[0] == 0 < split.cpu_ns[1]


# Refusals, on the tiny model


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.integration
def test_too_few_experts(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "dense", num_experts_per_tok=5)
    options = EngineOptions(context_tokens=16)
    with (
        Engine(Checkpoint.open(str(folder)), options, Settings(cache_ratio=0.5)) as engine,
        pytest.raises(UsageError, match="at least 10 experts per layer is needed"),
    ):
        profile(engine)


@pytest.mark.integration
def test_too_little_memory_changes_nothing(tiny_folder: Path) -> None:
    checkpoint = Checkpoint.open(str(tiny_folder))
    settings = Settings(slots_per_layer=(1, 0, 0))
    options = EngineOptions(context_tokens=16, vram_bytes=vram_for(checkpoint.shape, 1, context=16))
    with Engine(checkpoint, options, settings) as engine:
        with pytest.raises(BudgetError):
            profile(engine)
        assert engine.settings == settings
        assert len(engine.generate([1, 2], 3, stop=False).token_ids) == 3


@pytest.mark.integration
def test_an_unsteady_machine_is_said(tiny_folder: Path) -> None:
    checkpoint = Checkpoint.open(str(tiny_folder))
    with Engine(checkpoint, EngineOptions(context_tokens=16), bench_settings(checkpoint.shape)) as engine:
        with pytest.warns(UserWarning, match="a fixed block varied by 30 % during the run"):
            assert run._meta(engine, "quick", [10.0, 13.0, 11.0]).noise_pct == 30.0
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run._meta(engine, "full", [10.0, 12.0]).noise_pct == 20.0


@pytest.mark.unit
def test_summaries() -> None:
    found = summarise("copy", [4.0, 1.0, 2.0, 3.0, 100.0], 0.5, bytes=7, pinned=0)
    assert (found.p50_us, found.repeats, found.gpu_us, found.at) == (3.0, 5, 0.5, {"bytes": 7, "pinned": 0})
    assert found.p95_us == pytest.approx(80.8)


@pytest.mark.unit
def test_host_samples_follow_warm_ups() -> None:
    calls: list[int] = []
    samples = host_samples(calls.append, 4, torch.device("cpu"))
    assert calls == [0, 0, 0, 0, 1, 2, 3]
    assert len(samples) == 4


@pytest.mark.integration
def test_time_that_is_left_goes_to_what_other_load_disturbs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a time there is none left; each time counts as much as any other."""
    once = summarise("experts_cpu", [5.0], experts=1, threads=1)
    times, told = list[float](), list[str]()

    def again() -> Iterator[Measurement]:
        times.append(time.monotonic())
        yield summarise("experts_cpu", [7.0], experts=1, threads=1)

    def others() -> Iterator[Measurement]:
        yield summarise("experts_cpu", [9.0], experts=1, threads=2)

    def groups(engine: Engine, effort: probes.Effort, found: list[Measurement]) -> tuple[Bench, run.Groups, run.Groups]:
        return Bench(engine), (("once", lambda: iter([once])),), (("again", again), ("others", others))

    monkeypatch.setattr(run, "_eager", groups)
    folder = save_tiny(tmp_path / "tiny")
    checkpoint = Checkpoint.open(str(folder))
    with Engine(checkpoint, EngineOptions(context_tokens=64), bench_settings(checkpoint.shape)) as engine:
        assert profile(engine).measurements == (once,)
        assert times == []
        until = time.monotonic() + 0.5
        found = profile(engine, "quick", lambda name, done, total: told.append(name), until).measurements
    assert found[0].repeats == 1 + len(times)
    assert len(times) - 1 <= found[1].repeats <= len(times)
    assert times
    assert max(times) < until
    assert told[:3] + told[-1:] == ["once", "again", "others", "done"]
