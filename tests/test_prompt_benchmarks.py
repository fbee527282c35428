"""The benchmarks of prompts, of drift and of `accelerate` on a toy shape."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import accelerate_row, drift, prefill, sanitizer
from foreload.backend.models.checkpoint import Checkpoint

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
SIZE = 3 * 64 * 32 * 4


@pytest.mark.integration
def test_prompts_beside_their_floors(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--out", str(tmp_path), "--tokens", "64", "--chunks", "64,16", "--link", "1e9"]
    found = prefill.main(flags, Checkpoint.random("qwen3-30b-a3b", **SMALL))
    assert json.loads((tmp_path / "prefill.json").read_text()) == json.loads(json.dumps(found))
    assert found["left_out"] == []
    once, parts = found["prompts"]
    assert 0 < once["copied_bytes"] <= 3 * 16 * SIZE
    assert once["copied_bytes"] < parts["copied_bytes"] <= 4 * 3 * 16 * SIZE
    for row in (once, parts):
        assert row["floor_ms"] == max(row["link_ms"], row["own_compute_ms"])
        assert row["link_busy_ms"] > 0
        needed = row["copied_bytes"] - row["wasted_bytes"]
        assert row["link_ms"] == pytest.approx(needed / found["rates"]["link"] / 1e6)
    assert [len(row["step_us"]) for row in found["after"]] == [192, 192]


@pytest.mark.integration
def test_drift_counts_all_slots_in_every_block(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--out", str(tmp_path), "--tokens", "600"]
    found = drift.main(flags, Checkpoint.random("qwen3-30b-a3b", **SMALL))
    assert [b["tokens"] for b in found["blocks"]] == [256, 256, 256]
    assert {b["slots"] for b in found["blocks"]} == {3 * 4 + 2 + 2}
    assert [b["kept"] for b in found["blocks"]] == [12, 12, 12]
    assert found["summary"]["slots_more"] == found["summary"]["threads_more"] == 0


@pytest.mark.integration
def test_they_keep_their_time(tmp_path: Path) -> None:
    from benchmarks.decode import workload
    from foreload.backend.engine import Engine, EngineOptions
    from foreload.settings import Settings

    model = Checkpoint.random("qwen3-30b-a3b", **SMALL)
    with Engine(model, EngineOptions(context_tokens=5000), Settings(cache_ratio=0.0)) as engine:
        routing = {"topo": workload(model.shape, 200)}
        over = time.monotonic() - 1
        assert len(prefill.on_engine(engine, routing, over, tmp_path)["left_out"]) == 4
        assert drift.on_engine(engine, routing, over, tmp_path)["blocks"] == []


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")
def test_accelerate_row_counts_prompt_and_tokens_apart(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--out", str(tmp_path / "row.json"), "--context", "16", "--tokens", "2"]
    found = accelerate_row.main(flags, **SMALL)
    assert json.loads((tmp_path / "row.json").read_text()) == found
    assert len(found["token_ms"]) == 2
    assert min(found["ttft_ms"], *found["token_ms"]) > 0


@pytest.mark.unit
@pytest.mark.parametrize("size", [7, accelerate_row.PATTERN + 3])
def test_random_weights_are_written_to_the_end(size: int) -> None:
    weights = torch.full((size,), float("nan"))
    accelerate_row.fill(weights)
    assert weights.isfinite().all()
    assert weights.std() > 0


@pytest.mark.integration
def test_sanitizer_counts_what_a_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\n[ "$2" = memcheck ] && n=0 || n=3\necho "== ERROR SUMMARY: $n errors"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = sanitizer.main(["--out", str(tmp_path / "s.json"), "--tools", "memcheck,initcheck"])
    assert found["executable"] == str(tool)
    assert [(t["errors"], t["clean"]) for t in found["tools"].values()] == [(0, True), (3, False)]
    assert json.loads((tmp_path / "s.json").read_text()) == found


@pytest.mark.unit
def test_sanitizer_without_a_summary_is_not_clean() -> None:
    assert sanitizer.counted("killed") is None
    assert sanitizer.counted("== RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)") == 2
