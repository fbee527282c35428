"""Histograms: how often each expert was used, without order. Parquet with one row per layer and expert.

Columns `layer` (the model's number), `expert` and `tokens`; metadata as those of a recording, with `order` unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from foreload.errors import FileError, InternalError, MismatchError
from foreload.files import atomic_path
from foreload.shape import ModelShape
from foreload.traces.columns import METADATA_KEY
from foreload.traces.io import TraceReader, read_provenance
from foreload.traces.schema import TraceMeta

_COLUMNS = {"layer": pa.int32(), "expert": pa.int32(), "tokens": pa.int64()}


@dataclass(frozen=True)
class Histogram:
    """Tokens that each expert of each MoE layer has served: counts [L, experts]."""

    meta: TraceMeta
    counts: NDArray[np.int64]


def write_histogram(path: Path, histogram: Histogram) -> None:
    """Write atomically; FileError if the file cannot be written."""
    meta, counts = histogram.meta, histogram.counts
    if meta.order != "unknown" or counts.shape != (meta.moe_layers, meta.experts):
        raise InternalError(f"histogram: order {meta.order}, shape {counts.shape}")
    layer, expert = np.meshgrid(meta.layer_numbers, np.arange(meta.experts), indexing="ij")
    schema = pa.schema(
        [pa.field(name, kind, nullable=False) for name, kind in _COLUMNS.items()],
        metadata={METADATA_KEY: meta.model_dump_json().encode()},
    )
    columns = [
        pa.array(values.reshape(-1), kind)
        for values, kind in zip((layer, expert, counts), _COLUMNS.values(), strict=True)
    ]
    with atomic_path(path) as partial, partial.open("wb") as file:
        pq.write_table(pa.table(columns, schema=schema), file, compression="zstd", write_page_checksum=True)


def read_histogram(path: Path) -> Histogram:
    """The histogram in `path`, or the counts of a recording over all its rows; FileError if it is neither."""
    meta = read_provenance(path)
    if meta.order == "recorded":
        with TraceReader(path) as reader:
            return _of_recording(reader)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            table = file.read()
    except (pa.ArrowException, OSError) as error:
        raise FileError(f"{path}: histogram is truncated or corrupt: {' '.join(str(error).split())[:160]}") from error
    return Histogram(meta, _checked(path, meta, table))


def warm_counts(path: Path, shape: ModelShape) -> NDArray[np.int64]:
    """Uses of each expert [MoE layers, experts] in a recording or histogram; MismatchError if of another shape."""
    found = read_histogram(path)
    if found.meta.shape_hash != shape.hash:
        raise MismatchError(
            f"{path}: recorded from model shape {found.meta.model_shape().named}, this model is {shape.named}: "
            "a warm start needs a recording of the same model"
        )
    return found.counts


def uses(routed: NDArray[np.integer], experts: int) -> NDArray[np.int64]:
    """How often each expert was routed to [layers, experts], of routed [rows, layers, k]."""
    return np.stack([np.bincount(routed[:, at].ravel(), minlength=experts) for at in range(routed.shape[1])])


def _of_recording(reader: TraceReader) -> Histogram:
    meta = reader.meta
    counts = np.zeros((meta.moe_layers, meta.experts), np.int64)
    for trace in reader.groups():
        counts += uses(trace.experts, meta.experts)
    return Histogram(meta.model_copy(update={"order": "unknown", "has_weights": False, "predictions": ()}), counts)


def _checked(path: Path, meta: TraceMeta, table: Any) -> NDArray[np.int64]:
    """The counts, if every layer and expert is there once, in order."""
    for name, kind in _COLUMNS.items():
        if name not in table.column_names or table.schema.field(name).type != kind:
            raise FileError(f"{path}: histogram: column {name!r} is missing or is not {kind}")
        if table[name].null_count:
            raise FileError(f"{path}: histogram: column {name!r} has an empty entry")
    layer, expert, tokens = (table[name].to_numpy() for name in _COLUMNS)
    expected = np.repeat(meta.layer_numbers, meta.experts), np.tile(np.arange(meta.experts), meta.moe_layers)
    if len(layer) != len(expected[0]) or (layer != expected[0]).any() or (expert != expected[1]).any():
        raise FileError(f"{path}: histogram: its rows are not every expert of every MoE layer, in order")
    if (tokens < 0).any():
        raise FileError(f"{path}: row {int(np.argmax(tokens < 0))}, column 'tokens': {tokens.min()} is negative")
    return np.asarray(tokens, np.int64).reshape(meta.moe_layers, meta.experts)
