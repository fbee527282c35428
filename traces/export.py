"""Recordings as CSV, and the use of their experts for sglang-kt."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreload.errors import FileError
from foreload.files import atomic_path
from foreload.shape import ModelShape
from foreload.traces.histogram import Histogram
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


def write_sglang_kt(path: Path, histogram: Histogram) -> int:
    """Expert frequencies for sglang-kt's `--init-expert-location`; returns the number of layers.

    A `.pt` file with the dict {"logical_count": int32 [1, layers, experts]}. Dense layers are zero; FileError for a MoE
    layer without a count (readers reject it) or a count over int32.
    """
    import torch

    shape = histogram.meta.model_shape()
    table = sglang_kt_counts(path, shape, histogram.counts)
    with atomic_path(path) as partial, partial.open("wb") as file:
        torch.save({"logical_count": torch.from_numpy(table)}, file)
    return shape.layers


def sglang_kt_counts(name: Path | str, shape: ModelShape, counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Counts [L, E] of the MoE layers as [1, layers, E] of the decoder; FileError, naming the file, as above."""
    unused = np.flatnonzero(~counts.any(axis=1))
    if len(unused):
        layer = shape.moe_layers[unused[0]]
        raise FileError(f"{name}: MoE layer {layer} was never used: sglang-kt needs counts in every MoE layer")
    if counts.max() > np.iinfo(np.int32).max:
        raise FileError(f"{name}: a count of {counts.max()} does not fit int32")
    table = np.zeros((1, shape.layers, shape.experts), np.int32)
    table[0, list(shape.moe_layers)] = counts
    return table


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
