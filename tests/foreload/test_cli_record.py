from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from foreload.cli import main
from foreload.cli.run_model import warm_facts
from foreload.traces.io import read_trace
from foreload.traces.timings import read_timings


@pytest.mark.integration
def test_record_with_timings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, timings = tmp_path / "trace.parquet", tmp_path / "timings.parquet"
    flags = ["--requests", "2", "--tokens", "6", "--prompt-tokens", "12", "--vram", "16MiB", "--device", "cpu"]
    assert main(["record", "mini", "--out", str(out), "--timings", str(timings), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    trace, measured = read_trace(out), read_timings(timings)
    assert found["decode_tokens"] == trace.decode_rows == 10
    assert measured.meta["source"] == "measured"
    assert {span.step for span in measured.spans} == set(range(10)), "steps are counted over both requests"
    assert sum(span.kind == "head" for span in measured.spans) == 10
    assert all(a.start_us <= b.start_us for a, b in zip(measured.spans, measured.spans[1:], strict=False))


@pytest.mark.integration
def test_record_and_run_with_drafts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, flags = str(tmp_path / "windows.parquet"), ["--vram", "18MiB", "--device", "cpu", "--json"]
    draft = ["--draft", "ngram", "--gamma", "3"]
    assert main(["record", "mini", "--out", out, "--requests", "2", "--tokens", "24", *draft, *flags]) == 0
    recorded = json.loads(capsys.readouterr().out)
    assert main(["trace", "info", out, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["draft"] == {"kind": "ngram", "gamma": 3}
    assert held["decode_rows"] == recorded["decode_tokens"] < held["rows"]
    said = []
    for chosen in ([], draft):
        run = ["run", "mini", "--prompt", "The kernel is the kernel of the", "--tokens", "40", *chosen, *flags]
        assert main(run) == 0
        said.append(json.loads(capsys.readouterr().out))
    plain, drafted = said
    assert drafted["text"] == plain["text"]
    assert drafted["tokens_per_step"] > plain["tokens_per_step"] == 1.0
    assert len(drafted["acceptance"]) == 3
    assert plain["acceptance"] == []
    by_model = ["--draft", "model", "--draft-model", "draft", "--gamma", "2"]
    assert (
        main(["run", "mini", "--prompt", "The kernel is the kernel of the", "--tokens", "40", *by_model, *flags]) == 0
    )
    assert json.loads(capsys.readouterr().out)["text"] == plain["text"]
    assert main(["run", "mini", "--prompt", "a", "--gamma", "3", *flags]) == 2
    assert "--gamma 3 goes with a draft" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.integration
def test_run_shows_bytes_in_binary_units(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "mini", "--prompt", "The", "--tokens", "3", "--vram", "16MiB", "--device", "cpu"]
    assert main(run) == 0
    shown = capsys.readouterr().out
    assert re.search(r"copied +[\d.]+ [KM]iB per token", shown)
    assert not re.search(r"\d [kMG]B\b", shown)
    assert warm_facts({"bytes": 3 << 20, "ms": 1.5}) == {"loaded before": "3 MiB in 1.5 ms"}
