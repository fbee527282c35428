"""What settings and flags ask for in vain is refused by name, before any weight is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from foreload.assets import ASSETS
from foreload.backend.predict.calibration import Calibration
from foreload.cli import main

RUN = ["run", "mini", "--prompt", "a", "--device", "cpu"]
AHEAD = {"predictor": "quasi_hidden", "prefetch_depth": 1}


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads weights into memory fails the test."""

    def loaded(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights are loaded")

    for name in ("Decoder", "HostSlab", "ModelDrafter"):
        monkeypatch.setattr(f"foreload.backend.engine.{name}", loaded)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*RUN, *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    return said


@pytest.mark.integration
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"utility": {"k": 0}}, "field 'utility.k' is 0"),
        ({"utility": {"k": 65}}, "field 'utility.k' is 65"),
        ({"utility": {"k": 4, "tau": 6}}, "tau 6 is above k + 1: with k 4, 'auto' or 1 to 5 is accepted"),
        ({"utility": {"tau": 0}}, "tau is 0: 'auto' or a whole number from 1 to k + 1 is accepted"),
        ({"draft": {"kind": "ngram", "gamma": 17}}, "field 'draft.gamma' is 17"),
        ({"draft": {"kind": "ngram", "gamma": 0}}, "gamma 0 does not go with kind 'ngram'"),
        ({**AHEAD, "speculate_layers": [0, 1]}, "speculate_layers holds 0: nothing comes before the first MoE layer"),
        ({**AHEAD, "speculate_layers": [8]}, "speculate_layers holds 8: the model has MoE layers 0 to 7"),
        ({"cache_ratio": 0.5, "miss_action": "split"}, "miss_action 'split' needs measured costs: give a profile"),
        ({"cache_ratio": 0.5, "eviction": "static"}, "eviction 'static' needs counts of a recording"),
    ],
)
def test_settings(settings: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps(settings))
    assert said in refused(capsys, "--settings", str(path))


@pytest.mark.integration
def test_a_window_over_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--draft", "ngram", "--gamma", "9", "--context", "8")
    assert "draft.gamma 9 exceeds the context: a verify step of 10 tokens does not fit in context_tokens 8" in said


@pytest.mark.integration
def test_a_draft_with_another_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two tokens that have changed places are another tokenizer."""
    folder = shutil.copytree(ASSETS / "draft", tmp_path / "other")
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    tokens = values["model"]["vocab"]
    one, two = list(tokens)[300:302]
    tokens[one], tokens[two] = tokens[two], tokens[one]
    path.write_text(json.dumps(values))
    said = refused(capsys, "--draft", "model", "--draft-model", str(folder))
    assert "draft model 'other': its tokenizer" in said
    assert "is not that of 'mini'" in said


@pytest.mark.integration
def test_a_calibration_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(ASSETS / "mini" / "calibration", tmp_path / "calibration")
    path = folder / "calibration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": "other", "weights_hash": "0" * 16}))
    assert Calibration.load(folder).meta.model == "other"
    settings = tmp_path / "s.json"
    settings.write_text(json.dumps(AHEAD))
    said = refused(capsys, "--calibration", str(folder), "--settings", str(settings))
    assert "calibration of 'other' with weights 0000000000000000: model 'mini' has weights" in said
