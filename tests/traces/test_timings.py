"""Timings and their timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreload.errors import FileError, InternalError
from foreload.traces.perfetto import perfetto_events, write_perfetto
from foreload.traces.timings import Span, Timings, read_timings, write_timings

pytestmark = pytest.mark.unit

SPANS = (
    Span("gpu", "attention", "attention 0", 0.0, 10.0, step=0, layer=0),
    Span("link", "fetch", "fetch 0:3", 10.0, 5.5, step=0, layer=0, expert=3, bytes=4096),
    Span("cpu", "experts_cpu", "expert 0:4", 10.0, 4.0, step=0, layer=0, expert=4),
    Span("cpu", "experts_cpu", "expert 0:5", 12.0, 4.0, step=0, layer=0, expert=5),
    Span("gpu", "experts_gpu", "experts 0", 15.5, 2.0, step=0, layer=0),
    Span("host", "plan", "plan 0", 9.0, 1.0, step=0, layer=0),
)


def test_round_trip(tmp_path: Path) -> None:
    timings = Timings(SPANS, {"source": "measured", "machine": "here"})
    write_timings(tmp_path / "t.parquet", timings)
    assert read_timings(tmp_path / "t.parquet") == timings
    assert pq.ParquetFile(tmp_path / "t.parquet").schema_arrow.names == [
        "stream", "kind", "name", "start_us", "duration_us", "step", "layer", "expert", "bytes",
    ]  # fmt: skip


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no.parquet: timings cannot be read: No such file"):
        read_timings(tmp_path / "no.parquet")
    (tmp_path / "x.parquet").write_text("hello")
    with pytest.raises(FileError, match=r"x.parquet: timings are not a Parquet file"):
        read_timings(tmp_path / "x.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "y.parquet")
    with pytest.raises(FileError, match=r"y.parquet: no Foreload timings: they have columns stream, kind"):
        read_timings(tmp_path / "y.parquet")


def test_spans_are_checked() -> None:
    with pytest.raises(InternalError, match="no track 'disk'"):
        perfetto_events({"run": [Span("disk", "fetch", "x", 0, 1)]})
    with pytest.raises(InternalError, match="takes -1 us"):
        perfetto_events({"run": [Span("link", "fetch", "x", 0, -1)]})


def test_timeline(tmp_path: Path) -> None:
    write_perfetto(tmp_path / "t.json", {"measured": SPANS, "simulated": SPANS[:2]}, {"machine": "here"})
    written = json.loads((tmp_path / "t.json").read_text())
    assert written["otherData"] == {"machine": "here"}
    events = written["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")}
    assert names == {
        (1, "measured"), (1, "host"), (1, "gpu"), (1, "link"), (1, "cpu"), (1, "cpu 2"),
        (2, "simulated"), (2, "gpu"), (2, "link"),
    }  # fmt: skip
    work = [e for e in events if e["ph"] == "X"]
    assert len(work) == 8
    assert all({"name", "cat", "pid", "tid", "ts", "dur", "args"} <= e.keys() for e in work)
    fetch = next(e for e in work if e["cat"] == "fetch")
    assert (fetch["ts"], fetch["dur"]) == (10.0, 5.5)
    assert fetch["args"] == {"step": 0, "layer": 0, "expert": 3, "bytes": 4096}


def test_work_of_one_thread_does_not_overlap() -> None:
    events = [e for e in perfetto_events({"run": SPANS}) if e["ph"] == "X"]
    free_at: dict[int, float] = {}
    for event in events:
        assert event["ts"] >= free_at.get(event["tid"], 0.0)
        free_at[event["tid"]] = event["ts"] + event["dur"]
