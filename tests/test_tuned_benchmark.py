"""The benchmark of tuned settings on a toy shape: grid, tuning, a slower link, regrets, kept preparations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import beside, tuned_grid, tuned_h200
from benchmarks.decode import workload
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import FileError
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.settings import Settings
from foreload.simulator.candidates import Space

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
SLOW = 10_000_000
SIZES = {"context": 16, "warm": 3, "steps": 6, "tokens": 24, "first": 8}
MakeProfile = Callable[..., HardwareProfile]


@pytest.fixture
def engine() -> Iterator[Engine]:
    model = Checkpoint.random("qwen3-30b-a3b", **SMALL)
    with Engine(model, EngineOptions(context_tokens=400), Settings(cache_ratio=0.0)) as made:
        yield made


def save_profile(make_profile: MakeProfile, engine: Engine, out: Path) -> None:
    """A made-up profile of the engine's shape where the benchmark looks for one."""
    shape, size = engine.shape, engine.expert_bytes
    base = make_profile(shape=asdict(shape), shape_hash=shape.hash, expert_bytes=size)
    copy = Measurement(probe="copy", at={"bytes": size, "pinned": 0}, p50_us=100, p95_us=100, repeats=1)
    kept = (m for m in base.measurements if m.probe != "copy")
    HardwareProfile(meta=base.meta, measurements=(*kept, copy)).save(out / beside.PROFILE)


