"""Timings: what ran when, on which track, measured by the engine or computed by the simulator (design: section 7b)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from foreload.errors import FileError, InternalError
from foreload.files import atomic_path

TRACKS = ("host", "gpu", "link", "cpu")
KINDS = (
    "embed",
    "attention",
    "route",
    "predict",
    "plan",
    "submit",
    "fetch",
    "prefetch",
    "upload",
    "experts_gpu",
    "experts_cpu",
    "wait",
    "wait_cpu",
    "finish",
    "sync",
    "head",
    "draft",
    "sample",
    "prefill_layer",
    "prefill_expert",
)
METADATA_KEY = b"foreload_timings"


@dataclass(frozen=True)
class Span:
    """One piece of work: `kind` (of KINDS) on `track` (of TRACKS), times in microseconds since the run began.

    `step`, `layer` and `expert` are -1 where they do not apply; `bytes` is what was moved.
    """

    track: str
    kind: str
    name: str
    start_us: float
    duration_us: float
    step: int = -1
    layer: int = -1
    expert: int = -1
    bytes: int = 0


class NsEvent(Protocol):
    """A span as engine and simulator keep it: integer nanoseconds, no name."""

    @property
    def stream(self) -> str:
        """The track."""

    @property
    def kind(self) -> str:
        """Of KINDS."""

    @property
    def start_ns(self) -> int:
        """Since the run began."""

    @property
    def duration_ns(self) -> int:
        """At least 0."""

    @property
    def step(self) -> int:
        """-1 where it does not apply."""

    @property
    def layer(self) -> int:
        """-1 where it does not apply."""

    @property
    def expert(self) -> int:
        """-1 where it does not apply."""

    @property
    def bytes(self) -> int:
        """Moved."""


def spans_of(events: Iterable[NsEvent]) -> list[Span]:
    """Events in nanoseconds as spans, named `kind layer` or `kind layer:expert`."""
    return [
        Span(
            track=event.stream,
            kind=event.kind,
            name=span_name(event.kind, event.layer, event.expert),
            start_us=event.start_ns / 1000,
            duration_us=event.duration_ns / 1000,
            step=event.step,
            layer=event.layer,
            expert=event.expert,
            bytes=event.bytes,
        )
        for event in events
    ]


def span_name(kind: str, layer: int = -1, expert: int = -1) -> str:
    """What a timeline shows on a span."""
    if layer < 0:
        return kind
    return f"{kind} {layer}" if expert < 0 else f"{kind} {layer}:{expert}"


@dataclass(frozen=True)
class Timings:
    """The spans of one run and its provenance; `meta["source"]` is `measured` or `simulated`."""

    spans: tuple[Span, ...]
    meta: Mapping[str, str]


_LABEL = pa.dictionary(pa.int16(), pa.string())
_TYPES: Mapping[str, Any] = {
    "track": _LABEL,
    "kind": _LABEL,
    "name": pa.string(),
    "start_us": pa.float64(),
    "duration_us": pa.float64(),
    "step": pa.int32(),
    "layer": pa.int16(),
    "expert": pa.int16(),
    "bytes": pa.int64(),
}
_COLUMN = {"track": "stream"}  # the file's name of a field, where it differs


def check_spans(spans: Sequence[Span]) -> None:
    """Raise InternalError naming the first span of an unknown track or kind, or with a negative duration."""
    for span in spans:
        if span.track not in TRACKS or span.kind not in KINDS:
            raise InternalError(f"timings: no track {span.track!r} or kind {span.kind!r}")
        if not span.duration_us >= 0:
            raise InternalError(f"timings: {span.name!r} takes {span.duration_us} us")


def write_timings(path: Path, timings: Timings) -> None:
    """Write as Parquet (columns of design section 7b, and `name`), atomically; FileError if it cannot be written."""
    check_spans(timings.spans)
    schema = pa.schema(
        [pa.field(_COLUMN.get(name, name), kind, nullable=False) for name, kind in _TYPES.items()],
        metadata={METADATA_KEY: json.dumps(dict(timings.meta)).encode()},
    )
    columns = [
        pa.array([getattr(span, name) for span in timings.spans], pa.string() if kind == _LABEL else kind).cast(kind)
        for name, kind in _TYPES.items()
    ]
    with atomic_path(path) as partial, partial.open("wb") as file:
        pq.write_table(pa.table(columns, schema=schema), file, compression="zstd", write_page_checksum=True)


def read_timings(path: Path) -> Timings:
    """The timings in `path`; FileError in one line if missing, not Parquet, truncated or of another origin."""
    try:
        os.stat(path)
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except FileNotFoundError as error:
        raise FileError(f"{path}: timings cannot be read: {error.strerror}") from error
    except (pa.ArrowException, OSError) as error:
        line = " ".join(str(error).split())[:160]
        raise FileError(f"{path}: timings are not a Parquet file, or truncated: {line}") from error
    meta = (table.schema.metadata or {}).get(METADATA_KEY)
    names = [_COLUMN.get(field.name, field.name) for field in fields(Span)]
    if meta is None or any(name not in table.column_names for name in names):
        raise FileError(f"{path}: no Foreload timings: they have columns {', '.join(names)}")
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    return Timings(tuple(Span(*row) for row in rows), json.loads(meta))
