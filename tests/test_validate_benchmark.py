"""The validation of full-size shapes: 48 settings that differ, predicted and measured over the same steps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "simulator"))

from sim_inputs import make_graph_profile, make_profile, make_shape, make_trace

from benchmarks import validate_h200, whatif_h200
from benchmarks.decode import workload as made_up
from benchmarks.replayed import Lengths, Trial, predict, workload
from benchmarks.validate_grid import GAMMA, trials
from benchmarks.validate_h200 import Wanted, validate
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, slot_counts
from foreload.shape import ModelShape
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 2,
}  # fmt: skip
ROW = {
    "settings", "regime", "predicted_tpot_ms", "measured_tpot_ms", "measured_spread_pct", "predicted_hit_rate",
    "measured_hit_rate", "predicted_late_rate", "measured_late_rate", "profile_hash", "repeats_tpot_ms",
    "predicted_counters", "measured_counters", "predicted_time_per_token_ms",
}  # fmt: skip


@pytest.mark.integration
@pytest.mark.parametrize("made", [make_profile, make_graph_profile])
def test_no_two_settings_do_the_same(made: Callable[[ModelShape], HardwareProfile]) -> None:
    """Each has another time or other counts than every other, on routing of a shape as sparse as the full-size one."""
    shape = make_shape(layers=4, experts=128, top_k=8)
    costs = CostModel(made(shape), shape)
    trace = make_trace(shape, requests=1, prompt=0, tokens=150, width=8, repeat=0.1)
    works = {gamma: workload(trace, shape, 100, Lengths(), gamma) for gamma in (0, GAMMA)}
    chosen = trials(costs.cpu_threads)
    assert len(chosen) == 48
    assert {t.settings.cache_ratio for t in chosen} == {0, 0.05, 0.17, 0.25, 0.5, 1}
    assert {t.settings.prefetch_depth for t in chosen} == {0, 1, 2}
    assert {t.settings.admission for t in chosen} == {"demand", "background", "none"}
    assert len({t.settings.eviction for t in chosen}) >= 5
    seen: dict[tuple[Any, ...], str] = {}
    for trial in chosen:
        found = predict(works[trial.settings.draft.gamma], costs, trial)
        key = (found.figures.tpot_ns, found.counters.tobytes())
        assert key not in seen, f"{trial.describe()} does what {seen[key]} does"
        seen[key] = trial.describe()


@pytest.mark.integration
@pytest.mark.parametrize("gamma", [0, GAMMA])
def test_only_the_later_steps_count(gamma: int) -> None:
    """Figures of the steps after warm-up are what the whole run has beyond its first part."""
    shape = make_shape(experts=16)
    costs = CostModel(make_profile(shape), shape)
    work = workload(make_trace(shape, requests=2, tokens=60), shape, 100, Lengths(4, 9, 3, 5), gamma)
    settings = Settings.parse({"cache_ratio": 0.25, **({"draft": {"kind": "ngram", "gamma": gamma}} if gamma else {})})
    found = predict(work, costs, Trial(settings))
    whole = simulate(work.trace, costs, shape, settings, slot_counts(settings, shape))
    skipped = sum(work.emitted[: work.warm])
    assert len(work.emitted) == (8 if gamma else 13)
    assert work.trace.position[0] == 100
    assert found.figures.tpot_ns == pytest.approx(float(whole.token_ns[skipped:].mean()))
    assert sum(found.figures.time_ns.values()) == int(whole.token_ns[skipped:].sum())
    assert 0 < found.counters[:, Counter.HITS].sum() < whole.counters[0, :, Counter.HITS].sum()


@pytest.mark.integration
def test_on_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted first, measured by turns, rows with everything an error is explained by; the demand is the same.

    Where the folder holds no profile, one is measured and put there.
    """
    model = Checkpoint.random("qwen3-30b-a3b", **SMALL)
    monkeypatch.setattr(validate_h200, "measure_profile", lambda engine: make_profile(engine.shape))
    options = EngineOptions(context_tokens=200)
    trace = made_up(model.shape, 120)
    wanted = Wanted(Lengths(4, 6, 2, 3), context=64, rounds=5)
    with Engine(model, options, Settings(cache_ratio=0.0)) as engine:
        found = validate(engine, {"topo": trace}, tmp_path, wanted)
        again = validate_h200.on_engine(engine, {"topo": trace}, 0.0, tmp_path / "late")
    rows = json.loads((tmp_path / "validate-h200.json").read_text())
    assert found["refused"] == found["left_out"] == []
    assert (tmp_path / validate_h200.PROFILE).exists()
    assert len(rows) == found["summary"]["settings"] == 48
    for row in rows:
        assert row.keys() >= ROW
        turns, repeats = (1, 1) if row["parsed"].get("miss_action", "fetch") == "fetch" else (5, 3)
        assert (len(row["turns_tpot_ms"]), len(row["repeats_tpot_ms"])) == (turns, repeats)
        assert row["profile_hash"] == found["profile_hash"]
        demanded = [
            sum(counted[name] for name in ("hits", "late", "misses"))
            for counted in (row["predicted_counters"], *row["measured_counters"])
        ]
        assert len(set(demanded)) == 1, row["settings"]
        if (
            "predictor" not in row["settings"]
            and "background" not in row["settings"]
            and "split" not in row["settings"]
        ):
            assert row["predicted_hit_rate"] == pytest.approx(row["measured_hit_rate"]), row["settings"]
    fixed = [row for row in rows if row["parsed"].get("cache_ratio") == 1.0]
    assert [row["measured_hit_rate"] for row in fixed if "none" in row["settings"]] == [1.0] * 2
    assert again["rounds"] == validate_h200.ROUNDS
    assert len({one.split(": ")[1] for one in again["left_out"]}) == 48
    assert json.loads((tmp_path / "late" / "validate-h200.json").read_text()) == []
    assert np.isfinite(found["summary"]["regret_pct"])
    (tmp_path / "validate-h200.json").unlink()
    later = validate_h200.predict_measured(tmp_path, model.shape, trace)
    assert json.loads((tmp_path / "validate-h200.json").read_text()) == rows
    assert later["summary"] == found["summary"]


