"""SGLang's recorder and router logits, from tensor files made here; softmax and top-k by numpy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from foreload.errors import FileError, UsageError
from foreload.shape import ModelShape
from foreload.traces.histogram import read_histogram
from foreload.traces.importers import Imported, import_file, logits
from foreload.traces.io import read_trace
from foreload.traces.schema import DECODE, PREFILL

pytestmark = pytest.mark.unit
Import = Callable[..., tuple[Imported, Path]]


def routing(rows: int, layers: int = 3, seed: int = 0) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((rows, layers, 8)), axis=2)[:, :, :2]


@pytest.fixture
def imported(tmp_path: Path, shape: ModelShape) -> Import:
    """Save `value` with torch, import it, return what was done and the file."""

    def run(form: str, value: Any = None, name: str = "in.pt", model: ModelShape = shape) -> tuple[Imported, Path]:
        if value is not None:
            torch.save(value, tmp_path / name)
        return import_file(tmp_path / name, tmp_path / "out.parquet", model, form)[1], tmp_path / "out.parquet"

    return run


@pytest.mark.parametrize("layers", [3, 4])
def test_recorder_stat(imported: Import, layers: int) -> None:
    counts = torch.randint(1, 9, (5, layers, 8), dtype=torch.int32)
    counts[3:] = 0  # places of the circular buffer that were never written
    value = {"rank": 0, "logical_count": counts, "average_utilization_rate_over_window": None}
    done, path = imported("sglang-recorder", value)
    assert (done.order, done.rows) == ("unknown", 0)
    assert done.notes == ("2 of 5 steps are zero: unused places of the recorder's buffer",)
    assert (read_histogram(path).counts == counts[:, -3:].sum(0).numpy()).all()
    _, path = imported("sglang-recorder", {"logical_count": counts[0].long()})
    assert (read_histogram(path).counts == counts[0, -3:].numpy()).all()


BAD_STAT = {
    "experts": (torch.zeros(1, 3, 7, dtype=torch.int32), "logical_count: 7 experts: the model has 8"),
    "layers": (torch.zeros(1, 5, 8, dtype=torch.int32), "logical_count: 5 layers: the model has 4, of which 3 MoE"),
    "axes": (torch.zeros(8, dtype=torch.int32), "logical_count: 1 axes"),
    "negative": (torch.full((2, 3, 8), -1), "logical_count: step 0: a count is negative"),
    "floats": (torch.zeros(1, 3, 8), "logical_count: a tensor of integers is needed, got float32"),
}


@pytest.mark.parametrize("name", BAD_STAT)
def test_bad_recorder_stat(name: str, imported: Import) -> None:
    with pytest.raises(FileError) as caught:
        imported("sglang-recorder", {"logical_count": BAD_STAT[name][0]})
    assert BAD_STAT[name][1] in str(caught.value)


def record(ids: np.ndarray, start: int, mode: int, **fields: Any) -> dict[str, Any]:
    """One pass as mode per_token keeps it: ids [tokens, layers, 2] in a top-k axis of 8."""
    padded = np.full((4, len(ids), 8), -1, np.int32)
    padded[1:, :, :2] = ids.transpose(1, 0, 2)
    return {
        "forward_pass_id": 1,
        "rank": 0,
        "gatherer_key": "primary",
        "input_ids": list(range(100 + start, 100 + start + len(ids))),
        "positions": list(range(start, start + len(ids))),
        "extend_seq_lens": [len(ids)] if mode == 1 else None,
        "forward_mode": mode,
        "topk_ids_of_layer": torch.from_numpy(padded),
        "misc_objects": [],
        **fields,
    }


def test_recorder_per_token(imported: Import) -> None:
    ids = routing(12)
    idle = record(ids[:0], 0, 4)
    records = [record(ids[:3], 0, 1), record(ids[3:5], 3, 1), record(ids[5:6], 5, 2), idle, record(ids[6:7], 6, 2)]
    records += [record(ids[7:11], 0, 1), record(ids[11:], 4, 2)]
    records[0]["topk_ids_of_layer"][0] = 0  # the buffer is zero before its first reset: the dense layer
    done, path = imported("sglang-recorder", {"records": records, "last_physical_to_logical_map": None})
    trace = read_trace(path)
    assert (trace.experts == ids).all()
    assert trace.request.tolist() == [0] * 7 + [1] * 5
    assert trace.phase.tolist() == [PREFILL] * 5 + [DECODE] * 2 + [PREFILL] * 4 + [DECODE]
    assert trace.step.tolist() == [0, 0, 0, 1, 1, 2, 3, 4, 4, 4, 4, 5]
    assert trace.position.tolist() == [*range(7), *range(5)]
    assert trace.token_id.tolist() == [*range(100, 107), *range(100, 105)]
    assert done.notes == ()


def test_recorder_maps_physical_experts_and_drops_padding(imported: Import) -> None:
    logical, generator = routing(6), np.random.default_rng(3)
    physical_map = np.stack([generator.permutation(8) for _ in range(4)])
    inverse = np.argsort(physical_map, axis=1)
    physical = inverse[np.arange(1, 4)[None, :, None], logical]
    physical[4] = -1
    value = {"records": [record(physical, 0, 1)], "last_physical_to_logical_map": torch.from_numpy(physical_map)}
    done, path = imported("sglang-recorder", value)
    assert (read_trace(path).experts == logical[[0, 1, 2, 3, 5]]).all()
    assert read_trace(path).position.tolist() == [0, 1, 2, 3, 5]
    assert len(done.notes) == 2
    physical[5, 1] = 3
    with pytest.raises(FileError, match=r"record 0: row 5, layer 2: expert . is there twice"):
        imported("sglang-recorder", {**value, "records": [record(physical, 0, 1)]})


def ids_with(row: int, value: Any) -> np.ndarray:
    ids = routing(3)
    ids[row, 1] = value
    return ids


def fused() -> dict[str, Any]:
    one = record(routing(3), 0, 1)
    one["topk_ids_of_layer"][1:, :, 2] = 8
    return one


BAD_PER_TOKEN = {
    "twice": (record(ids_with(2, 4), 0, 1), "record 0: row 2, layer 2: expert 4 is there twice"),
    "outside": (record(ids_with(1, [8, 2]), 0, 1), "record 0: row 1, layer 2: expert 8 is outside 0 to 7"),
    "half": (record(ids_with(1, [1, -1]), 0, 1), "record 0: row 1, layer 2: expert -1 is outside 0 to 7"),
    "fusion": (fused(), "record 0: row 0: more than 2 experts: recorded with shared-expert fusion"),
    "batch": (record(routing(2), 5, 2), "record 0: several requests in one pass: passes do not name requests"),
    "two prompts": (record(routing(3), 0, 1, extend_seq_lens=[1, 2]), "record 0: several requests in one pass"),
    "verify": (record(routing(3), 0, 5), "record 0: forward_mode 5: 1 (extend) and 2 (decode) can be imported"),
    "cut": (record(routing(3), 0, 1, positions=[0, 1, 2, 3], input_ids=[1] * 4), "3 rows for 4 positions (truncated?)"),
    "tokens": (record(routing(3), 0, 1, input_ids=[1]), "record 0: 1 input_ids for 3 positions"),
    "no positions": (record(routing(3), 0, 1, positions=None), "record 0: positions is None"),
    "axes": (record(routing(3), 0, 1, topk_ids_of_layer=torch.zeros(4, 3, 1, dtype=torch.int32)), "4 x 3 x 1"),
}


@pytest.mark.parametrize("name", BAD_PER_TOKEN)
def test_bad_recorder_per_token(name: str, imported: Import) -> None:
    with pytest.raises(FileError) as caught:
        imported("sglang-recorder", {"records": [BAD_PER_TOKEN[name][0]], "last_physical_to_logical_map": None})
    assert BAD_PER_TOKEN[name][1] in str(caught.value)


def test_recorder_jump(imported: Import) -> None:
    records = [record(routing(3), 0, 1), record(routing(1), 7, 2)]
    with pytest.raises(FileError, match="record 1: position 7 does not follow 2: passes do not name requests"):
        imported("sglang-recorder", {"records": records})


def test_other_pt_files(imported: Import, tmp_path: Path) -> None:
    for value, expected in (
        ({"x": 1}, "neither 'logical_count'"),
        ({"records": [{"global_physical_count": torch.zeros(1)}]}, "modes stat and per_token can be imported"),
        (Path("x"), "cannot be loaded weights-only"),
    ):
        with pytest.raises(FileError) as caught:
            imported("sglang-recorder", value)
        assert expected in str(caught.value)
    whole = (tmp_path / "in.pt").read_bytes()
    (tmp_path / "in.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FileError, match=r"not a file of torch.save, or truncated|cannot be loaded weights-only"):
        imported("sglang-recorder")
    with pytest.raises(FileError, match="cannot be read: No such file"):
        imported("sglang-recorder", name="none.pt")


def chosen(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids and normalised weights [tokens, layers, 2] of logits [layers, tokens, 8]."""
    scores = np.exp(values) / np.exp(values).sum(axis=2, keepdims=True)
    ids = np.argsort(-scores, axis=2)[:, :, :2]
    weights = np.take_along_axis(scores, ids, 2)
    return ids.transpose(1, 0, 2), (weights / weights.sum(axis=2, keepdims=True)).transpose(1, 0, 2)


