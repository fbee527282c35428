"""`foreload demo` with few requests and repeats: the contract of its output, and what it leaves behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreload.backend import measure as measuring
from foreload.cli import demo, main
from foreload.profiler import probes
from foreload.settings import Settings

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:profile. a fixed block varied")]
FILES = {"profile.json", "trace.parquet", "settings.json", "timeline.json", "report.html", "result.json"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"REQUESTS": 4, "PROMPT_TOKENS": 24, "TOKENS": 12, "REPEATS": 1}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(probes, "QUICK", replace(probes.QUICK, rounds=3, sizes=(1 << 14,)))


def run(out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["demo", "--device", "cpu", "--link", "50MB/s", "--out", str(out), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert {path.name for path in out.iterdir()} == FILES
    return found


def test_the_whole_loop(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(tmp_path, capsys)
    for side in ("default", "tuned"):
        assert found[side].keys() == {"predicted_tpot_ms", "measured_tpot_ms", "hit_rate", "bytes_per_token"}
        assert found[side]["measured_tpot_ms"] > 0
        off = found[side]["predicted_tpot_ms"] / found[side]["measured_tpot_ms"] - 1
        assert found["error_pct"][side] == pytest.approx(100 * off)
    assert found["diverged_requests"] == 0
    assert found["bounds"]["floor_ms"] > 0
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"measured", "simulated"}
    assert len(Settings.load(tmp_path / "settings.json").slots_per_layer or ()) == 8


def test_a_tuned_setting_that_measures_slower_is_not_kept(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = measuring.measure

    def slower(*args: Any, **kwargs: Any) -> list[measuring.Measured]:
        default, tuned = original(*args, **kwargs)
        tuned.tpot_ns = [ns * 1.5 for ns in default.tpot_ns]
        return [default, tuned]

    monkeypatch.setattr(measuring, "measure", slower)
    found = run(tmp_path, capsys)
    assert found["kept_default"] is True
    assert found["speedup"] == pytest.approx(1 / 1.5)
    saved = Settings.load(tmp_path / "settings.json")
    assert (saved.eviction, saved.miss_action, saved.prefetch_depth) == ("lru", "fetch", 0)
