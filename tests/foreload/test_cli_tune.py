"""`simulate`, `tune` and `report` from files to files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreload.cli import main
from foreload.cli.simulate import sources_text
from foreload.settings import Settings
from foreload.traces.io import partial_folder
from foreload.traces.remodel import with_windows
from foreload.traces.schema import PredictionColumn

pytestmark = pytest.mark.integration
GATE = [PredictionColumn(predictor="gate", depth=depth, width=4) for depth in (1, 2)]


@pytest.fixture
def files(tmp_path: Path, make_profile: Any, make_trace: Any, write_trace: Any) -> list[str]:
    """--profile and --trace of a machine and a recording that belong together."""
    make_profile().save(tmp_path / "profile.json")
    write_trace(tmp_path / "trace.parquet", make_trace(requests=4, tokens=12, predictions=GATE))
    return ["--profile", str(tmp_path / "profile.json"), "--trace", str(tmp_path / "trace.parquet")]


def shown(capsys: Any, *args: str) -> dict[str, Any]:
    code = main([*args, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.out
    values: dict[str, Any] = json.loads(captured.out)
    return values


def test_simulate(files: list[str], capsys: Any) -> None:
    values = shown(capsys, "simulate", *files, "--cache-ratio", "0.5")
    assert values["source"] == "simulated"
    assert values["slots_per_layer"] == [4, 4, 4]
    assert values["tokens"] == 48
    assert values["tpot_ms"] > values["bounds"]["floor_ms"] > 0
    assert values["sources"]["wait"] == "assumed"
    assert shown(capsys, "simulate", *files, "--cache-ratio", "0.5") == values

    assert main(["simulate", *files, "--cache-ratio", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "emulated link 2 GB/s" in text
    assert "assumed: wait" in text
    assert max(map(len, text.splitlines())) <= 100


def test_simulate_some_requests(files: list[str], capsys: Any) -> None:
    assert shown(capsys, "simulate", *files, "--cache-ratio", "0.5", "--request", "1", "--request", "3")["tokens"] == 24
    assert main(["simulate", *files, "--cache-ratio", "0.5", "--request", "9"]) == 2
    assert "request 9 is not in it" in capsys.readouterr().err


def test_fewer_drafts_than_recorded_are_said_to_be_cut(
    files: list[str], make_trace: Any, write_trace: Any, tmp_path: Path, capsys: Any
) -> None:
    write_trace(tmp_path / "windows.parquet", with_windows(make_trace(requests=2, tokens=12), "ngram", 4, (0.9,)))
    flags, said = [*files[:2], "--trace", str(tmp_path / "windows.parquet")], {}
    for gamma in (4, 2):
        settings = Settings.parse({"cache_ratio": 0.5, "draft": {"kind": "ngram", "gamma": gamma}})
        settings.save(tmp_path / "drafts.json")
        assert main(["simulate", *flags, "--settings", str(tmp_path / "drafts.json")]) == 0
        said[gamma] = capsys.readouterr().err
    assert "cut" not in said[4]
    assert "verify windows of 2 drafts are cut from the recorded ones of 4" in said[2]


def test_simulate_by_memory(files: list[str], capsys: Any) -> None:
    values = shown(capsys, "simulate", *files, "--vram", "1MiB")
    assert values["slots_per_layer"] == [8, 8, 8]
    assert values["hit_rate"] > 0.5


def test_simulate_timeline(files: list[str], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "timeline.json"
    shown(capsys, "simulate", *files, "--cache-ratio", "0.25", "--timeline", str(out))
    timeline = json.loads(out.read_text())
    names = {e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "thread_name"}
    assert {"host", "link"} <= names
    fetch = next(e for e in timeline["traceEvents"] if e.get("cat") == "fetch")
    assert fetch["name"] == f"fetch {fetch['args']['layer']}:{fetch['args']['expert']}"
    assert fetch["args"]["bytes"] == 1536
    assert timeline["otherData"]["source"] == "simulated"


def test_perfect_prediction(files: list[str], capsys: Any) -> None:
    """Beside the bounds stands what the same settings would do with true predictions; one layer ahead without any."""
    values = shown(capsys, "simulate", *files, "--cache-ratio", "0.25")
    assert values["perfect_prediction"]["prefetch_depth"] == 1
    assert values["perfect_prediction"]["tpot_ms"] > values["bounds"]["compute_ms"]
    assert main(["simulate", *files, "--cache-ratio", "0.25"]) == 0
    assert "if predictions were always right, depth 1" in capsys.readouterr().out


def test_another_machine(files: list[str], tmp_path: Path, capsys: Any) -> None:
    """A slower link makes it slower, and every output says that it is assumed."""
    base = shown(capsys, "simulate", *files, "--cache-ratio", "0.25")
    slow = shown(capsys, "simulate", *files, "--cache-ratio", "0.25", "--link", "10MB/s", "--cpu-scale", "2")
    assert slow["tpot_ms"] > base["tpot_ms"]
    assert slow["sources"]["copy"] == "assumed"
    assert slow["machine"].endswith("assumed: link 0.01 GB/s, CPU experts x 2")
    assert slow["emulated_link_bytes_per_s"] is None
    assert main(["simulate", *files, "--cache-ratio", "0.25", "--machine", "pcie3x4"]) == 0
    assert "assumed: link 3.39 GB/s" in " ".join(capsys.readouterr().out.split())
    run = tmp_path / "run"
    flags = ["--slots", "14", "--out", str(tmp_path / "s.json"), "--link", "10MB/s"]
    tuned = shown(capsys, "tune", *files, *flags, "--run", str(run))
    assert "assumed: link 0.01 GB/s" in tuned["machine"]
    assert "assumed: link 0.01 GB/s" in json.loads((run / "profile.json").read_text())["meta"]["machine"]
    assert main(["tune", *files, *flags, "--run", str(tmp_path)]) == 2
    assert "holds the measured profile" in capsys.readouterr().err
    assert main(["simulate", *files, "--cache-ratio", "0.25", "--machine", "pcie9x4"]) == 2
    assert "'pcie9x4' is unknown: there are pcie3x4" in capsys.readouterr().err


def test_tune_writes_settings_and_a_run(files: list[str], tmp_path: Path, capsys: Any) -> None:
    out, run = tmp_path / "out" / "settings.toml", tmp_path / "run"
    values = shown(capsys, "tune", *files, "--slots", "14", "--out", str(out), "--run", str(run))
    best = Settings.load(out)
    assert best.model_dump(mode="json", exclude_defaults=True) == values["best"]["settings"]
    assert sum(best.slots_per_layer or ()) <= 14
    assert values["speedup"] >= 1
    assert sorted(p.name for p in run.iterdir()) == ["profile.json", "result.json", "settings.json", "trace.parquet"]
    assert Settings.load(run / "settings.json") == best

    result = json.loads((run / "result.json").read_text())
    assert result["speedup"] == pytest.approx(values["speedup"])
    assert result["default"]["measured_tpot_ms"] is None
    assert result["meta"]["link"] == "emulated, 2 GB/s"
    assert [c["chosen"] for c in result["candidates"]].count(True) == 1
    for side in ("default", "tuned"):
        times = result["breakdown"][side]["time_ms"]
        assert sum(times.values()) == pytest.approx(result[side]["predicted_tpot_ms"])

    page = shown(capsys, "report", str(run))
    assert page["file"] == str(run / "report.html")
    assert "not measured" in (run / "report.html").read_text()


def test_tune_shows_tables_that_fit(files: list[str], tmp_path: Path, capsys: Any) -> None:
    assert main(["tune", *files, "--vram", "40kB", "--out", str(tmp_path / "s.json")]) == 0
    text = capsys.readouterr().out
    assert "Best of each family" in text
    assert "bound" in text
    assert max(map(len, text.splitlines())) <= 100


def test_tune_is_deterministic(files: list[str], tmp_path: Path, capsys: Any) -> None:
    first, second = (shown(capsys, "tune", *files, "--slots", "14", "--out", str(tmp_path / "s.json")) for _ in "ab")
    assert first == second


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["simulate"], 2, "give --vram, --cache-ratio or settings that say"),
        (["simulate", "--vram", "1MiB", "--cache-ratio", "0.5"], 2, "--vram and --cache-ratio exclude each other"),
        (["simulate", "--cache-ratio", "1.5"], 2, "field 'cache_ratio' is 1.5"),
        (["simulate", "--vram", "lots"], 2, "--vram 'lots' is not understood"),
        (["simulate", "--vram", "1kB"], 3, "bytes) short"),
        (["simulate", "--settings", "no.toml"], 2, "no.toml: settings cannot be read: No such file"),
        (["tune", "--out", "s.json"], 2, "give the memory budget with --vram or --slots, one of them"),
        (["tune", "--out", "s.json", "--vram", "1kB"], 3, "bytes) short"),
        (["tune", "--out", "s.json", "--slots", "1"], 3, "bytes) short"),
        (["tune", "--slots", "9"], 2, "Missing option '--out'"),
    ],
)
def test_wrong_use(args: list[str], code: int, expected: str, files: list[str], tmp_path: Path, capsys: Any) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    given = [str(tmp_path / arg) if arg in ("s.json", "no.toml") else arg for arg in args]
    assert main([given[0], *files, *given[1:]]) == code
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert expected in told.err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_wrong_files(files: list[str], tmp_path: Path, make_profile: Any, capsys: Any) -> None:
    profile = tmp_path / "profile.json"
    good = profile.read_text()
    other = make_profile(shape_hash="0" * 12)
    for content, expected in (
        ("{", "profile.json: profile is not valid JSON"),
        (good.replace('"cores"', '"kernels"'), "profile.json: "),
        (good.replace('"schema_version": 1', '"schema_version": 7'), "schema_version is 7: this Foreload reads 1"),
        (other.model_dump_json(), "profile.json: measured for model shape 000000000000, but "),
    ):
        profile.write_text(content)
        assert main(["simulate", *files, "--cache-ratio", "0.5"]) == 2
        assert expected in capsys.readouterr().err


def test_a_profile_that_lacks_a_probe(files: list[str], tmp_path: Path, make_profile: Any, capsys: Any) -> None:
    whole = make_profile()
    kept = tuple(m for m in whole.measurements if m.probe != "attention")
    whole.model_copy(update={"measurements": kept}).save(tmp_path / "profile.json")
    assert main(["simulate", *files, "--cache-ratio", "0.5"]) == 2
    assert "no measurement of 'attention'" in capsys.readouterr().err


def test_an_unfinished_recording_is_simulated_but_not_kept(files: list[str], tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "trace.parquet"
    partial_folder(trace).mkdir()
    trace.rename(partial_folder(trace) / "part-00000.parquet")
    args = [*files[:3], str(partial_folder(trace))]
    assert shown(capsys, "simulate", *args, "--cache-ratio", "0.5")["tokens"] == 48
    out = ["--out", str(tmp_path / "s.json"), "--run", str(tmp_path / "run")]
    assert main(["tune", *args, "--slots", "14", *out]) == 2
    assert "foreload trace recover" in capsys.readouterr().err


def test_another_model(files: list[str], shape: Any, make_trace: Any, write_trace: Any, capsys: Any) -> None:
    other = replace(shape, hidden=32)
    write_trace(files[3], make_trace(model_shape=other))
    assert main(["simulate", *files, "--cache-ratio", "0.5"]) == 2
    assert f"trace.parquet is recorded from {other.named}" in capsys.readouterr().err


def test_sources() -> None:
    sources = {"copy": "measured", "attention": "interpolated", "wait": "assumed", "experts_gpu": "interpolated"}
    assert sources_text(sources) == "measured; interpolated: attention, experts gpu; assumed: wait"
