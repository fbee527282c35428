"""The decode benchmark on a toy shape: rows that add up, in the promised columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import h200
from benchmarks.decode import main
from foreload.backend.models.checkpoint import Checkpoint

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 300, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
COLUMNS = {
    "shape",
    "format",
    "cache_ratio",
    "settings",
    "context",
    "tpot_ms",
    "floor_ms",
    "ratio",
    "hit_rate",
    "stall_ms",
}


@pytest.mark.integration
def test_rows(tmp_path: Path) -> None:
    flags = ["--device", "cpu", "--out", str(tmp_path), "--steps", "6", "--repeats", "2", "--contexts", "16"]
    flags += ["--ratios", "0,0.5,1", "--link", "1e8"]
    found = main(flags, Checkpoint.random("qwen3-30b-a3b", **SMALL))
    assert json.loads((tmp_path / "decode.json").read_text())["rows"] == found["rows"]
    rows = {(row["cache_ratio"], row["name"]): row for row in found["rows"]}
    assert set(rows) == {
        (0.0, "fetch"), (0.0, "cpu"), (0.0, "split"), (0.0, "fetch, gate prefetch"),
        (0.5, "fetch"), (0.5, "cpu"), (0.5, "split"), (1.0, "fetch"),
    }  # fmt: skip
    for row in rows.values():
        assert set(row) >= set(COLUMNS)
        assert row["repeats"] == 2
    size = 3 * 64 * 32 * 4
    assert rows[0.0, "fetch"]["copied_bytes"] == 3 * 2 * size
    assert rows[0.0, "cpu"]["cpu_bytes"] == 3 * 2 * size
    assert rows[0.0, "cpu"]["copied_bytes"] == 0
    assert rows[0.0, "split"]["copied_bytes"] + rows[0.0, "split"]["cpu_bytes"] == 3 * 2 * size
    assert rows[0.0, "fetch, gate prefetch"]["copied_bytes"] >= rows[0.0, "fetch"]["copied_bytes"]
    assert rows[0.0, "fetch"]["hit_rate"] == 0
    assert rows[0.5, "fetch"]["hit_rate"] > 0
    assert "| 0.50 | split | 16 |" in (tmp_path / "decode.md").read_text()


@pytest.mark.integration
def test_driver_goes_on_after_a_part_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are written as they end; what fails or has no time is reported by name."""

    def broken(*_: object) -> dict[str, object]:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(h200.PARTS, "kernels", broken)
    monkeypatch.setattr(h200, "CONTEXT", 16)
    monkeypatch.setattr(h200, "STEPS", 6)
    flags = ["--device", "cpu", "--out", str(tmp_path), "--parts", "kernels,host,exactness"]
    monkeypatch.setitem(h200.LEAST_S, "exactness", 10_000)
    found = h200.main(flags, Checkpoint.random("qwen3-30b-a3b", **SMALL))
    assert found["kernels"]["failed"] == "RuntimeError: no such kernel"
    assert found["host"]["path"] == "eager (device cpu)"
    assert found["host"]["host_decision_tpot_ms"] > 0
    assert {"route", "plan", "experts_gpu"} <= set(found["host"]["host_us"])
    assert "10000 s are needed" in found["exactness"]["skipped"]
    assert json.loads((tmp_path / "h200.json").read_text()).keys() == found.keys()