@pytest.mark.parametrize("form", ["tuple", "dict", "tensor", "npz", "safetensors", "stacked"])
def test_hf_logits(form: str, imported: Import, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(logits, "CHUNK_ROWS", 3)
    values = np.random.default_rng(0).normal(size=(3, 10, 8)).astype(np.float32)
    layers = [torch.from_numpy(one) for one in values]
    name, value = "in.pt", None
    if form == "npz":
        name = "in.npz"
        np.savez(tmp_path / name, **{f"layer{10 - i}": values[2 - i] for i in range(3)})  # numbered 8 to 10
    elif form == "safetensors":
        name = "in.safetensors"
        save_file({f"layers.{9 + i}.gate": one for i, one in enumerate(layers)}, tmp_path / name)
    elif form == "stacked":
        name = "in.safetensors"
        save_file({"router_logits": torch.from_numpy(values)}, tmp_path / name)
    else:
        value = {"tuple": tuple(layers), "dict": {"router_logits": layers}, "tensor": torch.from_numpy(values)}[form]
    _, path = imported("hf-logits", value, name)
    trace = read_trace(path)
    ids, weights = chosen(values)
    assert (trace.experts == ids).all()
    assert trace.weights is not None
    assert np.abs(trace.weights - weights).max() < 1e-3
    assert (trace.phase == PREFILL).all()
    assert (trace.step == 0).all()
    assert trace.meta.scoring == "softmax_topk"


def test_hf_logits_of_sizes_alone(imported: Import, shape: ModelShape) -> None:
    value = tuple(torch.randn(4, 8) for _ in range(3))
    done, path = imported("hf-logits", value, model=replace(shape, family="unknown"))
    assert not read_trace(path).meta.has_weights
    assert any("router weights are left out" in note for note in done.notes)
    unknown: Any = "unknown"
    with pytest.raises(UsageError, match="scoring 'unknown' gives no experts: give --model, or --scoring of softmax_"):
        imported("hf-logits", value, model=replace(shape, scoring=unknown))


def test_bad_logits(imported: Import, tmp_path: Path) -> None:
    good = [torch.randn(4, 8) for _ in range(3)]
    nan = [one.clone() for one in good]
    nan[1][2, 3] = float("nan")
    for value, expected in (
        (nan, "row 2, layer 2: logits are not finite"),
        (good[:2], "logits of 2 layers: the model has 3 MoE layers"),
        ([*good[:2], good[2][:3]], "layer 3: logits are 3 x 8: tokens x experts are 4 x 8 (truncated?)"),
        ([one[:, :7] for one in good], "layer 1: logits are 4 x 7"),
        ([one.long() for one in good], "layer 1: logits are torch.int64: floats are needed"),
        ({"a": good[0], "b": good[1], "c": good[2]}, "their names do not number the layers"),
        ([1, 2, 3], "a tuple of tensors [tokens, experts]"),
        ({}, "a tuple of tensors"),
    ):
        with pytest.raises(FileError) as caught:
            imported("hf-logits", value)
        assert expected in str(caught.value)
    for name in ("in.npz", "in.safetensors"):
        (tmp_path / name).write_bytes(b"no such thing")
        with pytest.raises(FileError, match=r"in\..*: not a "):
            imported("hf-logits", name=name)
    (tmp_path / "in.bin").write_bytes(b"no such thing")
    with pytest.raises(FileError, match=r"suffix '.bin': .pt, .npz, .safetensors are known"):
        imported("hf-logits", name="in.bin")
