"""JSON and JSON-lines files, object by object."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foreload.errors import FileError
from foreload.traces.importers.base import Source


def json_lines(source: Source) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON-lines file with their line numbers (from 1); FileError names a line that is none."""
    try:
        with source.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(source, number, line)
    except OSError as error:
        raise unreadable(source.path, error) from error


def _object(source: Source, number: int, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        cut = "" if line.endswith(b"\n") else " (the file ends within it: truncated?)"
        raise source.error(f"line {number}", f"not valid JSON{cut}: {error}") from error
    if not isinstance(value, dict):
        raise source.error(f"line {number}", f"an object is needed, got {type(value).__name__}")
    return value


def documents(source: Source) -> Iterator[tuple[str, dict[str, Any]]]:
    """Replies with their place: one a line, or one JSON document that is a reply or a list of them."""
    if _starts_with_an_object(source.path):
        for number, value in json_lines(source):
            yield f"line {number}", value
        return
    try:
        whole = json.loads(source.path.read_bytes())
    except OSError as error:
        raise unreadable(source.path, error) from error
    except ValueError as error:
        raise source.error("", f"neither JSON nor JSON lines: {error}") from error
    for index, value in enumerate(whole if isinstance(whole, list) else [whole]):
        if not isinstance(value, dict):
            raise source.error(f"reply {index}", f"an object is needed, got {type(value).__name__}")
        yield f"reply {index}", value


def _starts_with_an_object(path: Path) -> bool:
    return isinstance(first_line(path), dict)


def first_line(path: Path) -> Any:
    """The first line of `path` as JSON, or None if it is none; FileError if the file cannot be read."""
    try:
        with path.open("rb") as file:
            return json.loads(next((line for line in file if line.strip()), b""))
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        return None


def whole_file(path: Path) -> Any:
    """`path` as one JSON document, or None if it is none; FileError if the file cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except ValueError:
        return None


def unreadable(path: Path, error: OSError) -> FileError:
    """The error that says why `path` cannot be read."""
    return FileError(f"{path}: cannot be read: {error.strerror or error}")
