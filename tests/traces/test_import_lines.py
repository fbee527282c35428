"""Formats with a record per token and layer: minimal JSON lines, CSV, moe-policylang, Megatron."""

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
from foreload.shape import ModelShape
from foreload.traces.importers import import_file, long_rows
from foreload.traces.io import read_trace
from foreload.traces.schema import DECODE, PREFILL, Trace

pytestmark = pytest.mark.unit
LAYERS = (1, 2, 3)


def routing(rows: int, seed: int = 0) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((rows, 3, 8)), axis=2)[:, :, :2]


@pytest.fixture
def imported(tmp_path: Path, shape: ModelShape) -> Callable[..., Trace]:
    """Import what is in `name` (written first, if `text` is given) as `form` and read it back."""

    def run(form: str | None, name: str, text: str | None = None) -> Trace:
        if text is not None:
            (tmp_path / name).write_text(text)
        import_file(tmp_path / name, tmp_path / "out.parquet", shape, form)
        return read_trace(tmp_path / "out.parquet")

    return run


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def minimal(ids: np.ndarray, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"t": t, "layer": layer, "experts": ids[t, index].tolist(), **fields}
        for t in range(len(ids))
        for index, layer in enumerate(LAYERS)
    ]


def test_minimal_jsonl(imported: Any) -> None:
    ids = routing(6)
    trace = imported(None, "in.jsonl", lines(minimal(ids)))
    assert (trace.experts == ids).all()
    assert trace.position.tolist() == list(range(6))
    assert trace.step.tolist() == list(range(6))
    assert (trace.phase == DECODE).all()


def test_jsonl_prefill_by_layer_then_decode(imported: Any) -> None:
    ids = routing(7)
    records = sorted(minimal(ids[:5], phase="prefill"), key=lambda r: r["layer"])
    records += [{**r, "phase": "decode"} for r in minimal(ids)[15:]]
    trace = imported("jsonl", "in.jsonl", lines(records))
    assert (trace.experts == ids).all()
    assert trace.phase.tolist() == [PREFILL] * 5 + [DECODE] * 2
    assert trace.step.tolist() == [0, 0, 0, 0, 0, 1, 2]


def test_jsonl_prefill_by_token_is_one_step(imported: Any) -> None:
    records = minimal(routing(4), phase="prefill") + minimal(routing(2), phase="prefill", request=1, token_id=9)
    trace = imported("jsonl", "in.jsonl", lines(records))
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.request.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.token_id.tolist() == [-1, -1, -1, -1, 9, 9]


GOOD = minimal(routing(3))


def with_record(index: int, **fields: Any) -> list[dict[str, Any]]:
    return [{**record, **fields} if at == index else record for at, record in enumerate(GOOD)]


BAD_JSONL = {
    "twice": (with_record(4, experts=[3, 3]), "line 5: expert 3 is there twice"),
    "outside": (with_record(4, experts=[3, 8]), "line 5: expert 8 is outside 0 to 7"),
    "negative": (with_record(4, experts=[-1, 3]), "line 5: expert -1 is outside 0 to 7"),
    "too many": (with_record(4, experts=[1, 2, 3]), "line 5: 3 experts: the model takes 2"),
    "too few": (with_record(4, experts=[1]), "line 5: 1 experts: the model takes 2"),
    "no list": (with_record(4, experts=7), "line 5: experts is 7: a list of whole numbers"),
    "true is no id": (with_record(4, experts=[True, 2]), "line 5: experts is [True, 2]"),
    "dense layer": (with_record(4, layer=0), "line 5: layer 0 is no MoE layer: they are 1 to 3"),
    "layer again": (with_record(4, layer=1), "line 5: token 1 has layer 1 already"),
    "token again": ([*GOOD, GOOD[0]], "line 10: token 0 follows token 2: it is complete"),
    "phase": (with_record(4, phase="x"), "line 5: phase is 'x': phases are prefill, decode"),
    "phase changes": (with_record(4, phase="prefill"), "line 5: token 1 changes its phase or token id between layers"),
    "t": (with_record(4, t=-1), "line 5: t is -1: a whole number from 0 to 2147483647"),
    "no t": ([{"layer": 1, "experts": [1, 2]}], "line 1: t is None"),
    "large t": ([{**r, "t": 2**31} for r in GOOD[:3]], "line 1: t is 2147483648: a whole number from 0 to 2147483647"),
    "truncated tail": (GOOD[:-1], "line 8: the file ends here, but token 2 of request 0 has 2 of 3 layers: layer 3"),
    "gap": ([r for r in GOOD if r is not GOOD[1]], "line 8: the file ends here, but token 0 of request 0 has 2 of 3"),
}


