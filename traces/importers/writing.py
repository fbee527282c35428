"""From an importer's rows to a trace file, with provenance that says what is not known."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreload import __version__
from foreload.errors import UsageError
from foreload.traces.histogram import Histogram, write_histogram
from foreload.traces.importers.base import UNKNOWN_TOKEN, Block, Blocks, Importer, Source, check_block
from foreload.traces.io import TraceWriter, partial_folder
from foreload.traces.schema import DECODE, TraceMeta

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Imported:
    """What was written: `order` is `recorded` (a recording) or `unknown` (a histogram, which has no rows)."""

    order: str
    rows: int
    requests: int
    steps: int
    notes: tuple[str, ...]


def import_with(
    importer: Importer,
    name: str,
    source: Source,
    out: Path,
    *,
    model: str = UNKNOWN,
    subjects: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Imported:
    """Write what `importer` reads from `source` to `out`; `name` becomes the recording's source.

    One subject stands for every request, several for one each. FileError names the first row that is wrong, and
    nothing is written then; UsageError if subjects and requests differ in number.
    """
    found = importer(source)
    if not isinstance(found, Blocks):
        if subjects:
            raise UsageError("--subject: a histogram has no requests")
        meta = _meta(name, source, model, (), order="unknown")
        write_histogram(out, Histogram(meta, found.counts))
        return Imported("unknown", 0, 0, 0, tuple(source.notes))
    if len(subjects) == 1:
        subjects = tuple(subjects) * len({block.request for block in found.rows})
        found = importer(source)
        assert isinstance(found, Blocks)
    return _write(found, source, out, _meta(name, source, model, subjects, has_weights=found.has_weights), progress)


def _write(
    found: Blocks, source: Source, out: Path, meta: TraceMeta, progress: Callable[[int], None] | None
) -> Imported:
    requests: set[int] = set()
    steps = 0
    try:
        with TraceWriter(out, meta) as writer:
            for block in found.rows:
                check_block(source, block)
                requests.add(block.request)
                steps = _append(writer, block, steps)
                if progress is not None:
                    progress(writer.rows)
            if not writer.rows:
                raise source.error("", "holds no rows to import")
            if meta.subjects and len(meta.subjects) != len(requests):
                raise UsageError(f"--subject: {len(meta.subjects)} subjects for {len(requests)} requests: one each")
    except BaseException:
        shutil.rmtree(partial_folder(out), ignore_errors=True)
        raise
    return Imported("recorded", writer.rows, len(requests), steps, tuple(source.notes))


def _append(writer: TraceWriter, block: Block, steps: int) -> int:
    """Append a block, after `steps` steps; returns the number of steps with it."""
    for rows in _step_rows(block):
        if not block.same_step:
            steps += 1
        writer.append(
            block.request,
            steps - 1,
            block.phase,
            block.position[rows],
            UNKNOWN_TOKEN if block.token_id is None else block.token_id[rows],
            block.experts[rows],
            weights=None if block.weights is None else block.weights[rows],
        )
    return steps


def _step_rows(block: Block) -> Iterator[slice]:
    if block.phase != DECODE:
        yield slice(None)
        return
    for row in range(len(block.position)):
        yield slice(row, row + 1)


def _meta(name: str, source: Source, model: str, subjects: Sequence[str], **fields: Any) -> TraceMeta:
    shape = source.shape
    return TraceMeta.of(
        shape,
        model=model,
        weights_hash=UNKNOWN,
        tokenizer_hash=UNKNOWN,
        source=f"import {name}",
        sampling={},
        machine=UNKNOWN,
        software={"foreload": __version__, "numpy": np.__version__},
        seed=-1,
        subjects=tuple(subjects),
        **fields,
    )
