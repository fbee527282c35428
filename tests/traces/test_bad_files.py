"""Every way a trace file can be wrong gives one line that names the file and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreload.errors import FileError
from foreload.traces.io import read_meta, read_trace
from foreload.traces.schema import PredictionColumn

pytestmark = pytest.mark.unit


@pytest.fixture
def good(tmp_path: Path, make_trace: Any, write_trace: Any) -> Path:
    path = tmp_path / "trace.parquet"
    predictions = [PredictionColumn(predictor="gate", depth=1, width=3)]
    write_trace(path, make_trace(has_weights=True, predictions=predictions))
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Apply `change(columns, metadata)` to the file, without any of our checks."""
    table = pq.ParquetFile(path).read()
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    meta = json.loads(table.schema.metadata[b"foreload"])
    change(columns, meta)
    pq.write_table(pa.table(columns).replace_schema_metadata({"foreload": json.dumps(meta)}), path)


def with_value(name: str, row: int, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(columns: dict[str, Any], _: dict[str, Any]) -> None:
        values = columns[name].to_pylist()
        values[row] = value
        kind = pa.string() if name == "phase" else columns[name].type
        if pa.types.is_fixed_size_list(kind):
            kind = pa.list_(pa.field("element", kind.value_type), kind.list_size)  # lets an entry be empty
        columns[name] = pa.array(values, kind)

    return change


def with_meta(**fields: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, meta: meta.update(fields)


def without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda columns, _: columns.pop(name)


def as_type(name: str, kind: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(columns: dict[str, Any], _: dict[str, Any]) -> None:
        columns[name] = pa.array(columns[name].to_pylist(), kind)

    return change


CASES = {
    "expert too large": (with_value("e2", 3, [1, 8]), "row 3, column 'e2': expert 8 is outside 0 to 7"),
    "expert negative": (with_value("e1", 0, [-1, 2]), "row 0, column 'e1': expert -1 is outside 0 to 7"),
    "expert twice": (with_value("e3", 4, [5, 5]), "row 4, column 'e3': expert 5 is there twice"),
    "prediction too large": (with_value("p2_gate_1", 1, [0, 1, 9]), "row 1, column 'p2_gate_1': expert 9 is outside"),
    "prediction twice": (with_value("p3_gate_1", 1, [2, 2, -1]), "row 1, column 'p3_gate_1': expert 2 is there twice"),
    "phase unknown": (with_value("phase", 2, "warm-up"), "row 2, column 'phase': 'warm-up' is unknown: phases are"),
    "phase changes in a step": (with_value("phase", 2, "decode"), "row 2, column 'phase': changes within step 0"),
    "request changes in a step": (with_value("request", 1, 7), "row 1, column 'request': changes within step 0"),
    "step decreases": (with_value("step", 9, 0), "row 9, column 'step': 0 follows 4: steps may not decrease"),
    "position negative": (with_value("position", 3, -2), "row 3, column 'position': -2 is negative"),
    "position empty": (with_value("position", 3, None), "row 3, column 'position': is empty"),
    "experts empty": (with_value("e1", 6, None), "row 6, column 'e1': is empty"),
    "expert empty": (with_value("e1", 6, [None, 1]), "row 6, column 'e1': has an empty entry"),
    "column missing": (without("token_id"), "column 'token_id' is missing"),
    "layer missing": (without("e3"), "column 'e3' is missing"),
    "weights missing": (without("w1"), "column 'w1' is missing"),
    "prediction missing": (without("p2_gate_1"), "column 'p2_gate_1' is missing"),
    "column unknown": (lambda columns, _: columns.update(x=columns["step"]), "column 'x' is not in the metadata"),
    "wrong type": (as_type("step", pa.int64()), "column 'step' is int64: the metadata ask for int32"),
    "wrong list": (as_type("e1", pa.list_(pa.int16())), "column 'e1' is list<"),
    "newer schema": (with_meta(schema_version=2), "schema_version is 2: this Foreload reads 1"),
    "unknown field": (with_meta(colour="red"), "unknown field 'colour': known are schema_version, model"),
    "experts disagree": (with_meta(experts=9), "experts is 9: the shape says 8"),
    "layers disagree": (with_meta(moe_layers=2), "moe_layers is 2: the shape says 3"),
    "hash disagrees": (with_meta(shape_hash="0"), "shape_hash is '0': the shape says"),
    "shape unknown": (with_meta(shape={"family": "x"}), "shape: unknown or missing fields"),
    "width": (
        with_meta(predictions=[{"predictor": "gate", "depth": 1, "width": 4}]),
        "column 'p2_gate_1' is fixed_size_list",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_content(good: Path, case: str) -> None:
    change, expected = CASES[case]
    rewrite(good, change)
    with pytest.raises(FileError) as caught:
        read_trace(good)
    message = str(caught.value)
    assert message.startswith(f"{good}: ")
    assert expected in message
    assert "\n" not in message


def test_the_unchanged_file_reads(good: Path) -> None:
    rewrite(good, lambda *_: None)
    assert read_trace(good).rows == 26


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty (0 bytes)"),
        (b"hello", "is not a Parquet file"),
        (b'{"a": 1}' * 100, "is not a Parquet file"),
        (b"PAR1" + b"\0" * 64 + b"PAR1", "is not a Parquet file"),
    ],
)
def test_not_parquet(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"x.parquet: ") as caught:
        read_trace(path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_truncated(good: Path, share: float) -> None:
    content = good.read_bytes()
    good.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(FileError, match=r"trace.parquet: .*truncated"):
        read_meta(good)


def test_flipped_bytes_are_noticed(good: Path) -> None:
    """A damaged byte gives one line or, where it is of no consequence, the same recording."""
    before = read_trace(good)
    content = good.read_bytes()
    rng = np.random.default_rng(0)
    end = len(content) - int.from_bytes(content[-8:-4], "little") - 8  # the pages, not the footer
    messages = []
    for at in rng.integers(4, end, 50):
        damaged = bytearray(content)
        damaged[at] ^= 0xFF
        good.write_bytes(damaged)
        try:
            after = read_trace(good)
        except FileError as error:
            messages.append(str(error))
        else:
            np.testing.assert_array_equal(before.experts, after.experts)
            np.testing.assert_array_equal(before.step, after.step)
    assert len(messages) > 25
    assert all(message.startswith(f"{good}: ") for message in messages)


def test_foreign_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": [1, 2]}), path)
    with pytest.raises(FileError, match="is Parquet, but no Foreload trace"):
        read_trace(path)
    pq.write_table(pa.table({"a": [1, 2]}).replace_schema_metadata({"foreload": "{"}), path)
    with pytest.raises(FileError, match="trace metadata are not valid JSON"):
        read_trace(path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no.parquet: trace cannot be read: No such file"):
        read_trace(tmp_path / "no.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileError, match="folder: no recording in this folder"):
        read_trace(tmp_path / "folder")
