"""Minimal JSON lines `{t, layer, experts, phase?}` and CSV `token, layer, e0..ek`.

Both may carry `request`, `phase` and `token_id`. `t` and `token` count positions of a request; layers have the
model's numbers. A token without a phase is taken as decoded.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from foreload.traces.importers.base import UNKNOWN_TOKEN, Block, Blocks, Source, id_list, phase_code, whole
from foreload.traces.importers.json_files import json_lines, unreadable
from foreload.traces.importers.long_rows import Assembler, Record
from foreload.traces.schema import DECODE

NO_PHASE = "phases are not recorded: every token is taken as decoded"


def jsonl(source: Source) -> Blocks:
    """One JSON object per token and layer."""
    return Blocks(_jsonl(source))


def _jsonl(source: Source) -> Iterator[Block]:
    assembler = Assembler(source)
    where = ""
    for number, value in json_lines(source):
        where = f"line {number}"
        record = Record(
            request=whole(source, where, "request", value.get("request", 0)),
            token=whole(source, where, "t", value.get("t")),
            layer=whole(source, where, "layer", value.get("layer")),
            experts=id_list(source, where, "experts", value.get("experts")),
            phase=optional_phase(source, where, value.get("phase")),
            token_id=whole(source, where, "token_id", value.get("token_id", UNKNOWN_TOKEN), UNKNOWN_TOKEN),
        )
        yield from assembler.add(where, record)
    assembler.finish(where)


def optional_phase(source: Source, where: str, value: Any) -> int:
    """The code of `value`, or decode with a note if there is none."""
    if value is None:
        source.note(NO_PHASE)
        return DECODE
    return phase_code(source, where, value)


def csv_rows(source: Source) -> Blocks:
    """One CSV line per token and layer, after a head."""
    return Blocks(_csv(source))


def _csv(source: Source) -> Iterator[Block]:
    assembler = Assembler(source)
    where = "line 1"
    try:
        with source.path.open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file, strict=True)
            head = [name.strip() for name in next(reader, [])]
            columns = _columns(source, head)
            for fields in reader:
                where = f"line {reader.line_num}"
                if len(fields) != len(head):
                    raise source.error(where, f"{len(fields)} fields: the head has {len(head)} (truncated?)")
                yield from assembler.add(where, _record(source, where, dict(zip(head, fields, strict=True)), columns))
    except OSError as error:
        raise unreadable(source.path, error) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise source.error(f"after {where}", f"not CSV in UTF-8: {error}") from error
    assembler.finish(where)


def _columns(source: Source, head: list[str]) -> list[str]:
    """The expert columns, after checking the head."""
    experts = [f"e{rank}" for rank in range(source.shape.top_k)]
    known = {"token", "layer", *experts, "request", "phase", "token_id"}
    missing = [name for name in ("token", "layer", *experts) if name not in head]
    unknown = [name for name in head if name not in known]
    if missing or unknown or len(set(head)) < len(head):
        problem = f"column {missing[0]!r} is missing" if missing else f"column {(unknown or head)[0]!r} is not known"
        if not missing and not unknown:
            problem = "a column is there twice"
        raise source.error(
            "line 1",
            f"{problem}: columns are token, layer, e0 to e{len(experts) - 1} and, if known, request, phase, token_id",
        )
    return experts


def _record(source: Source, where: str, row: dict[str, str], columns: list[str]) -> Record:
    def number(name: str, text: str | None, lowest: int = 0) -> int:
        try:
            value: Any = int(text) if text is not None else None
        except ValueError:
            value = text
        return whole(source, where, name, value, lowest)

    return Record(
        request=number("request", row.get("request", "0")),
        token=number("token", row["token"]),
        layer=number("layer", row["layer"]),
        experts=[number(name, row[name], -1) for name in columns],
        phase=optional_phase(source, where, row.get("phase") or None),
        token_id=number("token_id", row.get("token_id") or str(UNKNOWN_TOKEN), UNKNOWN_TOKEN),
    )
