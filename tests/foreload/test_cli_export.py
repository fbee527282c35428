from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foreload.cli import main
from foreload.settings import Settings

pytestmark = pytest.mark.unit


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    Settings(cache_ratio=0.5, eviction="lfu").save(path)
    return path


def run(capsys: Any, *args: str) -> dict[str, Any]:
    assert main(["export", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_command_for_a_bundled_model(settings: Path, capsys: Any) -> None:
    found = run(capsys, str(settings), "--to", "llama.cpp", "--model", "mini", "--context", "2048")
    assert found["command"][:3] == ["llama-server", "-m", "mini.gguf"]
    assert found["shell"].count("-ot") == 1
    assert found["written"] == []
    assert "checked_against" in found


def test_model_of_the_recording_beside_the_settings(
    settings: Path, make_trace: Any, write_trace: Any, capsys: Any
) -> None:
    assert main(["export", str(settings), "--to", "sglang-kt"]) == 2
    assert "which model?" in capsys.readouterr().err
    write_trace(settings.parent / "trace.parquet", make_trace(requests=6, tokens=40))
    out = settings.parent / "kt"
    found = run(capsys, str(settings), "--to", "sglang-kt", "--out", str(out))
    assert found["written"] == [str(out / "expert_counts.pt"), str(out / "sglang-kt.sh")]
    script = (out / "sglang-kt.sh").read_text()
    assert script.startswith("#!/bin/sh\n# checked against: sglang-kt")
    assert f"--init-expert-location {out}/expert_counts.pt" in script
    assert "# eviction=lfu: sglang-kt has no counterpart" in script
    assert main(["export", str(settings), "--to", "sglang-kt"]) == 2
    assert "give a folder with --out" in capsys.readouterr().err


def test_own_settings_by_default(settings: Path, capsys: Any) -> None:
    found = run(capsys, str(settings), "--model", "mini")
    assert Settings.model_validate_json(found["contents"]["settings.json"]) == Settings.load(settings)


def test_tables_name_version_and_notes(settings: Path, capsys: Any) -> None:
    assert main(["export", str(settings), "--to", "ik_llama", "--model", "mini"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("llama-server -m mini.gguf")
    assert "checked against ik_llama.cpp as of 2026-11" in shown
    assert "eviction=lfu: ik_llama has no counterpart" in shown


def test_explaining_a_command(capsys: Any) -> None:
    command = r"llama-server -m m.gguf -ngl all -c 512 -ot 'blk\.[0-3]\.ffn_.*_exps=CPU'"
    found = run(capsys, "--check", command, "--model", "mini")
    on_cpu = [t for t in found["tensors"] if t["device"] == "CPU" and t["because"] != "default"]
    assert {t["layer"] for t in on_cpu} == {0, 1, 2, 3}
    assert sum(t["bytes"] for t in found["tensors"] if t["device"] == "CUDA0") < found["bytes"]["CUDA0"]
    assert any("-fit off" in warning for warning in found["warnings"])
    assert main(["export", "--check", command, "--model", "mini"]) == 0
    shown = capsys.readouterr().out
    assert "0 to 3" in shown
    assert "warning: -fit is on by default" in shown


@pytest.mark.parametrize(
    "command", ["llama-server -m x", "python3 -m sglang.launch_server --kt-weight-path x", "vllm serve x", "ft serve"]
)
def test_flags_that_are_not_understood_are_named(command: str, capsys: Any) -> None:
    command += " --frob --port=8000 --seed -1 --frob"
    found = run(capsys, "--check", command, "--model", "mini")
    assert [flag for flag in found["not_read"] if flag != "--kt-weight-path"] == [
        "--frob",
        "--port",
        "--seed",
    ]
    assert main(["export", "--check", command, "--model", "mini"]) == 0
    assert "--frob, --port, --seed\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "one of them"),
        (["{settings}", "--check", "llama-server"], 2, "one of them"),
        (["{settings}", "--to", "exllama", "--model", "mini"], 2, "'exllama' is unknown"),
        (["{settings}", "--to", "llama.cpp", "--model", "mini", "--gpu", "2MiB"], 3, "short"),
        (["{settings}", "--to", "llama.cpp", "--model", "mini", "--gpu", "lots"], 2, "--gpu 'lots'"),
        (["--check", "ollama run x", "--model", "mini"], 2, "whose command is this?"),
        (["--check", "x", "--to", "device-map", "--model", "mini"], 2, "nothing to explain"),
    ],
)
def test_wrong_use(args: list[str], code: int, message: str, settings: Path, capsys: Any) -> None:
    assert main(["export", *(arg.format(settings=settings) for arg in args)]) == code
    assert message in capsys.readouterr().err


def test_a_recording_of_another_model_is_refused(
    settings: Path, make_trace: Any, write_trace: Any, capsys: Any
) -> None:
    write_trace(settings.parent / "other.parquet", make_trace())
    trace = str(settings.parent / "other.parquet")
    assert main(["export", str(settings), "--to", "sglang-kt", "--model", "mini", "--trace", trace]) == 2
    assert "recorded from model shape" in capsys.readouterr().err
