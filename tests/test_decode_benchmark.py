"""The decode benchmark on a toy shape: rows that add up, in the promised columns, within the time it is given."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import h200
from benchmarks.decode import Measurement, Wanted, drafts_on_engine, main, on_engine, routed, workload
from benchmarks.decode_rows import bars
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.traces.remodel import with_windows
from foreload.traces.schema import Trace

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
COLUMNS = {
    "shape", "format", "cache_ratio", "settings", "context", "tpot_ms", "floor_ms", "ratio", "hit_rate", "stall_ms",
    "ttft_ms", "bottleneck", "busy_ms",
}  # fmt: skip
SIZE = 3 * 64 * 32 * 4
TOKEN_BYTES = 3 * 2 * SIZE


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of everything."""
    out = tmp_path_factory.mktemp("decode")
    flags = ["--device", "cpu", "--out", str(out), "--steps", "6", "--repeats", "2", "--contexts", "16,32"]
    flags += ["--ratios", "0.25,0.5", "--gammas", "2", "--link", "1e9"]
    result = main(flags, Checkpoint.random("qwen3-30b-a3b", **SMALL))
    assert json.loads((out / "decode.json").read_text())["rows"] == result["rows"]
    assert "| 0.50 | split, 2 ahead | synthetic | 16 |" in (out / "decode.md").read_text()
    return result


def row(found: dict[str, Any], section: str, name: str, **wanted: Any) -> dict[str, Any]:
    """The only row of that name."""
    (one,) = (
        r
        for r in found["rows"]
        if (r["section"], r["name"]) == (section, name) and all(r[k] == v for k, v in wanted.items())
    )
    return one  # type: ignore[no-any-return]


@pytest.mark.integration
def test_every_cell_has_run(found: dict[str, Any]) -> None:
    assert found["left_out"] == []
    names = {(r["section"], r["name"], r["cache_ratio"]) for r in found["rows"] if r["section"] != "contexts"}
    cached = {"split", "split, lfru", "split, fetched kept", "split, 2 ahead", "fetch"}
    assert names == (
        {("resident", "resident, one launch", 1.0), ("resident", "resident, a decision per layer", 1.0)}
        | {
            ("no cache", name, 0.0)
            for name in (
                "on_demand",
                "router_pf",
                "split",
                "split, 2 ahead",
                "split, 3 ahead",
                "split, 2 ahead, 1 read",
                "cpu",
            )
        }
        | {("cached", name, ratio) for name in cached for ratio in (0.25, 0.5)}
        | {("cached", "llama_cpp 0.25", 0.0), ("cached", "llama_cpp 0.5", 1 / 3)}
        | {("drafts", "no drafts", 0.5), ("drafts", "drafts, gamma 2", 0.5)}
    )
    assert {r["context"] for r in found["rows"] if r["section"] == "contexts"} == {32}
    for r in found["rows"]:
        assert set(r) >= COLUMNS
        assert r["repeats"] == len(r["runs"]) == 2
        assert (r["ttft_ms"] is None) == (r["section"] == "drafts")


@pytest.mark.integration
def test_bytes_and_floors(found: dict[str, Any]) -> None:
    rates = found["rates"]
    plain = row(found, "no cache", "on_demand")
    assert plain["copied_bytes"] == TOKEN_BYTES
    assert plain["floor_ms"] == pytest.approx(TOKEN_BYTES / rates["link"] / 1e6)
    assert plain["ratio"] == pytest.approx(plain["tpot_ms"] / plain["floor_ms"])
    ahead = row(found, "no cache", "router_pf")
    assert ahead["copied_bytes"] == ahead["missing_bytes"] == TOKEN_BYTES
    alone, both = row(found, "no cache", "cpu"), row(found, "no cache", "split")
    assert (alone["cpu_bytes"], alone["copied_bytes"]) == (TOKEN_BYTES, 0)
    assert both["cpu_bytes"] + both["copied_bytes"] == both["missing_bytes"] == TOKEN_BYTES
    together = rates["link_beside"] + rates["cpu_beside"]
    assert both["floor_ms"] == pytest.approx(TOKEN_BYTES / together / 1e6)
    resident = [row(found, "resident", name) for name in ("resident, one launch", "resident, a decision per layer")]
    assert [r["hit_rate"] for r in resident] == [1, 1]
    half = row(found, "cached", "split", cache_ratio=0.5)
    least = min(r["tpot_ms"] for r in resident)
    assert half["floor_ms"] == pytest.approx(least + half["missing_bytes"] / together / 1e6)
    assert 0 < half["hit_rate"] < 1


