"""Files at the boundary: read with a clear refusal, write whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from foreload.errors import FileError

M = TypeVar("M", bound=BaseModel)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a sibling path to write to; it replaces `path` only if the block ends without an error.

    Raises FileError naming `path` when it cannot be written (missing folder rights, full disk).
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def check_writable(path: Path, folder: bool = False) -> None:
    """FileError naming `path` if it could not be written now; nothing is left behind. `folder`: files go into it.

    Folders that are missing are no fault: `atomic_path` makes them.
    """
    if not folder and path.is_dir():
        raise FileError(f"{path}: cannot be written: it is a folder, and a file's name is needed")
    within = path if folder else path.parent
    try:
        while not within.exists():
            within = within.parent
        with tempfile.TemporaryFile(dir=within):
            pass
    except OSError as error:
        raise FileError(f"{path}: cannot be written: {within} takes no files: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def read_bytes(path: Path, what: str) -> bytes:
    """The content of `path`; FileError if it is missing or unreadable."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(f"{path}: {what} cannot be read: {error.strerror or error}") from error


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """The JSON (or, by suffix, TOML) object in `path`; FileError if it is not one."""
    raw = read_bytes(path, what)
    try:
        text = raw.decode("utf-8")
        value = tomllib.loads(text) if Path(path).suffix == ".toml" else json.loads(text)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FileError(
            f"{path}: {what} is not valid {'TOML' if Path(path).suffix == '.toml' else 'JSON'}: {error}"
        ) from error
    if not isinstance(value, dict):
        raise FileError(f"{path}: {what} must be an object with named fields, got {type(value).__name__}")
    return value


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """One line naming the first wrong field, its value and what would be accepted."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"]) or "(whole)"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        return f"unknown field {field!r}: known are {', '.join(_fields(model, first['loc'][:-1]))}{more}"
    if first["type"] == "missing":
        return f"field {field!r} is missing{more}"
    if first["type"] == "value_error":
        prefix = "" if field == "(whole)" else f"field {field!r}: "
        return prefix + first["msg"].removeprefix("Value error, ") + more
    value = repr(first["input"])
    shown = value if len(value) <= 60 else value[:57] + "..."
    return f"field {field!r} is {shown}: {first['msg']}{more}"


def _fields(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Fields of `model`, or of the model nested in it at `path`."""
    for name in path:
        nested = model.model_fields[str(name)].annotation if str(name) in model.model_fields else None
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            model = nested
    return list(model.model_fields)


def parse_model(model: type[M], value: Any, source: str) -> M:
    """`value` as `model`; FileError naming `source`, the field and what would be accepted."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise FileError(f"{source}: {explain(error, model)}") from error
