"""Columns of a trace file (design: section 7b): from arrays to Arrow tables, and back with every value checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from foreload.errors import FileError, InternalError
from foreload.traces.schema import PHASES, Trace, TraceMeta

METADATA_KEY = b"foreload"
_SCALARS: Mapping[str, tuple[Any, Any]] = {
    "request": (pa.int32(), np.int32),
    "step": (pa.int32(), np.int32),
    "position": (pa.int32(), np.int32),
    "token_id": (pa.int32(), np.int32),
    "accepted": (pa.bool_(), np.bool_),
}
_PHASE = pa.dictionary(pa.int8(), pa.string())


def _list_type(value: Any, width: int) -> Any:
    return pa.list_(pa.field("element", value, nullable=False), width)


def prediction_columns(meta: TraceMeta) -> dict[tuple[str, int], dict[int, str]]:
    """Per (predictor, depth): MoE layer index -> column. Layers with no layer `depth` before them have none."""
    numbers = meta.layer_numbers
    return {
        (p.predictor, p.depth): {
            index: f"p{numbers[index]}_{p.predictor}_{p.depth}" for index in range(p.depth, len(numbers))
        }
        for p in meta.predictions
    }


def arrow_schema(meta: TraceMeta) -> Any:
    """The Arrow schema of a trace with this metadata."""
    fields = [
        pa.field(name, _PHASE if name == "phase" else _SCALARS[name][0], nullable=False)
        for name in ("request", "step", "phase", "position", "token_id", "accepted")
    ]
    numbers = meta.layer_numbers
    fields += [pa.field(f"e{n}", _list_type(pa.int16(), meta.top_k), nullable=False) for n in numbers]
    if meta.has_weights:
        fields += [pa.field(f"w{n}", _list_type(pa.float16(), meta.top_k), nullable=False) for n in numbers]
    widths = {(p.predictor, p.depth): p.width for p in meta.predictions}
    for key, columns in prediction_columns(meta).items():
        item = _list_type(pa.int16(), widths[key])
        fields += [pa.field(name, item, nullable=False) for name in columns.values()]
    return pa.schema(fields, metadata={METADATA_KEY: meta.model_dump_json().encode()})


def to_table(trace: Trace, schema: Any) -> Any:
    """`trace` as an Arrow table of `schema`, which is `arrow_schema(trace.meta)`."""
    columns: dict[str, Any] = {name: pa.array(getattr(trace, name), kind) for name, (kind, _) in _SCALARS.items()}
    columns["phase"] = pa.DictionaryArray.from_arrays(pa.array(trace.phase, pa.int8()), pa.array(PHASES))
    blocks: dict[str, NDArray[Any]] = {}
    for index, number in enumerate(trace.meta.layer_numbers):
        blocks[f"e{number}"] = trace.experts[:, index]
        if trace.weights is not None:
            blocks[f"w{number}"] = trace.weights[:, index]
    for key, names in prediction_columns(trace.meta).items():
        blocks.update({name: trace.predictions[key][:, index] for index, name in names.items()})
    for name, block in blocks.items():
        flat = pa.array(np.ascontiguousarray(block).reshape(-1))
        columns[name] = pa.FixedSizeListArray.from_arrays(flat, type=schema.field(name).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def check_schema(found: Any, meta: TraceMeta, path: str) -> None:
    """Raise FileError if a column is missing, unknown or of another type or width than `meta` says."""
    expected = arrow_schema(meta)
    for field in expected:
        if field.name not in found.names:
            raise FileError(f"{path}: column {field.name!r} is missing")
        kind = found.field(field.name).type
        if not _same_type(kind, field.type):
            raise FileError(f"{path}: column {field.name!r} is {kind}: the metadata ask for {field.type}")
    unknown = [name for name in found.names if name not in expected.names]
    if unknown:
        raise FileError(f"{path}: column {unknown[0]!r} is not in the metadata: columns are {_shown(expected.names)}")


def _same_type(found: Any, expected: Any) -> bool:
    if pa.types.is_dictionary(expected):
        return bool(pa.types.is_string(found) or (pa.types.is_dictionary(found) and found.value_type == pa.string()))
    if not pa.types.is_fixed_size_list(expected):
        return bool(found == expected)
    same = pa.types.is_fixed_size_list(found) and found.list_size == expected.list_size
    return bool(same and found.value_type == expected.value_type)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


class TableReader:
    """Arrow tables of one recording, in order, as checked `Trace` values.

    Each check that fails raises FileError with the file, the row (counted from 0 over the file) and the column.
    """

    def __init__(self, meta: TraceMeta, path: str) -> None:
        self.meta = meta
        self.path = path
        self._row = 0
        self._last: tuple[int, int, int] | None = None  # step, request, phase of the row before

    def read(self, table: Any) -> Trace:
        """The next rows of the recording."""
        meta = self.meta
        scalars = {name: self._scalar(table, name, dtype) for name, (_, dtype) in _SCALARS.items()}
        phase = self._phase(table)
        self._check_steps(scalars["step"], scalars["request"], phase)
        numbers = meta.layer_numbers
        experts = self._block(table, [f"e{n}" for n in numbers], meta.top_k, np.int16)
        for index, number in enumerate(numbers):
            self._check_experts(experts[:, index], f"e{number}", 0)
        weights = None
        if meta.has_weights:
            weights = self._block(table, [f"w{n}" for n in numbers], meta.top_k, np.float16)
        trace = Trace(
            meta=meta,
            phase=phase,
            **scalars,
            experts=experts,
            weights=weights,
            predictions=self._predictions(table),
        )
        self._row += trace.rows
        return trace

    def _predictions(self, table: Any) -> dict[tuple[str, int], NDArray[np.int16]]:
        widths = {(p.predictor, p.depth): p.width for p in self.meta.predictions}
        found = {}
        for key, columns in prediction_columns(self.meta).items():
            block = np.full((table.num_rows, self.meta.moe_layers, widths[key]), -1, np.int16)
            for index, name in columns.items():
                block[:, index] = self._lists(table, name, widths[key])
                self._check_experts(block[:, index], name, -1)
            found[key] = block
        return found

    def _fail(self, row: int, column: str, problem: str) -> NoReturn:
        raise FileError(f"{self.path}: row {self._row + row}, column {column!r}: {problem}")

    def _column(self, table: Any, name: str) -> Any:
        column = table[name].combine_chunks()
        if column.null_count:
            self._fail(int(np.argmax(column.is_null().to_numpy(zero_copy_only=False))), name, "is empty")
        return column

    def _scalar(self, table: Any, name: str, dtype: Any) -> NDArray[Any]:
        values: NDArray[Any] = self._column(table, name).to_numpy(zero_copy_only=False).astype(dtype)
        lowest = -1 if name == "token_id" else 0
        if dtype is np.int32 and len(values) and values.min() < lowest:
            row = int(np.argmax(values < lowest))
            self._fail(row, name, f"{values[row]} is negative")
        return values

    def _phase(self, table: Any) -> NDArray[np.int8]:
        column = self._column(table, "phase")
        text = column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column
        code = pc.index_in(text, value_set=pa.array(PHASES))
        if code.null_count:
            row = int(np.argmax(code.is_null().to_numpy(zero_copy_only=False)))
            self._fail(row, "phase", f"{text[row].as_py()!r} is unknown: phases are {', '.join(PHASES)}")
        values: NDArray[np.int8] = code.to_numpy(zero_copy_only=False).astype(np.int8)
        return values

    def _check_steps(self, step: NDArray[np.int32], request: NDArray[np.int32], phase: NDArray[np.int8]) -> None:
        """Steps do not decrease, and one step has one request and one phase."""
        rows = np.stack([step, request, phase.astype(np.int32)], axis=1)
        if self._last is not None:
            rows = np.concatenate([np.asarray([self._last], np.int32), rows])
        offset = len(rows) - len(step)
        change = np.diff(rows, axis=0)
        if (change[:, 0] < 0).any():
            at = int(np.argmax(change[:, 0] < 0))
            self._fail(at + 1 - offset, "step", f"{rows[at + 1, 0]} follows {rows[at, 0]}: steps may not decrease")
        for index, name in ((1, "request"), (2, "phase")):
            mixed = (change[:, 0] == 0) & (change[:, index] != 0)
            if mixed.any():
                at = int(np.argmax(mixed))
                self._fail(at + 1 - offset, name, f"changes within step {rows[at, 0]}")
        if len(rows):
            self._last = (int(rows[-1, 0]), int(rows[-1, 1]), int(rows[-1, 2]))

    def _lists(self, table: Any, name: str, width: int) -> NDArray[Any]:
        column = self._column(table, name)
        flat = column.flatten()
        if flat.null_count:
            row = int(np.argmax(flat.is_null().to_numpy(zero_copy_only=False))) // width
            self._fail(row, name, "has an empty entry")
        values: NDArray[Any] = flat.to_numpy(zero_copy_only=False).reshape(-1, width)
        return values

    def _block(self, table: Any, names: list[str], width: int, dtype: Any) -> NDArray[Any]:
        block: NDArray[Any] = np.empty((table.num_rows, len(names), width), dtype)
        for index, name in enumerate(names):
            block[:, index] = self._lists(table, name, width)
        return block

    def _check_experts(self, ids: NDArray[np.int16], name: str, lowest: int) -> None:
        """Ids are in [lowest, experts) and, apart from -1 for none, distinct in a row."""
        outside = (ids < lowest) | (ids >= self.meta.experts)
        if outside.any():
            row, rank = np.argwhere(outside)[0]
            self._fail(int(row), name, f"expert {ids[row, rank]} is outside 0 to {self.meta.experts - 1}")
        ordered = np.sort(ids, axis=1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        if twice.any():
            row, rank = np.argwhere(twice)[0]
            self._fail(int(row), name, f"expert {ordered[row, rank]} is there twice")


def check_rows(trace: Trace) -> None:
    """Raise InternalError if rows about to be written do not have the shapes that their metadata promise."""
    meta = trace.meta
    expected: dict[str, tuple[NDArray[Any], int]] = {"experts": (trace.experts, meta.top_k)}
    if meta.has_weights:
        if trace.weights is None:
            raise InternalError("trace: weights are announced and were not given")
        expected["weights"] = (trace.weights, meta.top_k)
    for p in meta.predictions:
        expected[f"predictions {p.predictor} {p.depth}"] = (trace.predictions[p.predictor, p.depth], p.width)
    for name, (block, width) in expected.items():
        if block.shape != (trace.rows, meta.moe_layers, width):
            wanted = (trace.rows, meta.moe_layers, width)
            raise InternalError(f"trace: {name} have shape {block.shape}: rows, layers, width are {wanted}")
    for p in meta.predictions:
        if (trace.predictions[p.predictor, p.depth][:, : p.depth] != -1).any():
            raise InternalError(f"trace: predictions {p.predictor} {p.depth} for a layer with none {p.depth} before it")