@pytest.mark.integration
def test_machines_that_are_played(tmp_path: Path) -> None:
    """Slower links and fewer threads: 12 settings each, predicted with what-if flags."""
    model = Checkpoint.random("qwen3-30b-a3b", **SMALL)
    make_profile(model.shape).save(tmp_path / validate_h200.PROFILE)
    trace = made_up(model.shape, 120)
    wanted = Wanted(Lengths(2, 3, 1, 2), context=64, rounds=1)
    with Engine(model, EngineOptions(context_tokens=200), Settings(cache_ratio=0.0)) as engine:
        found = whatif_h200.check(engine, {"topo": trace}, tmp_path, wanted, [0.05, 0.02])
        assert engine.link_bytes_per_s is None
    assert len(json.loads((tmp_path / "whatif-h200.json").read_text())["machines"]) == len(found["machines"])
    assert found["left_out"] == []
    links = [m for m in found["machines"] if "link_gb_per_s" in m["assumed"]]
    assert [m["assumed"]["link_gb_per_s"] for m in links] == [0.05, 0.02]
    for machine in found["machines"]:
        assert machine["refused"] == []
        assert len(machine["rows"]) == machine["summary"]["settings"] == 12
    for machine in links:
        assert 0 < machine["link_gb_per_s_reached"] <= 1.5 * machine["assumed"]["link_gb_per_s"]
        assert all(row["sources"]["copy"] == "assumed" for row in machine["rows"])
    later = whatif_h200.predict_measured(tmp_path, model.shape, trace)
    assert len(json.loads((tmp_path / "whatif-h200.json").read_text())["machines"]) == len(later["machines"])
    for one, other in zip(later["machines"], found["machines"], strict=True):
        assert [row["predicted_tpot_ms"] for row in one["rows"]] == [row["predicted_tpot_ms"] for row in other["rows"]]
        assert one["summary"] == other["summary"]
    (cpu,) = [m for m in found["machines"] if "cpu_scale" in m["assumed"]]
    assert all(row["predicted_direct_ms"] > 0 for row in cpu["rows"])
