"""Timelines as Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open.

Each run (measured, simulated) is a process; its tracks host, gpu, link and cpu are threads of the same names. Work of
one track that overlaps in time gets further threads (`cpu 2`), since a viewer draws only nested events on one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from foreload.files import write_json
from foreload.traces.timings import TRACKS, Span, check_spans

LANES = 100  # thread numbers set aside per track
_ROUNDING_US = 0.002  # spans rounded to nanoseconds may touch


def perfetto_events(runs: Mapping[str, Sequence[Span]]) -> list[dict[str, Any]]:
    """Chrome trace events of `runs` (name -> spans): metadata first, then complete events in time order."""
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for pid, (run, spans) in enumerate(runs.items(), start=1):
        check_spans(spans)
        names.append(_metadata("process_name", pid, 0, {"name": run}))
        names.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        lanes = _lanes(spans)
        for tid, label in sorted({tid: label for _, tid, label in lanes}.items()):
            names.append(_metadata("thread_name", pid, tid, {"name": label}))
            names.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
        events += [_complete(span, pid, tid) for span, tid, _ in lanes]
    return names + events


def write_perfetto(path: Path, runs: Mapping[str, Sequence[Span]], meta: Mapping[str, Any]) -> None:
    """Write `runs` with their provenance `meta`, atomically; FileError if the file cannot be written."""
    write_json(path, {"displayTimeUnit": "ns", "otherData": dict(meta), "traceEvents": perfetto_events(runs)})


def _lanes(spans: Sequence[Span]) -> list[tuple[Span, int, str]]:
    """Each span with its thread number and label, in time order: the first lane of its track that is free."""
    busy_until: dict[str, list[float]] = {track: [] for track in TRACKS}
    placed = []
    for span in sorted(spans, key=lambda span: (span.start_us, -span.duration_us)):
        ends = busy_until[span.track]
        lane = next((i for i, end in enumerate(ends) if end <= span.start_us + _ROUNDING_US), len(ends))
        if lane == len(ends):
            ends.append(0.0)
        ends[lane] = span.start_us + span.duration_us
        label = span.track if lane == 0 else f"{span.track} {lane + 1}"
        placed.append((span, TRACKS.index(span.track) * LANES + lane + 1, label))
    return placed


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _complete(span: Span, pid: int, tid: int) -> dict[str, Any]:
    args = {field: getattr(span, field) for field in ("step", "layer", "expert") if getattr(span, field) >= 0}
    if span.bytes:
        args["bytes"] = span.bytes
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": span.start_us,
        "dur": span.duration_us,
        "args": args,
    }
