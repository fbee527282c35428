"""`foreload calibrate` and `foreload quality` as people run them, on the bundled model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreload.backend.predict.calibration import Calibration
from foreload.cli import main
from foreload.quality import QualityReport
from foreload.settings import Settings

TEXT = "The kernel reads a page from the disk and puts it into memory, where the next reader finds it. " * 60


def output(capsys: Any) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(capsys.readouterr().out)
    return values


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(text: Path, tmp_path: Path, capsys: Any) -> Path:
    out = tmp_path / "calibration"
    sizes = ["--tokens", "512", "--select-tokens", "64", "--report-tokens", "64", "--window", "64"]
    assert main(["calibrate", "mini", "--text", str(text), "--out", str(out), *sizes, "--json", "--device", "cpu"]) == 0
    values = output(capsys)
    assert values["model"] == "mini"
    assert values["tokens"]["selection"] == 64
    assert Calibration.load(out).meta.recall == values["recall"]
    return out


@pytest.mark.integration
def test_calibrate_then_quality(text: Path, folder: Path, tmp_path: Path, capsys: Any) -> None:
    chosen = Settings(cache_ratio=0.5, predictor="hybrid", prefetch_depth=1, speculate_layers="all")
    chosen.save(tmp_path / "s.json")
    given = ["quality", "mini", "--text", str(text), "--calibration", str(folder), "--device", "cpu"]
    small = ["--window", "48", "--prompt-tokens", "16", "--windows", "2", "--greedy-tokens", "4"]
    out = tmp_path / "q.json"
    assert main([*given, *small, "--settings", str(tmp_path / "s.json"), "--out", str(out), "--json"]) == 0
    values = output(capsys)
    assert list(values["loss_pct"]) == ["exact", "settings"]
    assert values["loss_pct"]["exact"] == 0
    assert QualityReport.load(out).variants[1].layers == tuple(range(1, 8))
    assert main([*given, *small, "--compare", "--in-prompts"]) == 0
    shown = capsys.readouterr().out
    for name in ("exact", "router_pf", "est_pf", "hybrid_pf", "router_pf_prefill", "Greedy text"):
        assert name in shown
    assert main([*given, *small]) == 2
    assert "the settings change no text" in capsys.readouterr().err


@pytest.mark.integration
def test_shadow_is_shown_and_needs_speculation(folder: Path, tmp_path: Path, capsys: Any) -> None:
    chosen = Settings(cache_ratio=0.5, predictor="quasi_hidden", prefetch_depth=1, speculate_layers=(1, 7))
    chosen.save(tmp_path / "s.json")
    given = ["run", "mini", "--prompt", "The kernel", "-n", "6", "--device", "cpu", "--shadow"]
    assert main([*given, "--settings", str(tmp_path / "s.json"), "--calibration", str(folder)]) == 0
    assert "true experts among the executed" in " ".join(capsys.readouterr().out.split())
    assert main(given) == 2
    assert "--shadow measures speculated layers" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"predictor": "gate", "prefetch_depth": 1, "speculate_layers": [0]},
            "comes before the first MoE layer",
        ),
        ({"predictor": "gate", "prefetch_depth": 1, "speculate_layers": [8]}, "the model has MoE layers 0 to 7"),
        ({"predictor": "gate", "prefetch_depth": 5}, "field 'prefetch_depth' is 5"),
    ],
)
def test_wrong_speculation(settings: dict[str, Any], said: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(settings))
    assert main(["run", "mini", "--prompt", "a", "--settings", str(path), "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.integration
def test_calibration_of_another_model(folder: Path, tmp_path: Path, capsys: Any) -> None:
    meta = folder / "calibration.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "model": "other", "weights_hash": "0" * 16}))
    assert main(["run", "mini", "--prompt", "a", "--calibration", str(folder), "--device", "cpu"]) == 2
    assert "calibration of 'other' with weights 0000000000000000: model 'mini' has weights" in capsys.readouterr().err