@pytest.mark.integration
def test_predictions_and_drafts_beside_what_they_are_instead_of(found: dict[str, Any]) -> None:
    assert [entry["context"] for entry in found["overlap"]] == [16, 32]
    for entry in found["overlap"]:
        assert entry["saving_ms"] == pytest.approx(entry["on_demand_ms"] - entry["router_pf_ms"])
    (forced,) = found["drafts"]
    assert forced["wins"] == (forced["tokens_per_step"] > forced["break_even"])
    assert forced["experts_per_layer_step"] > 2


@pytest.mark.integration
def test_recorded_windows_beside_shorter_ones_and_their_text_alone(tmp_path: Path) -> None:
    model = Checkpoint.random("qwen3-30b-a3b", **SMALL)
    plain = workload(model.shape, 120)
    routing = {
        f"text-{gamma}": with_windows(plain, kind, gamma, (1.0, 0.0)) for gamma, kind in ((3, "ngram"), (4, "model"))
    }
    Settings.parse({"slots_per_layer": (8, 4, 0), "draft": {"gamma": 4, "kind": "ngram"}}).save(tmp_path / "mine.json")
    also = (routed(f"text-4={tmp_path / 'mine.json'}"),)
    wanted = Wanted(tmp_path, ("drafts",), 16, ratios=(0.5,), gammas=(2, 3, 4), also=also, steps=6, repeats=1)
    options = EngineOptions(device="cpu", context_tokens=256, link_bytes_per_s=10**9)
    with Engine(model, options, Settings(cache_ratio=0.0)) as engine:
        result = Measurement(engine, routing, wanted).run()
    assert result["left_out"] == []
    ran = {(r["routing"], r["gamma"]) for r in result["rows"]}
    assert ran == {("text-3", 0), ("text-3", 2), ("text-3", 3), ("text-4", 0), ("text-4", 2), ("text-4", 4)}
    assert {r["tokens_per_step"] for r in result["rows"]} == {1.0, 2.0}  # the first draft is kept, the second never
    assert [(r["routing"], r["cache_ratio"]) for r in result["rows"] if r["name"] == "mine"] == [("text-4", 0.25)]
    assert {(d["routing"], d["gamma"]) for d in result["drafts"]} == {one for one in ran if one[1]}


@pytest.mark.integration
def test_drafts_of_recordings_that_hold_them_beside_what_was_tuned(tmp_path: Path) -> None:
    plain = workload(Checkpoint.random("qwen3-30b-a3b", **SMALL).shape, 300)
    routing = {"text": plain, "text-4": with_windows(plain, "model", 4, (1.0, 0.0))}
    Settings.parse({"slots_per_layer": (8, 4, 0)}).save(tmp_path / "tuned-drafts" / "text-4-plain.json")
    with Engine(Checkpoint.random("qwen3-30b-a3b", **SMALL), EngineOptions(context_tokens=2048)) as engine:
        drafts_on_engine(engine, routing, time.monotonic() + 600, tmp_path)
        with pytest.raises(UsageError, match="none of the recordings holds verify windows"):
            drafts_on_engine(engine, {"text": plain}, time.monotonic() + 600, tmp_path)
    rows = json.loads((tmp_path / "drafts" / "decode.json").read_text())["rows"]
    assert {(r["routing"], r["gamma"], r["name"] == "text-4-plain") for r in rows} == {
        ("text-4", 0, False), ("text-4", 2, False), ("text-4", 4, False), ("text-4", 0, True),
    }  # fmt: skip