@pytest.mark.integration
def test_tuned_against_the_grid(
    engine: Engine, make_profile: MakeProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.tuned_grid.cores", lambda: 1)
    save_profile(make_profile, engine, tmp_path)
    routing = {"made up": workload(engine.shape, 80)}
    given = {"ratios": (0.25,), "links": (SLOW,), **SIZES}
    found = tuned_h200.measure(engine, routing, time.monotonic() + 600, tmp_path, **given)
    assert json.loads((tmp_path / tuned_h200.FILE).read_text()) == found
    assert engine.link_bytes_per_s is None
    for one, link in zip(found["regret"], (SLOW,), strict=True):
        rows = [row for row in found["rows"] if row["link_bytes_per_s"] == link]
        names = [name for row in rows for name in row["name"].split(" = ")]
        assert {"tuned", "default", *(f"grid {n}" for n in range(1, 11))} <= set(names)
        assert len(names) == len(set(names))
        assert all(row["refused"] == "" and row["runs"] for row in rows)
        repeats = {row["name"]: len(row["runs"]) for row in rows}
        assert all(count == tuned_h200.MOST for name, count in repeats.items() if "tuned" in name.split(" = "))
        assert sum(repeats.values()) < tuned_h200.MOST * len(repeats)
        assert all(row["simulated"]["tpot_ms"] > 0 for row in rows)
        assert one["grid_settings"] >= 50
        assert one["grid_measured"] == 10
        assert one["simulated_regret_pct"] <= 2.0
        assert one["behind_grid_pct"] is not None
    assert f"| 0.25 at {SLOW / 1e9:g} GB/s |" in tuned_h200.markdown(found)
    work = tuned_h200.workload_of(routing, engine.shape, SIZES["warm"], SIZES["steps"])
    inputs = tuned_grid.Inputs.of(HardwareProfile.load(tmp_path / beside.PROFILE), work, SIZES["tokens"])
    later = {"rows": [{k: v for k, v in row.items() if k != "simulated"} for row in found["rows"]]}
    tuned_h200.simulate_measured(later, inputs, work)
    assert [row["simulated"] for row in later["rows"]] == [row["simulated"] for row in found["rows"]]
    begun = found["prepared"]["seconds"]
    again = tuned_h200.measure(engine, routing, time.monotonic() + 600, tmp_path, **given)
    assert again["prepared"]["seconds"] == begun  # the same profile and tokens: what was simulated is kept


@pytest.mark.integration
def test_there_is_a_deadline_and_a_profile(engine: Engine, make_profile: MakeProfile, tmp_path: Path) -> None:
    routing = {"made up": workload(engine.shape, 80)}
    with pytest.raises(FileError, match="is needed to tune by"):
        tuned_h200.on_engine(engine, routing, time.monotonic() + 1, tmp_path)
    save_profile(make_profile, engine, tmp_path)
    inputs = tuned_grid.Inputs.of(
        HardwareProfile.load(tmp_path / beside.PROFILE), tuned_h200.workload_of(routing, engine.shape, 3, 6), 16
    )
    held = {"key": inputs.key, "seconds": 0.0, "workers": 1, "left_out": [], "budgets": {}}
    (tmp_path / tuned_h200.PREPARED).write_text(json.dumps(held))
    assert tuned_h200.prepared_in(tmp_path, inputs, [], 1.0, 4) == held
    (tmp_path / tuned_h200.PREPARED).write_text(json.dumps({**held, "key": "another profile"}))
    assert tuned_h200.prepared_in(tmp_path, inputs, [], 1.0, 4)["key"] == inputs.key


@pytest.mark.unit
def test_the_grid_is_large_on_a_large_model(engine: Engine, make_profile: MakeProfile, tmp_path: Path) -> None:
    save_profile(make_profile, engine, tmp_path)
    work = tuned_h200.workload_of({"made up": workload(engine.shape, 80)}, engine.shape, 3, 6)
    inputs = tuned_grid.Inputs.of(HardwareProfile.load(tmp_path / beside.PROFILE), work, 16)
    budget = tuned_grid.Budget(None, 0.5)
    costs = inputs.costs(budget)
    space = Space.of([inputs.trace], costs, Settings(), inputs.slots(budget), warm=True)
    every = tuned_grid.grid(space)
    assert len(every) == len(set(every))
    assert all(space.fits(settings) for settings in every)
    aheads = {(settings.prefetch_depth, settings.prefetch_width) for settings in every}
    kinds = {(settings.miss_action, settings.admission) for settings in every}
    assert len(aheads) >= 3
    assert len(kinds) == 8
    assert len({settings.eviction for settings in every}) == 5


@pytest.mark.unit
def test_regret_is_of_rounds_that_both_were_in() -> None:
    """A host that slows down makes what ran longest look slow, and single turns are lucky."""

    def row(name: str, **ms: float) -> dict[str, Any]:
        return {"name": name, "runs": [{"round": int(at[1:]), "tpot_ms": value} for at, value in ms.items()]}

    tuned = row("tuned = grid 4", r0=10.0, r1=12.0, r2=14.0, r3=16.0)
    rows = [tuned, row("grid 1", r0=10.1, r1=12.1, r2=14.1), row("grid 2", r1=9.0), row("preset on_demand", r1=24.0)]
    assert tuned_h200._behind(rows, "grid ") == pytest.approx(0.0)  # it is one of them
    assert tuned_h200._behind([{**tuned, "name": "tuned"}, *rows[1:]], "grid ") == pytest.approx(-0.826, abs=0.001)
    assert tuned_h200._behind(rows, "preset ") == pytest.approx(-50.0)
    assert tuned_h200._behind(rows[:1], "preset ") is None


@pytest.mark.unit
def test_slow_settings_are_measured_over_fewer_steps() -> None:
    sizes = {"tuned": 2.0, "default": 2.9, "preset on_demand": 3.1, "preset fate": 8.1}
    named = {name: [{"prefetch_width": at + 1}, ms] for at, (name, ms) in enumerate(sizes.items())}
    of = {"cache_ratio": 0.25, "named": named, "grid": [[{"prefetch_width": 1}, 2.0], [{"prefetch_width": 9}, 2.5]]}
    quick, slow = tuned_h200.cells(of, "made up", 64)
    assert [(cell.name, cell.steps) for cell in quick] == [
        ("tuned = grid 1", None),
        ("grid 2", None),
        ("default", None),
    ]
    assert [(cell.name, cell.steps) for cell in slow] == [
        ("preset on_demand", None),
        ("preset fate", tuned_h200.FEW_STEPS),
    ]
