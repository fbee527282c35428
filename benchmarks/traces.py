"""Rows of a 48-layer recording written step by step, and read back with every check."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.inputs import trace
from benchmarks.timing import Rate, group, measure
from foreload.traces.io import TraceWriter, read_trace

ROWS = 4000


def run() -> list[Rate]:
    """Rows per second, writing first."""
    made = trace(ROWS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.parquet"

        def write() -> None:
            predicted = made.predictions["gate", 1]
            with TraceWriter(path, made.meta) as writer:
                for row in range(ROWS):
                    at = slice(row, row + 1)
                    writer.append(0, row, 1, row, 0, made.experts[at], predictions={("gate", 1): predicted[at]})

        rates = [measure("write, a row at a time", write, ROWS, "rows", 3)]
        rates.append(measure("read and check", lambda: read_trace(path), ROWS, "rows", 3))
    return group(rates)
