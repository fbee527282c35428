"""Traces of moe-policylang: Parquet with long names, or JSON lines with a head and short names.

Prompts are requests. Router scores are left out: the format does not say whether they are normalised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from foreload.traces.importers.base import UNKNOWN_TOKEN, Block, Blocks, Source, id_list, whole
from foreload.traces.importers.json_files import json_lines, unreadable
from foreload.traces.importers.long_rows import Assembler, Record
from foreload.traces.importers.text import optional_phase

COLUMNS = ("prompt_id", "token_idx", "layer_idx", "selected_experts")
OPTIONAL = ("phase", "token_id")
SHORT = {"prompt_id": "p", "token_idx": "t", "layer_idx": "l", "selected_experts": "e"}
BATCH_ROWS = 8192


def policylang(source: Source) -> Blocks:
    """Either form, told apart by the file's first bytes."""
    try:
        with source.path.open("rb") as file:
            parquet = file.read(4) == b"PAR1"
    except OSError as error:
        raise unreadable(source.path, error) from error
    return Blocks(_assembled(source, _parquet(source) if parquet else _lines(source)))


def _assembled(source: Source, rows: Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]) -> Iterator[Block]:
    assembler = Assembler(source)
    prompts: dict[Any, int] = {}
    where = ""
    for where, row, names in rows:
        prompt = row.get(names["prompt_id"])
        if prompt is None or not isinstance(prompt, str | int):
            raise source.error(where, f"{names['prompt_id']} is {prompt!r}: the prompt's number or name is needed")
        token_id = row.get("token_id")
        record = Record(
            request=prompts.setdefault(prompt, len(prompts)),
            token=whole(source, where, names["token_idx"], row.get(names["token_idx"])),
            layer=whole(source, where, names["layer_idx"], row.get(names["layer_idx"])),
            experts=id_list(source, where, names["selected_experts"], row.get(names["selected_experts"])),
            phase=optional_phase(source, where, row.get("phase")),
            token_id=UNKNOWN_TOKEN if token_id is None else whole(source, where, "token_id", token_id),
        )
        yield from assembler.add(where, record)
    assembler.finish(where)


def _lines(source: Source) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
    """Rows of the JSON-lines form; the first line is the head."""
    for number, value in json_lines(source):
        if number == 1 and "e" not in value:
            continue
        yield f"line {number}", value, SHORT


def _parquet(source: Source) -> Iterator[tuple[str, Mapping[str, Any], Mapping[str, str]]]:
    names = {name: name for name in COLUMNS}
    row = 0
    try:
        with pq.ParquetFile(source.path) as file:
            held = file.schema_arrow.names
            missing = [name for name in COLUMNS if name not in held]
            if missing:
                raise source.error("", f"column {missing[0]!r} is missing: {', '.join(COLUMNS)} are needed")
            wanted = [*COLUMNS, *(name for name in OPTIONAL if name in held)]
            for batch in file.iter_batches(BATCH_ROWS, columns=wanted):
                for value in batch.to_pylist():
                    yield f"row {row}", value, names
                    row += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())[:160]
        raise source.error(f"after row {row - 1}" if row else "", f"not Parquet, or truncated: {line}") from error
