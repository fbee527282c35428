"""`foreload tune`: several recordings, dry runs, resumed runs, losses, and what lies around the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreload.cli import main
from foreload.settings import Settings
from foreload.traces.schema import PredictionColumn

pytestmark = pytest.mark.integration
GATE = [PredictionColumn(predictor="gate", depth=1, width=4)]


@pytest.fixture
def files(tmp_path: Path, make_profile: Any, make_trace: Any, write_trace: Any) -> list[str]:
    """--profile and two --trace that belong together."""
    make_profile().save(tmp_path / "profile.json")
    for name in ("one", "two"):
        write_trace(tmp_path / f"{name}.parquet", make_trace(requests=3, tokens=8, predictions=GATE))
    traces = [flag for name in ("one", "two") for flag in ("--trace", str(tmp_path / f"{name}.parquet"))]
    return ["--profile", str(tmp_path / "profile.json"), *traces, "--slots", "14"]


def shown(capsys: Any, *args: str) -> dict[str, Any]:
    code = main([*args, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    values: dict[str, Any] = json.loads(captured.out)
    return values


def test_several_recordings_resumed(files: list[str], tmp_path: Path, capsys: Any) -> None:
    out, state = tmp_path / "s.json", tmp_path / "state.jsonl"
    flags = [*files, "--out", str(out), "--robust", "worst", "--seed", "3", "--resume", str(state)]
    first = shown(capsys, "tune", *flags)
    assert (first["recordings"], first["robust"]) == (2, "worst")
    assert sorted(n for part in first["requests"].values() for n in part) == [0, 1, 2]
    assert len(first["best"]["choosing_ms"]) == 2
    assert first["study"]["single_changes"]
    assert main(["tune", *flags]) == 0
    told = capsys.readouterr()
    assert f"{len(state.read_text().splitlines())} results of an earlier run were used" in told.err
    for title in ("Best of each family", "Presets", "What each setting is worth", "What would help", "Memory against"):
        assert title in told.out
    assert "gap 0.00%" in told.out
    assert max(map(len, told.out.splitlines())) <= 100
    assert shown(capsys, "tune", *flags) == first
    assert Settings.load(out).model_dump(mode="json", exclude_defaults=True) == first["best"]["settings"]


def test_the_time_of_the_link(files: list[str], tmp_path: Path, capsys: Any) -> None:
    flags = [*files, "--out", str(tmp_path / "s.json"), "--no-study"]
    held = shown(capsys, "tune", *flags, "--link-time", "0.1")
    assert held["best"]["predicted"]["link_busy_ms_per_token"] <= 0.1 < 1
    assert main(["tune", *flags, "--link-time", "-1"]) == 2
    assert "--link-time -1: milliseconds from 0 on are needed" in capsys.readouterr().err


def test_host_memory_that_is_too_small(files: list[str], capsys: Any) -> None:
    assert main(["tune", *files, "--dry-run", "--ram", "1kB"]) == 3
    assert "host memory of 1000 B cannot hold the experts" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(files: list[str], tmp_path: Path, capsys: Any) -> None:
    before = sorted(tmp_path.iterdir())
    values = shown(capsys, "tune", *files, "--dry-run", "--jobs", "3")
    assert values["jobs"] == 3
    assert values["processor_seconds"] > 0
    assert "default" in values["candidates"]
    assert main(["tune", *files, "--dry-run"]) == 0
    assert "nothing was tuned" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--run", "run"], "a run folder holds one recording, 2 were given"),
        (["--format-loss", "fp8=0.2"], "go together: give both or none"),
        (
            ["--format-loss", "fp9=0.2", "--max-quality-loss", "1"],
            "--format-loss 'fp9=0.2': a format (bf16, bf12, fp8, ",
        ),
        (
            ["--format-loss", "fp8=few", "--max-quality-loss", "1"],
            "--format-loss 'fp8=few': a format (bf16, bf12, fp8, ",
        ),
        (["--backend", "dask"], "--backend dask and --address go together"),
        (["--resume", "profile.json"], "profile.json: line 1 is no tuning state"),
    ],
)
def test_wrong_use(args: list[str], expected: str, files: list[str], tmp_path: Path, capsys: Any) -> None:
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    given = [str(tmp_path / arg) if arg in ("run", "profile.json") else arg for arg in args]
    assert main(["tune", *files, "--out", str(tmp_path / "s.json"), *given]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert expected in told.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
