"""What a tune has finished, on disk: one line of JSON per job, so that a killed tune goes on where it stopped.

A line is {"key": job, "done": result, "sum": hash of both}. The last line may lack its end, where writing was cut off:
it is dropped. Any other line that does not say what it should makes the file refused.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from foreload.errors import FileError
from foreload.settings import Settings
from foreload.simulator.result import SimResult
from foreload.simulator.tuner.jobs import Done, Plan

SCHEMA = 1
ARRAYS: Mapping[str, Any] = {
    "token_ns": np.int64,
    "token_part": np.int8,
    "ttft_ns": np.int64,
    "counters": np.int64,
}


class Journal:
    """Finished jobs of one file, by key. A context manager; FileError if the file is corrupt or cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done: dict[str, Any] = {}
        whole = self._read()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("r+b" if path.exists() else "w+b")
            self._file.truncate(whole)
            self._file.seek(whole)
        except OSError as error:
            raise FileError(f"{path}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def keys(self) -> set[str]:
        """Finished jobs."""
        return set(self._done)

    def _read(self) -> int:
        """Take in all whole lines; their length in bytes."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise FileError(f"{self.path}: tuning state cannot be read: {error.strerror}") from error
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                entry = json.loads(line)
                key, done = entry["key"], entry["done"]
                if entry["sum"] != _sum(key, done):
                    raise ValueError("its checksum is another")
            except (ValueError, KeyError, TypeError) as error:
                raise FileError(
                    f"{self.path}: line {number} is no tuning state of schema {SCHEMA} ({error}): delete the file to "
                    "start again"
                ) from error
            self._done[key] = done
        if raw and not whole and not raw.startswith(b'{"key": "'):
            raise FileError(f"{self.path}: holds no tuning state: give a new file, or one that --resume wrote")
        return len(whole)

    def get(self, key: str) -> Done | None:
        """The result of a job, if it was finished."""
        done = self._done.get(key)
        if done is None:
            return None
        return tuple(_result(value) for value in done["simulated"]) if "simulated" in done else _plans(done["planned"])

    def put(self, key: str, done: Done) -> None:
        """Keep the result of a job."""
        kept = _kept(done)
        line = json.dumps({"key": key, "done": kept, "sum": _sum(key, kept)}) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise FileError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._done[key] = kept


def _sum(key: str, done: Any) -> str:
    text = json.dumps([SCHEMA, key, done], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _kept(done: Done) -> dict[str, Any]:
    simulated = [_values(one) for one in done if isinstance(one, SimResult)]
    planned = [{**asdict(one), "settings": _settings(one)} for one in done if isinstance(one, Plan)]
    kept = {"simulated": simulated} if simulated else {"planned": planned}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found


def _settings(done: SimResult | Plan) -> dict[str, Any]:
    return done.settings.model_dump(mode="json", exclude_defaults=True)


def _values(result: SimResult) -> dict[str, Any]:
    found = {f.name: getattr(result, f.name) for f in fields(SimResult) if f.name != "timeline"}
    arrays = {name: found[name].tolist() for name in ARRAYS}
    return {**found, **arrays, "settings": _settings(result), "sources": dict(result.sources)}


def _result(values: Mapping[str, Any]) -> SimResult:
    arrays = {name: np.array(values[name], kind) for name, kind in ARRAYS.items()}
    tuples = {name: tuple(values[name]) for name in ("capacity", "layer_bytes", "copy_ns")}
    return SimResult(**{**values, **arrays, **tuples, "settings": Settings.parse(values["settings"])})


def _plans(values: list[dict[str, Any]]) -> tuple[Plan, ...]:
    return tuple(Plan(**{**value, "settings": Settings.parse(value["settings"])}) for value in values)
