"""The benchmarks of both papers' methods on a toy shape: every row measured and simulated, time kept, tables made."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import beside, spac_h200, tuned_h200, union_h200, union_tuned
from benchmarks.decode import workload
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import SplitCosts
from foreload.presets import PRESETS
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.settings import Settings
from foreload.traces.io import TraceWriter
from foreload.traces.remodel import renamed, with_windows
from foreload.traces.schema import PredictionColumn, Trace

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
MakeProfile = Callable[..., HardwareProfile]


@pytest.fixture
def engine() -> Iterator[Engine]:
    model = Checkpoint.random("qwen3-30b-a3b", **SMALL)
    with Engine(model, EngineOptions(context_tokens=400), Settings(cache_ratio=0.0)) as made:
        yield made


@pytest.fixture
def topo(engine: Engine) -> Trace:
    """A recording with predictions of every kind."""
    trace = workload(engine.shape, 120)
    tables = {(name, 1): trace.predictions["gate", 1] for name in ("gate", "quasi_hidden", "estimator")}
    columns = tuple(PredictionColumn(predictor=n, depth=1, width=tables[n, 1].shape[2]) for n, _ in tables)
    meta = trace.meta.model_copy(update={"predictions": columns})
    return renamed(Trace(**{**vars(trace), "meta": meta, "predictions": tables}), {n: n for n, _ in tables})


def save_profile(make_profile: MakeProfile, engine: Engine, out: Path) -> None:
    """A made-up profile of the engine's shape where the benchmarks look for one."""
    shape, size = engine.shape, engine.expert_bytes
    base = make_profile(shape=asdict(shape), shape_hash=shape.hash, expert_bytes=size)
    copy = Measurement(probe="copy", at={"bytes": size, "pinned": 0}, p50_us=100, p95_us=100, repeats=1)
    speculated = Measurement(probe="speculated", p50_us=8, p95_us=8, repeats=1)
    kept = (m for m in base.measurements if m.probe != "copy")
    HardwareProfile(meta=base.meta, measurements=(*kept, copy, speculated)).save(out / beside.PROFILE)


def write_trace(path: Path, trace: Trace) -> None:
    """As a file, step by step."""
    with TraceWriter(path, trace.meta) as writer:
        for first, last in itertools.pairwise(trace.step_starts().tolist()):
            rows = trace.take(slice(first, last))
            one = int(rows.request[0]), int(rows.step[0]), int(rows.phase[0])
            writer.append(
                *one, rows.position, rows.token_id, rows.experts, accepted=rows.accepted, weights=rows.weights,
                predictions=rows.predictions,
            )  # fmt: skip


@pytest.mark.integration
def test_ablation(engine: Engine, topo: Trace, make_profile: MakeProfile, tmp_path: Path) -> None:
    """Every piece is measured and simulated with the same decisions, compared with the whole, and can be redone."""
    save_profile(make_profile, engine, tmp_path)
    until, sizes = time.monotonic() + 600, {"warm": 3, "tokens": 12}
    found = spac_h200.measure(engine, topo, tmp_path, until, tmp_path, context=16, lengths=(16, 64), **sizes)
    rows = {one["name"]: one for one in found["rows"]}
    assert set(rows) >= {"full", *spac_h200.PAPER, "full, 64 tokens", "no drafts, 16 tokens"}
    for name, one in rows.items():
        assert one["refused"] == "", name
        assert len(one["runs"]) == spac_h200.REPEATS
        if "predictor" not in one["ran"]:  # else what has landed in time decides too
            assert one["same_counts"], name
        assert one["against_full_pct"] is not None
        assert one["against_full_simulated_pct"] is not None
    engine.reset_cache()
    assert engine.warm_start.experts == 0  # the engine is left without counts to start from
    assert rows["full"]["against_full_pct"] == 0
    assert rows["no drafts"]["tokens_per_step"] == 1 < rows["gamma 2"]["tokens_per_step"]
    assert len({json.dumps(one["ran"], sort_keys=True) for one in found["rows"]}) == len(rows) - 4
    assert json.loads((tmp_path / spac_h200.FILE).read_text())["rows"] == found["rows"]
    flags = ["--simulate", str(tmp_path / spac_h200.FILE), "--profile", str(tmp_path / beside.PROFILE)]
    write_trace(tmp_path / "topo.parquet", topo)
    again = spac_h200.main([*flags, "--trace", str(tmp_path / "topo.parquet"), "--windows", str(tmp_path / "none")])
    assert again["rows"] == found["rows"]
    assert "| floored theta | 16 |" in spac_h200.markdown(found)


