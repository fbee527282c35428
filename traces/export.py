"""Recordings as CSV, for other tools."""

from __future__ import annotations

import csv
from pathlib import Path

from foreload.files import atomic_path
from foreload.traces.io import TraceReader
from foreload.traces.schema import PHASES, Trace

HEAD = ("request", "step", "phase", "position", "token_id", "accepted", "layer", "rank", "expert", "weight")


def write_csv(path: Path, reader: TraceReader) -> int:
    """One line per row, layer (the model's number) and rank; `weight` is empty where none was recorded.

    Returns the number of lines without the head. FileError if the file cannot be written.
    """
    count = 0
    with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(HEAD)
        for trace in reader.groups():
            for row in range(trace.rows):
                lines = _lines(trace, row)
                writer.writerows(lines)
                count += len(lines)
    return count


def _lines(trace: Trace, row: int) -> list[tuple[object, ...]]:
    start = (
        int(trace.request[row]),
        int(trace.step[row]),
        PHASES[trace.phase[row]],
        int(trace.position[row]),
        int(trace.token_id[row]),
        int(trace.accepted[row]),
    )
    return [
        (*start, layer, rank, int(expert), "" if trace.weights is None else float(trace.weights[row, index, rank]))
        for index, layer in enumerate(trace.meta.layer_numbers)
        for rank, expert in enumerate(trace.experts[row, index])
    ]
