"""Importers: recordings and histograms of other programs as trace files. `FORMATS` is the one list of formats."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from foreload.errors import FileError, UsageError
from foreload.shape import ModelShape
from foreload.traces.importers.base import Importer, Source
from foreload.traces.importers.imatrix import imatrix
from foreload.traces.importers.json_files import first_line, unreadable, whole_file
from foreload.traces.importers.logits import hf_logits
from foreload.traces.importers.megatron import megatron
from foreload.traces.importers.policylang import COLUMNS, policylang
from foreload.traces.importers.recorder import recorder
from foreload.traces.importers.replies import sglang, vllm
from foreload.traces.importers.text import csv_rows, jsonl
from foreload.traces.importers.writing import UNKNOWN, Imported, import_with

__all__ = ["FORMATS", "Format", "Imported", "guess", "import_file", "known_formats"]


@dataclass(frozen=True)
class Format:
    """An importer, what it reads, and the names (keys, columns) in the file's beginning that tell it from others."""

    importer: Importer
    reads: str
    suffixes: tuple[str, ...]
    marks: tuple[frozenset[str], ...] = (frozenset(),)  # any of these sets of names


def _marks(*names: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(name.split()) for name in names)


_JSON = (".json", ".jsonl")
FORMATS: Mapping[str, Format] = {
    "vllm": Format(vllm, "vLLM replies", _JSON, _marks("prompt_routed_experts")),
    "sglang": Format(sglang, "SGLang replies", _JSON, _marks("meta_info")),
    "sglang-recorder": Format(recorder, "SGLang expert-distribution recorder, stat or per_token", (".pt",)),
    "megatron": Format(megatron, "Megatron-core router trace", (".jsonl",), _marks("step layer top_indices")),
    "policylang": Format(
        policylang,
        "moe-policylang trace",
        (".parquet", ".jsonl"),
        _marks(" ".join(COLUMNS), "p t l e"),
    ),
    "jsonl": Format(jsonl, "one {t, layer, experts, phase?} a line", (".jsonl",), _marks("t layer experts")),
    "csv": Format(csv_rows, "token, layer, e0 to ek", (".csv",), _marks("token layer e0")),
    "hf-logits": Format(hf_logits, "router logits of transformers", (".pt", ".npz", ".safetensors")),
    "imatrix": Format(imatrix, "llama.cpp importance matrix, a histogram", (".gguf", ".dat")),
}


def known_formats() -> str:
    """The names of the formats, in one line."""
    return ", ".join(FORMATS)


def guess(path: Path) -> str:
    """The only format that `path` can be, by suffix and first names; UsageError if there is none, or several."""
    named = [name for name, one in FORMATS.items() if path.suffix in one.suffixes]
    if any(FORMATS[name].marks != (frozenset(),) for name in named):
        names = _first_names(path)
        named = [name for name in named if any(marks <= names for marks in FORMATS[name].marks)]
    if len(named) == 1:
        return named[0]
    could = f"could be {' or '.join(named)}" if named else "is of no format that can be told"
    raise UsageError(f"{path}: {could}: give --format, one of {known_formats()}")


def _first_names(path: Path) -> frozenset[str]:
    """Keys of the first JSON object, columns of Parquet, or the head of CSV."""
    readers: dict[str, Callable[[Path], Sequence[str]]] = {".parquet": _parquet_names, ".csv": _csv_names}
    if path.suffix in readers:
        return frozenset(readers[path.suffix](path))
    value = first_line(path)
    if value is None and path.suffix == ".json":
        value = whole_file(path)
    if isinstance(value, list) and value:
        value = value[0]
    return frozenset(value) if isinstance(value, dict) else frozenset()


def _parquet_names(path: Path) -> Sequence[str]:
    try:
        names: list[str] = pq.read_schema(path).names
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path}: not Parquet, or truncated: {' '.join(str(error).split())[:160]}") from error
    return names


def _csv_names(path: Path) -> Sequence[str]:
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return [name.strip() for name in next(csv.reader(file), [])]
    except OSError as error:
        raise unreadable(path, error) from error


def import_file(
    path: Path,
    out: Path,
    shape: ModelShape,
    form: str | None = None,
    *,
    model: str = UNKNOWN,
    subjects: Sequence[str] = (),
    progress: Callable[[int], None] | None = None,
) -> tuple[str, Imported]:
    """Import `path`, of format `form` or the one that it must be, to `out`; returns the format and what was written.

    UsageError for an unknown format; FileError for a file or row that is wrong, with its place.
    """
    if path.is_dir() or not path.exists():
        raise FileError(f"{path}: cannot be read: {'Is a directory' if path.is_dir() else 'No such file or directory'}")
    chosen = guess(path) if form is None else form
    if chosen not in FORMATS:
        raise UsageError(f"format {chosen!r} is not known: known are {known_formats()}")
    source = Source(Path(path), shape)
    done = import_with(
        FORMATS[chosen].importer, chosen, source, Path(out), model=model, subjects=subjects, progress=progress
    )
    return chosen, done