@pytest.mark.parametrize("name", BAD_JSONL)
def test_bad_jsonl(name: str, imported: Any, tmp_path: Path) -> None:
    records, expected = BAD_JSONL[name]
    with pytest.raises(FileError) as caught:
        imported("jsonl", "in.jsonl", lines(records))
    assert expected in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


def test_jsonl_cut_line(imported: Any) -> None:
    with pytest.raises(FileError, match=r"line 9: not valid JSON \(the file ends within it: truncated\?\)"):
        imported("jsonl", "in.jsonl", lines(GOOD)[:-5])


def test_what_waits_is_bounded(imported: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(long_rows, "MAX_OPEN", 2)
    gap = [record for record in GOOD if record is not GOOD[1]]
    with pytest.raises(FileError, match=r"line 6: token 0 .* layer 2 is missing, and 2 tokens wait behind it"):
        imported("jsonl", "in.jsonl", lines(gap))


def csv_text(ids: np.ndarray) -> str:
    rows = [f"{t},{layer},{a},{b}" for t, token in enumerate(ids) for layer, (a, b) in zip(LAYERS, token, strict=True)]
    return "\n".join(["token,layer,e0,e1", *rows]) + "\n"


def test_csv(imported: Any) -> None:
    ids = routing(5)
    trace = imported(None, "in.csv", csv_text(ids))
    assert (trace.experts == ids).all()
    assert (trace.phase == DECODE).all()
    head, *rows = csv_text(ids).splitlines()
    more = "\r\n".join([f"phase,request,{head}", *(f"prefill,3,{row}" for row in rows)])
    trace = imported("csv", "in.csv", more)
    assert (trace.phase == PREFILL).all()
    assert (trace.request == 3).all()


BAD_CSV = {
    "twice": ("token,layer,e0,e1\n0,1,2,2\n", "line 2: expert 2 is there twice"),
    "outside": ("token,layer,e0,e1\n0,1,2,8\n", "line 2: expert 8 is outside 0 to 7"),
    "no number": ("token,layer,e0,e1\n0,1,2,x\n", "line 2: e1 is 'x': a whole number"),
    "cut": ("token,layer,e0,e1\n0,1,2,3\n0,2,1", "line 3: 3 fields: the head has 4 (truncated?)"),
    "ends": ("token,layer,e0,e1\n0,1,2,3\n", "line 2: the file ends here, but token 0 of request 0 has 1 of 3 layers"),
    "no column": ("token,layer,e0\n", "line 1: column 'e1' is missing: columns are token, layer, e0 to e1"),
    "k over": ("token,layer,e0,e1,e2\n", "line 1: column 'e2' is not known"),
    "doubled": ("token,layer,e0,e1,e1\n", "line 1: a column is there twice"),
    "empty": ("", "line 1: column 'token' is missing"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_bad_csv(name: str, imported: Any) -> None:
    text, expected = BAD_CSV[name]
    with pytest.raises(FileError) as caught:
        imported("csv", "in.csv", text)
    assert expected in str(caught.value)


def policylang_rows(ids: np.ndarray, prompt: Any, phase: str = "decode") -> list[dict[str, Any]]:
    return [
        {
            "prompt_id": prompt,
            "token_idx": t,
            "layer_idx": layer,
            "selected_experts": ids[t, index].tolist(),
            "router_scores": [0.6, 0.4],
            "token_id": 100 + t,
            "phase": phase,
        }
        for t in range(len(ids))
        for index, layer in enumerate(LAYERS)
    ]


def test_policylang_parquet(imported: Any, tmp_path: Path) -> None:
    first, second = routing(5), routing(4, seed=1)
    rows = policylang_rows(first, "a", "prefill") + policylang_rows(second, "b")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=7)
    trace = imported(None, "in.parquet")
    assert (trace.experts == np.concatenate([first, second])).all()
    assert trace.request.tolist() == [0] * 5 + [1] * 4
    assert trace.phase.tolist() == [PREFILL] * 5 + [DECODE] * 4
    assert trace.token_id.tolist() == [100, 101, 102, 103, 104, 100, 101, 102, 103]
    assert not trace.meta.has_weights


def test_policylang_jsonl(imported: Any) -> None:
    ids = routing(4)
    rows = [
        {"p": 7, "t": t, "l": layer, "e": ids[t, index].tolist(), "s": [0.6, 0.4]}
        for t in range(4)
        for index, layer in enumerate(LAYERS)
    ]
    text = lines([{"version": 1, "model": "m"}, *rows])
    assert (imported("policylang", "in.jsonl", text).experts == ids).all()
    assert (imported(None, "in.jsonl", lines(rows)).experts == ids).all()
    rows[4]["e"] = [1, 1]
    with pytest.raises(FileError, match="line 6: expert 1 is there twice"):
        imported("policylang", "in.jsonl", lines([{"version": 1}, *rows]))


def test_bad_policylang_parquet(imported: Any, tmp_path: Path) -> None:
    rows = policylang_rows(routing(3), 0)
    rows[5]["selected_experts"] = [1, 9]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    with pytest.raises(FileError, match="row 5: expert 9 is outside 0 to 7"):
        imported("policylang", "in.parquet")
    pq.write_table(pa.Table.from_pylist(policylang_rows(routing(3), 0)[:-1]), tmp_path / "in.parquet")
    with pytest.raises(FileError, match="row 7: the file ends here"):
        imported("policylang", "in.parquet")
    pq.write_table(pa.Table.from_pylist([{"prompt_id": 0}]), tmp_path / "in.parquet")
    with pytest.raises(FileError, match="column 'token_idx' is missing"):
        imported("policylang", "in.parquet")
    (tmp_path / "in.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(FileError, match="not Parquet, or truncated"):
        imported("policylang", "in.parquet")


def megatron(step: int, ids: np.ndarray, **fields: Any) -> list[dict[str, Any]]:
    return [
        {
            "step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": 0,
            "num_tokens": len(ids), "topk": 2, "top_indices": ids[:, index].tolist(), **fields,
        }
        for index, layer in enumerate(LAYERS)
    ]  # fmt: skip


def test_megatron(imported: Any) -> None:
    ids = routing(6)
    draft = megatron(0, routing(4, seed=9), block="mtp", mtp_idx=0)
    records = megatron(0, ids[:4]) + draft[:1] + megatron(1, ids[4:5]) + megatron(2, ids[5:])
    trace = imported(None, "in.jsonl", lines(records))
    assert (trace.experts == ids).all()
    assert trace.phase.tolist() == [PREFILL] * 4 + [DECODE] * 2
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 2]
    assert trace.position.tolist() == list(range(6))


STEP = megatron(0, routing(4))
BAD_MEGATRON = {
    "twice": ([{**STEP[0], "top_indices": [[1, 2], [3, 3], [1, 2], [1, 2]]}], "line 1, row 1, layer 1: expert 3 is"),
    "outside": ([{**STEP[0], "top_indices": [[1, 2]] * 3 + [[8, 2]]}], "line 1, row 3, layer 1: expert 8 is outside"),
    "k over": ([{**STEP[0], "top_indices": [[1, 2, 3]] * 4}], "line 1, row 0, layer 1: 3 experts: the model takes 2"),
    "rows": ([{**STEP[0], "top_indices": [[1, 2]] * 3}], "line 1: 3 rows of top_indices: the step has 4 tokens"),
    "tokens": ([STEP[0], {**STEP[1], "num_tokens": 3}], "line 2: 4 rows of top_indices: the step has 4 tokens"),
    "layer": ([{**STEP[0], "layer": 0}], "line 1: layer 0 is no MoE layer of the model"),
    "layer again": ([STEP[0], STEP[0]], "line 2: step 0 has layer 1 already"),
    "truncated tail": (STEP[:2], "line 2: the step ends here without layer 3 (truncated?)"),
    "hole": ([*STEP[:2], *megatron(1, routing(1))], "line 2: the step ends here without layer 3"),
    "backwards": ([*megatron(1, routing(1)), *STEP], "line 4: step 0 follows step 1"),
    "ranks": ([STEP[0], {**STEP[1], "rank": 1}], "line 2: records of several ranks"),
}


@pytest.mark.parametrize("name", BAD_MEGATRON)
def test_bad_megatron(name: str, imported: Any) -> None:
    records, expected = BAD_MEGATRON[name]
    with pytest.raises(FileError) as caught:
        imported("megatron", "in.jsonl", lines(records))
    assert expected in str(caught.value)
