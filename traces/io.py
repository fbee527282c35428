"""Trace files: written as they are recorded, read back whole or group by group (design: section 7b).

While a recording runs, complete part files gather in the folder `<name>.partial` beside it; `close` merges them into
the final file. A recording that was killed leaves every flushed part there: read the folder as it is, or `recover` it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from foreload.errors import FileError
from foreload.files import atomic_path, parse_model
from foreload.traces.columns import METADATA_KEY, TableReader, arrow_schema, check_rows, check_schema, to_table
from foreload.traces.schema import Trace, TraceMeta, concatenate

FLUSH_ROWS = 1024
GROUP_ROWS = 16384
_OPTIONS: Mapping[str, Any] = {"compression": "zstd", "write_page_checksum": True}


def partial_folder(path: Path) -> Path:
    """Where the parts of an unfinished recording of `path` are."""
    return Path(path).with_name(Path(path).name + ".partial")


class TraceWriter:
    """Writes one recording. As a context manager it closes at the end; on an error it keeps the parts as they are.

    A new recording replaces what an unfinished one of the same name has left. Every method that writes raises
    FileError naming the file if the folder is not writable or the disk is full; rows flushed before stay readable.
    """

    def __init__(self, path: Path, meta: TraceMeta, flush_rows: int = FLUSH_ROWS) -> None:
        self.path = Path(path)
        self.meta = meta
        self.rows = 0
        self._folder = partial_folder(self.path)
        self._flush_rows = flush_rows
        self._schema = arrow_schema(meta)
        self._pending: list[Trace] = []
        self._pending_rows = 0
        self._parts: list[Path] = []
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise FileError(f"{self.path}: cannot be written: {error.strerror or error}") from error

    def append(
        self,
        request: int,
        step: int,
        phase: int,
        position: ArrayLike,
        token_id: ArrayLike,
        experts: ArrayLike,
        *,
        accepted: ArrayLike = True,
        weights: ArrayLike | None = None,
        predictions: Mapping[tuple[str, int], ArrayLike] | None = None,
    ) -> None:
        """Add the n rows of one step (or of a part of it). They are copied, so buffers may be reused.

        position, token_id, accepted: [n] or one value; experts [n, L, k] in rank order; weights [n, L, k];
        predictions {(predictor, depth): [n, L, width]} with -1 for none; what is not given is none.
        """
        chosen = np.array(experts, np.int16)
        n = len(chosen)
        given = predictions or {}
        trace = Trace(
            meta=self.meta,
            request=np.full(n, request, np.int32),
            step=np.full(n, step, np.int32),
            phase=np.full(n, phase, np.int8),
            position=_column(position, n, np.int32),
            token_id=_column(token_id, n, np.int32),
            accepted=_column(accepted, n, np.bool_),
            experts=chosen,
            weights=None if weights is None else np.array(weights, np.float16),
            predictions={
                (p.predictor, p.depth): np.array(given[p.predictor, p.depth], np.int16)
                if (p.predictor, p.depth) in given
                else np.full((n, self.meta.moe_layers, p.width), -1, np.int16)
                for p in self.meta.predictions
            },
        )
        check_rows(trace)
        self._pending.append(trace)
        self._pending_rows += n
        self.rows += n
        if self._pending_rows >= self._flush_rows:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one complete part file."""
        if not self._pending_rows:
            return
        part = self._folder / f"part-{len(self._parts):05d}.parquet"
        buffer = io.BytesIO()
        pq.write_table(to_table(concatenate(self.meta, self._pending), self._schema), buffer, **_OPTIONS)
        try:
            with atomic_path(part) as partial:
                partial.write_bytes(buffer.getvalue())
        except FileError as error:
            raise FileError(f"{self.path}: {str(error).removeprefix(f'{part}: ')}") from error
        self._parts.append(part)
        self._pending, self._pending_rows = [], 0

    def close(self) -> None:
        """Finish: merge the parts into the file, which appears whole or not at all, and remove the folder."""
        self.flush()
        try:
            _merge(self._parts, self.path, self.meta)
        except FileError as error:
            raise FileError(f"{error} (the recording is kept in {self._folder.name})") from error
        shutil.rmtree(self._folder, ignore_errors=True)

    def abandon(self) -> None:
        """Stop without finishing: what was appended stays in the folder of parts, which goes away if there is none."""
        with suppress(FileError):
            self.flush()
        if not self._parts:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()


def _column(value: ArrayLike, n: int, dtype: Any) -> NDArray[Any]:
    column: NDArray[Any] = np.array(np.broadcast_to(np.asarray(value, dtype), (n,)))
    return column


