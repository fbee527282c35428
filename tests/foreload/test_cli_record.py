from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreload.cli import main
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