@pytest.mark.integration
def test_recorded_windows_are_replayed(
    engine: Engine, topo: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where samples hold windows of a draft model, that text runs too, with its windows; without a profile all runs."""
    for gamma in (4, 8):
        made = with_windows(topo, "model", gamma, (0.9, 0.5), seed=gamma)
        write_trace(tmp_path / f"text-model-{gamma}.parquet", made)
    write_trace(tmp_path / "text-ngram-8.parquet", with_windows(topo, "ngram", 8, (0.1,)))
    until, out = time.monotonic() + 600, tmp_path / "out"
    n = np.arange(17, dtype=np.int64)
    costs = SplitCosts(io_ns=100, gpu_ns=10 * n, cpu_ns=100 * n)
    monkeypatch.setattr(beside, "measure_rates", lambda _: SimpleNamespace(costs=lambda _: costs))
    found = spac_h200.measure(engine, topo, tmp_path, until, out, context=16, lengths=(), warm=3, tokens=12)
    rows = {one["name"]: one for one in found["rows"]}
    for name, said in (("full", "made up"), ("full, recorded drafts", "as recorded")):
        assert any(said in one for one in rows[name]["assumed"])
    for gamma, name in ((8, "full, recorded drafts"), (4, "gamma 4, recorded drafts")):
        wanted = with_windows(topo, "model", gamma, (0.9, 0.5), seed=gamma)
        starts, kept = wanted.step_starts(), wanted.accepted
        first = rows[name]["warm_steps"]
        emitted = [int(kept[a:b].sum()) for a, b in itertools.pairwise(starts.tolist())]
        assert rows[name]["runs"][0]["emitted"] == emitted[first : first + rows[name]["steps"]]
    assert rows["full, recorded drafts"]["against_full_pct"] == 0
    assert "simulated" not in rows["full"]  # there is no profile in that folder: the engine decided by measured rates


@pytest.mark.integration
def test_union(
    engine: Engine, topo: Trace, make_profile: MakeProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every preset and tuned settings run on every workload; what keeps nothing runs once."""
    monkeypatch.setattr("benchmarks.union_tuned.cores", lambda: 1)
    save_profile(make_profile, engine, tmp_path)
    routing, ratios = {"topo": topo, "qwen3": workload(engine.shape, 120, seed=3)}, (0.17, 0.0)
    costs = beside.costs_of(tmp_path / beside.PROFILE)
    small = union_h200.workloads_of({"topo": topo}, engine.shape, 3, 6)
    union_tuned.write_tuned(tmp_path / union_h200.TUNED, union_tuned.tune_all(costs, small, (0.17,), 60))
    found = union_h200.measure(
        engine, routing, time.monotonic() + 600, tmp_path, ratios=ratios, context=16, warm=3, tokens=6
    )
    once = {"on_demand", "router_pf", "est_pf", "hybrid_pf"}
    for name in routing:
        rows = {(one["name"], one["cache_ratio"]): one for one in found["rows"] if one["workload"] == name}
        tuned = {("tuned", 0.17)} | ({("tuned", 0.0)} if name == "qwen3" else set())  # those of topo were found before
        assert set(rows) == tuned | {(one, 0.0) for one in PRESETS} | {(one, 0.17) for one in set(PRESETS) - once}
        for key, one in rows.items():
            assert one["refused"] == "", key
            assert len(one["runs"]) == union_h200.REPEATS
            assert one["simulated"]["tpot_ms"] > 0
            if not {"predictor", "admission"} & one["ran"].keys():  # else what has landed in time decides too
                assert one["same_counts"], key
        assert "predictions are executed" in " ".join(rows["router_pf", 0.0]["assumed"])
        assert found["bounds"][name]["0.17"]["link_ms"] < found["bounds"][name]["0.0"]["link_ms"]
    text = union_h200.markdown(found)
    assert "| settings | cache 0 | cache 0.17 |" in text
    assert text.count("\n| moe_spac |") == 4
    assert text.count("| 25.06 | 1.65 |") == 2


@pytest.mark.unit
def test_tuned_settings_found_before(tmp_path: Path) -> None:
    """Those for this benchmark come first, then what the tuning benchmark prepared for the link as it is."""
    assert union_h200.found_before(tmp_path) == {}
    one, other = Settings(cache_ratio=0.1), Settings(cache_ratio=0.2)
    budgets = {
        str(at): {"link_bytes_per_s": link, "cache_ratio": ratio, "named": {"tuned": [s.model_dump(mode="json"), 1.0]}}
        for at, (link, ratio, s) in enumerate([(None, 0.17, one), (10**9, 0.17, other), (None, 0.5, other)])
    }
    (tmp_path / tuned_h200.PREPARED).write_text(json.dumps({"budgets": budgets}))
    assert union_h200.found_before(tmp_path) == {"topo": {0.17: one, 0.5: other}}
    union_tuned.write_tuned(tmp_path / union_h200.TUNED, {"qwen3": {0.25: one}})
    assert union_h200.found_before(tmp_path) == {"qwen3": {0.25: one}}


@pytest.mark.integration
def test_no_time_is_said_so(
    engine: Engine, topo: Trace, make_profile: MakeProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(make_profile, engine, tmp_path)
    monkeypatch.setattr(union_h200, "simulator_ready", lambda: False)
    found = union_h200.on_engine(engine, {"topo": topo}, time.monotonic() - 1, tmp_path)
    assert "bounds" not in found
    assert {one["left_out"] for one in found["rows"]} == {union_h200.REPEATS}
    assert "no time" in union_h200.markdown(found)
