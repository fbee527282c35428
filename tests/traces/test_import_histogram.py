"""Importance matrices, written here byte by byte, as histograms: kept, shown, exported, and refused by replay."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from foreload.cli import main
from foreload.errors import FileError
from foreload.shape import ModelShape
from foreload.traces.histogram import read_histogram
from foreload.traces.importers import import_file
from foreload.traces.io import read_meta

pytestmark = pytest.mark.unit
COUNTS = np.arange(24).reshape(3, 8) + 1.0


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(tensors: dict[str, np.ndarray], kind: str = "imatrix", version: int = 3, tensor_type: int = 0) -> bytes:
    """A GGUF file with what llama-imatrix writes: general.type, data sets (an array of strings), chunk counts."""
    pairs = [
        text("general.type") + struct.pack("<I", 8) + text(kind),
        text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("calibration.txt"),
        text("imatrix.chunk_count") + struct.pack("<II", 4, 45),
    ]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs)) + b"".join(pairs)
    data = b""
    for name, values in tensors.items():
        dims = values.shape[::-1]
        head += (
            text(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims) + struct.pack("<IQ", tensor_type, len(data))
        )
        data += values.astype("<f4").tobytes()
        data += b"\0" * (-len(data) % 32)
    return head + b"\0" * (-len(head) % 32) + data


def tensors(counts: np.ndarray = COUNTS, parts: tuple[str, ...] = ("gate", "up", "down")) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {"blk.1.attn_q.weight.counts": np.array([[9.0]])}
    for layer, row in enumerate(counts, 1):
        for part in parts:
            name = f"blk.{layer}.ffn_{part}_exps.weight"
            found[f"{name}.in_sum2"] = np.ones((8, 16))
            found[f"{name}.counts"] = row[:, None]
    return found


@pytest.fixture
def histogram(tmp_path: Path, shape: ModelShape) -> Path:
    (tmp_path / "m.gguf").write_bytes(gguf(tensors()))
    import_file(tmp_path / "m.gguf", tmp_path / "h.parquet", shape)
    return tmp_path / "h.parquet"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("parts", [("gate", "up", "down"), ("gate_up", "down")])
def test_imatrix(version: int, parts: tuple[str, ...], tmp_path: Path, shape: ModelShape) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(tensors(parts=parts), version=version))
    form, done = import_file(tmp_path / "m.gguf", tmp_path / "h.parquet", shape)
    assert (form, done.order) == ("imatrix", "unknown")
    assert done.notes == ("counted over the calibration text, that is in prefill",)
    read = read_histogram(tmp_path / "h.parquet")
    assert (read.counts == COUNTS).all()
    assert (read.meta.order, read.meta.source, read.meta.seed) == ("unknown", "import imatrix", -1)


def changed(**fields: np.ndarray | None) -> dict[str, np.ndarray]:
    found = {**tensors(parts=("gate",))}
    for name, value in fields.items():
        key = name.replace("_", ".", 1) + ".ffn_gate_exps.weight.counts"
        found.pop(key)
        if value is not None:
            found[key] = value
    return found


BAD = {
    "legacy": (struct.pack("<ii", 2, 20) + b"blk.0.attn_q.weight ", "a legacy .dat importance matrix has one count"),
    "a model": (gguf(tensors(), kind="model"), "general.type: 'model': 'imatrix' is needed"),
    "version": (gguf(tensors(), version=1), "GGUF version 1: 2 and 3 are known"),
    "cut head": (gguf(tensors())[:100], "GGUF file ends early: truncated"),
    "cut data": (gguf(tensors())[:-40], "GGUF file ends early: truncated"),
    "a layer less": (gguf(changed(blk_2=None)), "layer 2 has no counts of experts"),
    "experts": (gguf(changed(blk_2=np.ones((7, 1)))), "counts of 7 experts: the model has 8"),
    "negative": (gguf(changed(blk_2=np.full((8, 1), -1.0))), "expert 0: a count of -1.0"),
    "nan": (gguf(changed(blk_2=np.full((8, 1), np.nan))), "expert 0: a count of nan"),
    "huge": (gguf(changed(blk_2=np.full((8, 1), 1e30))), "expert 0: a count of 1.0"),
    "type": (gguf(tensors(), tensor_type=1), "tensor type 1: float32 (0) is needed"),
    "dense": (gguf({**tensors(), "blk.0.ffn_up_exps.weight.counts": np.ones((8, 1))}), "layer 0 is no MoE layer"),
    "damaged": (b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1 << 40), "GGUF file is damaged: a length of"),
    "odd metadata": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 99), "metadata of type 99"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_imatrix(name: str, tmp_path: Path, shape: ModelShape) -> None:
    (tmp_path / "m.dat").write_bytes(BAD[name][0])
    with pytest.raises(FileError) as caught:
        import_file(tmp_path / "m.dat", tmp_path / "h.parquet", shape, "imatrix")
    assert BAD[name][1] in str(caught.value)
    assert not (tmp_path / "h.parquet").exists()


def test_tensors_that_disagree(tmp_path: Path, shape: ModelShape) -> None:
    found = tensors(parts=("gate", "up"))
    found["blk.3.ffn_up_exps.weight.counts"] = np.full((8, 1), 20.0)
    (tmp_path / "m.gguf").write_bytes(gguf(found))
    _, done = import_file(tmp_path / "m.gguf", tmp_path / "h.parquet", shape)
    assert (read_histogram(tmp_path / "h.parquet").counts[2] == np.maximum(COUNTS[2], 20)).all()
    assert "layer 3: its tensors were counted differently: the largest counts are taken" in done.notes


REFUSED = "is a histogram of expert use (order unknown), which cannot be replayed"


@pytest.mark.parametrize("command", ["simulate", "tune", "validate"])
def test_replay_refuses(command: str, histogram: Path, make_profile: Any, tmp_path: Path, capsys: Any) -> None:
    make_profile().save(tmp_path / "profile.json")
    args = ["--profile", str(tmp_path / "profile.json"), "--trace", str(histogram)]
    more = {"simulate": ["--cache-ratio", "0.5"], "tune": ["--slots", "12", "--out", "s.json"], "validate": []}[command]
    assert main([command, *(["mini"] if command == "validate" else []), *args, *more]) == 2
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert REFUSED in shown
    assert "it can say which experts to keep resident" in shown
    with pytest.raises(FileError, match="cannot be replayed"):
        read_meta(histogram)


def test_info_and_export(histogram: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["trace", "info", str(histogram), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["order"] == "unknown"
    assert values["expert_load"][0] == {"layer": 1, "unused": 0, "top_share": 8 / 36, "uses": 36}
    assert main(["trace", "info", str(histogram)]) == 0
    assert "cannot be replayed" in capsys.readouterr().out
    assert main(["trace", "export", str(histogram), "--out", str(tmp_path / "f.pt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 4
    table = torch.load(tmp_path / "f.pt", weights_only=True)["logical_count"]
    assert (table.dtype, tuple(table.shape)) == (torch.int32, (1, 4, 8))
    assert (table[0, 1:].numpy() == COUNTS).all()
    assert not table[0, 0].any()
    assert main(["trace", "export", str(histogram), "--out", str(tmp_path / "x.csv")]) == 2
    assert REFUSED in capsys.readouterr().err


def test_sglang_kt_of_a_recording(make_trace: Any, write_trace: Any, tmp_path: Path, capsys: Any) -> None:
    trace = make_trace(requests=4, tokens=12)
    write_trace(tmp_path / "t.parquet", trace)
    args = ["trace", "export", str(tmp_path / "t.parquet"), "--format", "sglang-kt", "--out", str(tmp_path / "f.pt")]
    assert main(args) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'f.pt'}: 4 layers\n"
    table = torch.load(tmp_path / "f.pt", weights_only=True)["logical_count"]
    expected = [[int((trace.experts[:, index] == e).sum()) for e in range(8)] for index in range(3)]
    assert table[0].tolist() == [[0] * 8, *expected]


def test_sglang_kt_refuses_a_layer_without_counts(tmp_path: Path, shape: ModelShape, capsys: Any) -> None:
    (tmp_path / "m.gguf").write_bytes(gguf(changed(blk_2=np.zeros((8, 1)))))
    import_file(tmp_path / "m.gguf", tmp_path / "h.parquet", shape)
    assert main(["trace", "export", str(tmp_path / "h.parquet"), "--out", str(tmp_path / "f.pt")]) == 2
    assert "MoE layer 2 was never used: sglang-kt needs counts in every MoE layer" in capsys.readouterr().err
    (tmp_path / "m.gguf").write_bytes(gguf(changed(blk_2=np.full((8, 1), 2.0**40))))
    import_file(tmp_path / "m.gguf", tmp_path / "h.parquet", shape)
    assert main(["trace", "export", str(tmp_path / "h.parquet"), "--out", str(tmp_path / "f.pt")]) == 2
    assert "does not fit int32" in capsys.readouterr().err


def test_bad_histograms(histogram: Path) -> None:
    whole = pq.read_table(histogram)

    def written(table: Any) -> str:
        pq.write_table(table, histogram)
        with pytest.raises(FileError) as caught:
            read_histogram(histogram)
        return str(caught.value)

    assert "column 'expert' is missing or is not int32" in written(whole.drop_columns("expert"))
    assert "not every expert of every MoE layer, in order" in written(whole.slice(1))
    negative = whole.set_column(2, "tokens", pa.array([-3] * 24, pa.int64()))
    assert "row 0, column 'tokens': -3 is negative" in written(negative)
    empty = whole.set_column(2, "tokens", pa.array([None] * 24, pa.int64()))
    assert "column 'tokens' has an empty entry" in written(empty)