def _merge(parts: list[Path], path: Path, meta: TraceMeta) -> None:
    schema = arrow_schema(meta)
    with (
        atomic_path(path) as partial,
        partial.open("wb") as file,
        pq.ParquetWriter(file, schema, **_OPTIONS) as writer,
    ):
        waiting: list[Any] = []
        for part in parts:
            waiting.append(pq.ParquetFile(part).read())
            if sum(table.num_rows for table in waiting) >= GROUP_ROWS:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))


class TraceReader:
    """Reads a trace file, or the folder of parts of an unfinished one, row group by row group.

    `meta` and `rows` are known at once. Raises FileError in one line: missing, not Parquet, truncated, Parquet of
    another origin, another schema version, a column missing or of another width; and, while reading, a wrong value.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._files = [_open(part, self.path) for part in _part_paths(self.path)]
        metas = [_metadata(file, self.path) for file in self._files]
        self.meta = metas[0]
        if self.meta.order == "unknown":
            raise FileError(
                f"{self.path}: is a histogram of expert use (order unknown), which cannot be replayed: "
                "it can say which experts to keep resident (foreload trace info, trace export --format sglang-kt)"
            )
        for file, meta in zip(self._files, metas, strict=True):
            if meta != self.meta:
                raise FileError(f"{self.path}: its parts are of different recordings")
            check_schema(file.schema_arrow, meta, str(self.path))
        self.rows = sum(int(file.metadata.num_rows) for file in self._files)

    def groups(self) -> Iterator[Trace]:
        """The recording, piece by piece, each piece checked."""
        reader = TableReader(self.meta, str(self.path))
        for file in self._files:
            for index in range(file.num_row_groups):
                try:
                    table = file.read_row_group(index)
                except (pa.ArrowException, OSError) as error:
                    raise FileError(f"{self.path}: trace is corrupt in row group {index}: {_line(error)}") from error
                yield reader.read(table)

    def read(self) -> Trace:
        """The whole recording."""
        return concatenate(self.meta, self.groups())

    def close(self) -> None:
        """Close the file."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_trace(path: Path) -> Trace:
    """The recording in `path` (a file, or the folder of parts of an unfinished one); FileError as `TraceReader`."""
    with TraceReader(path) as reader:
        return reader.read()


def read_meta(path: Path) -> TraceMeta:
    """The metadata of the recording in `path`; FileError as `TraceReader`."""
    with TraceReader(path) as reader:
        return reader.meta


def read_provenance(path: Path) -> TraceMeta:
    """The metadata of a recording or of a histogram, by its `order`; FileError if it is neither."""
    path = Path(path)
    with _open(_part_paths(path)[0], path) as file:
        return _metadata(file, path)


def recover(path: Path) -> Path:
    """Finish a killed recording from its parts and remove their folder; returns the file.

    `path` is the recording's name or its folder of parts. FileError if there is none, or if the parts are damaged.
    """
    path = Path(path)
    final = path.with_name(path.name.removesuffix(".partial"))
    folder = partial_folder(final)
    with TraceReader(folder) as reader:
        for _ in reader.groups():
            pass
        _merge(_part_paths(folder), final, reader.meta)
    shutil.rmtree(folder, ignore_errors=True)
    return final


def _part_paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    parts = sorted(path.glob("part-*.parquet"))
    if not parts:
        raise FileError(f"{path}: no recording in this folder: it would hold part-00000.parquet")
    return parts


def _open(part: Path, path: Path) -> Any:
    try:
        if os.path.getsize(part) == 0:
            raise FileError(f"{path}: trace is empty (0 bytes): not a Parquet file")
        return pq.ParquetFile(part, page_checksum_verification=True)
    except FileNotFoundError as error:
        folder = partial_folder(path)
        hint = f" ({folder.name} holds an unfinished recording: foreload trace recover)" if folder.is_dir() else ""
        raise FileError(f"{path}: trace cannot be read: {error.strerror}{hint}") from error
    except (pa.ArrowException, OSError) as error:
        raise FileError(f"{path}: trace is not a Parquet file, or is truncated: {_line(error)}") from error


def _metadata(file: Any, path: Path) -> TraceMeta:
    raw = (file.schema_arrow.metadata or {}).get(METADATA_KEY)
    if raw is None:
        raise FileError(f"{path}: is Parquet, but no Foreload trace: it has no metadata 'foreload'")
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise FileError(f"{path}: trace metadata are not valid JSON: {error}") from error
    return parse_model(TraceMeta, value, f"{path}: trace metadata")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]