@pytest.mark.integration
def test_residents_that_stay_are_those_that_the_rest_of_the_recording_uses(tmp_path: Path) -> None:
    """By what is measured itself they would look better than they can be known to be."""
    (tmp_path / "tuned-0.25.json").write_text(json.dumps({"cache_ratio": 0.25, "eviction": "static"}))
    flags = ["--device", "cpu", "--out", str(tmp_path), "--steps", "4", "--repeats", "1", "--sections", "cached"]
    flags += ["--ratios", "0.25", "--link", "1e9", "--settings", str(tmp_path / "tuned-0.25.json")]
    result = main(flags, Checkpoint.random("qwen3-30b-a3b", **SMALL))
    assert result["left_out"] == []
    assert 0.25 < row(result, "cached", "tuned 0.25")["hit_rate"] < 1


@pytest.mark.integration
def test_a_deadline_leaves_out_by_name(tmp_path: Path) -> None:
    checkpoint = Checkpoint.random("qwen3-30b-a3b", **SMALL)
    options = EngineOptions(context_tokens=2048)
    with Engine(checkpoint, options, Settings(cache_ratio=0.0)) as engine:
        routing = {"topo": workload(engine.shape, 512), "qwen3": workload(engine.shape, 512, 1)}
        result = on_engine(engine, routing, time.monotonic() - 1, tmp_path)
    assert result["rows"] == []
    assert result["left_out"][0] == "resident: resident, one launch, topo, context 1024, repeat 0"
    assert json.loads((tmp_path / "decode.json").read_text())["left_out"] == result["left_out"]


@pytest.mark.unit
def test_bars_say_what_is_met() -> None:
    def of(section: str, name: str, kind: str, ratio: float, tpot: float, floor: float) -> dict[str, Any]:
        return {
            "section": section, "name": name, "kind": kind, "cache_ratio": ratio, "tpot_ms": tpot, "routing": "r",
            "ratio": tpot / floor,
        }  # fmt: skip

    made = bars(
        [
            of("no cache", "on_demand", "fetch", 0, 72, 67.5),
            of("no cache", "split", "split", 0, 36, 34),
            of("no cache", "cpu", "cpu", 0, 40, 38),
            of("cached", "split", "cached", 0.17, 24, 22),
            of("cached", "llama_cpp 0.17", "placed", 1 / 6, 44, 40),
        ]
    )
    assert {bar["what"]: (round(bar["value"], 2), bar["met"]) for bar in made} == {
        "no cache, on_demand: times the floor": (1.07, True),
        "no cache, split: times the floor": (1.06, True),
        "no cache, split: times faster than on_demand": (2.0, True),
        "no cache, split: times faster than cpu": (1.11, False),
        "cache 0.17, r: times the floor": (1.09, True),
        "cache 0.17, r: times faster than llama_cpp": (1.83, True),
    }


@pytest.mark.integration
def test_driver_goes_on_after_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are written as they end; what fails or has no time is reported by name."""

    def broken(*_: object) -> dict[str, object]:
        raise RuntimeError("no such kernel")

    def engines(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, object]:
        assert engine.settings == h200.OPENED, "whatever the part before it left"
        engine.warm_by(np.ones((engine.shape.n_moe_layers, engine.shape.experts), np.int64))
        engine.apply(Settings(cache_ratio=0.5, eviction="static"))
        engine.warm_by(None)
        return {"engine": id(engine), "path": engine.path, "routing": ", ".join(sorted(routing)), "rows": [1]}

    monkeypatch.setitem(h200.ALONE, "kernels", broken)
    monkeypatch.setitem(h200.SHARED, "union", engines)
    monkeypatch.setitem(h200.SHARED, "spac", engines)
    monkeypatch.setattr(h200, "STEPS", 6)
    flags = ["--device", "cpu", "--out", str(tmp_path), "--parts", "kernels,union:60,spac,exactness:9"]
    found = h200.main(flags, Checkpoint.random("qwen3-30b-a3b", **SMALL))
    assert found["kernels"]["failed"] == "RuntimeError: no such kernel"
    assert found["union"]["path"] == "eager (device cpu)"
    assert found["union"]["routing"] == "qwen3, topo"
    assert found["union"]["engine"] == found["spac"]["engine"]
    assert "rows" not in found["spac"]
    assert "10 s are needed" in found["exactness"]["skipped"]
    with pytest.raises(UsageError, match="'prompts' is none of kernels"):
        h200.main([*flags[:-1], "prompts"])
    assert json.loads((tmp_path / "h200.json").read_text()).keys() == found.keys()
