"""Replies of vLLM and SGLang, built here as their servers write them, against the rows that are imported."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreload.errors import FileError
from foreload.shape import ModelShape
from foreload.traces.importers import import_file
from foreload.traces.io import read_trace
from foreload.traces.schema import DECODE, PREFILL, Trace

pytestmark = pytest.mark.unit


def routing(rows: int, layers: int = 3, experts: int = 8, k: int = 2, seed: int = 0) -> np.ndarray:
    return np.argsort(np.random.default_rng(seed).random((rows, layers, experts)), axis=2)[:, :, :k]


@pytest.fixture
def imported(tmp_path: Path, shape: ModelShape) -> Callable[..., Trace]:
    """Write `text`, import it as `form`, read it back."""

    def run(form: str | None, text: str, name: str = "in.json") -> Trace:
        (tmp_path / name).write_text(text)
        import_file(tmp_path / name, tmp_path / "out.parquet", shape, form)
        return read_trace(tmp_path / "out.parquet")

    return run


def npy(ids: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, ids.astype(np.int16))
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_reply(prompt: Any, *generated: Any, **fields: Any) -> dict[str, Any]:
    choices = [{"index": i, "text": "x", "routed_experts": ids} for i, ids in enumerate(generated)]
    return {"id": "cmpl-1", "model": "m", "choices": choices, "prompt_routed_experts": prompt, **fields}


@pytest.mark.parametrize("encode", [lambda ids: ids.tolist(), npy])
def test_vllm(imported: Any, encode: Any) -> None:
    prompt, generated = routing(5), routing(4, seed=1)
    prompt[:2] = -1
    reply = vllm_reply(encode(prompt), encode(generated), prompt_token_ids=[10, 11, 12, 13, 14])
    reply["choices"][0]["token_ids"] = [20, 21, 22, 23, 24]
    trace = imported(None, json.dumps(reply, indent=1))
    assert trace.phase.tolist() == [PREFILL] * 3 + [DECODE] * 4
    assert trace.position.tolist() == [2, 3, 4, 5, 6, 7, 8]
    assert trace.token_id.tolist() == [12, 13, 14, 20, 21, 22, 23]
    assert trace.step.tolist() == [0, 0, 0, 1, 2, 3, 4]
    assert (trace.experts == np.concatenate([prompt[2:], generated])).all()
    meta = trace.meta
    assert (meta.source, meta.weights_hash, meta.tokenizer_hash) == ("import vllm", "unknown", "unknown")
    assert (meta.seed, meta.order, meta.machine) == (-1, "recorded", "unknown")


def test_vllm_many_replies_and_choices(imported: Any) -> None:
    first = vllm_reply(routing(3).tolist(), routing(2, seed=1).tolist(), routing(2, seed=2).tolist())
    second = vllm_reply(None, routing(1, seed=3).tolist(), None, usage={"prompt_tokens": 7})
    trace = imported(None, f"{json.dumps(first)}\n\n{json.dumps(second)}\n", "in.jsonl")
    assert trace.request.tolist() == [0, 0, 0, 0, 0, 1, 1, 2]
    assert trace.position.tolist() == [0, 1, 2, 3, 4, 3, 4, 7]
    assert (trace.token_id == -1).all()
    assert imported("vllm", json.dumps([first, second])).rows == 8


def changed(ids: np.ndarray, row: int, layer: int, value: Any) -> list[Any]:
    listed: list[Any] = ids.tolist()
    listed[row][layer] = value
    return listed


BAD_VLLM = {
    "twice": (changed(routing(4), 2, 1, [3, 3]), "row 2, layer 2: expert 3 is there twice"),
    "outside": (changed(routing(4), 1, 0, [3, 8]), "row 1, layer 1: expert 8 is outside 0 to 7"),
    "half cached": (changed(routing(4), 3, 0, [-1, -1]), "row 3, layer 1: expert -1 is outside 0 to 7"),
    "too many": (changed(routing(4), 0, 2, [1, 2, 3]), "row 0, layer 3: 3 experts: the model takes 2"),
    "too few": (changed(routing(4), 0, 2, [1]), "row 0, layer 3: 1 experts: the model takes 2"),
    "no ids": (changed(routing(4), 0, 2, ["a", 1]), "row 0, layer 3: experts is ['a', 1]: a list of whole numbers"),
    "large": (changed(routing(4), 0, 2, [2**70, 1]), "row 0, layer 3: experts is [1180591620717411303424, 1]"),
    "a layer less": ([*routing(2).tolist(), routing(1)[0].tolist()[:2]], "row 2: 2 MoE layers: the model has 3"),
    "text": ("AAAA", "neither nested lists nor base64 of a .npy file"),
    "floats": (npy(routing(2))[:40], "neither nested lists nor base64 of a .npy file"),
    "flat": (npy(routing(2).reshape(2, -1)), "2 axes of int16"),
    "other layers": (npy(routing(2, layers=4)), "experts are 2 x 4 x 2: rows x MoE layers x top-k are 2 x 3 x 2"),
}


@pytest.mark.parametrize("name", BAD_VLLM)
def test_bad_vllm(name: str, imported: Any, tmp_path: Path) -> None:
    rows, expected = BAD_VLLM[name]
    good = json.dumps(vllm_reply(routing(3).tolist(), routing(2).tolist()))
    with pytest.raises(FileError) as caught:
        imported("vllm", good + "\n" + json.dumps(vllm_reply(routing(3).tolist(), rows)), "in.jsonl")
    assert "in.jsonl: line 2, choices[0].routed_experts" in str(caught.value)
    assert expected in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "neither JSON nor JSON lines"),
        ("[1]", "reply 0: an object is needed, got int"),
        ('{"id": 1}', "line 1: field 'choices' is missing"),
        ('{"choices": []}\n{"choi', "line 2: not valid JSON (the file ends within it: truncated?)"),
        ('{"choices": []}', "holds no rows to import"),
        ('{"choices": [3]}', "line 1, choices[0]: an object is needed, got 3"),
        ('{"choices": [], "usage": {"prompt_tokens": true}}', "line 1: usage.prompt_tokens is True"),
        (json.dumps(vllm_reply(routing(3).tolist(), prompt_token_ids=[1])), "3 rows for 1 token ids"),
    ],
)
def test_no_vllm_replies(text: str, expected: str, imported: Any) -> None:
    with pytest.raises(FileError) as caught:
        imported("vllm", text)
    assert expected in str(caught.value)


def int32(ids: np.ndarray) -> str:
    return base64.b64encode(ids.astype("<i4").tobytes()).decode()


def sglang_reply(ids: str, prompt: int = 4, completion: int = 4, **meta: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return {"text": "x", "meta_info": {"id": "a", **counts, "routed_experts": ids, **meta}}


@pytest.mark.parametrize("layers", [3, 4])  # MoE layers alone, or all of which the first is dense
def test_sglang(imported: Any, layers: int) -> None:
    ids = routing(7, layers=layers)
    trace = imported(None, json.dumps(sglang_reply(int32(ids))))
    assert trace.phase.tolist() == [PREFILL] * 4 + [DECODE] * 3
    assert trace.step.tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert trace.position.tolist() == list(range(7))
    assert (trace.experts == ids[:, -3:]).all()


def test_sglang_start_and_openai_form(imported: Any) -> None:
    ids = routing(5, layers=4)
    trace = imported("sglang", json.dumps(sglang_reply(int32(ids), routed_experts_start_len=2)))
    assert trace.position.tolist() == [2, 3, 4, 5, 6]
    assert trace.phase.tolist() == [PREFILL] * 2 + [DECODE] * 3
    choice = {"index": 0, "sgl_ext": {"routed_experts": int32(routing(7))}}
    reply = {"choices": [choice], "usage": {"prompt_tokens": 4, "completion_tokens": 4}}
    assert imported("sglang", json.dumps(reply)).phase.tolist() == [PREFILL] * 4 + [DECODE] * 3


def test_sglang_fused_shared_expert_is_dropped(tmp_path: Path, shape: ModelShape) -> None:
    ids = np.concatenate([routing(7), np.full((7, 3, 1), 8)], axis=2)
    (tmp_path / "in.json").write_text(json.dumps(sglang_reply(int32(ids))))
    _, done = import_file(tmp_path / "in.json", tmp_path / "out.parquet", shape, "sglang")
    assert done.notes == ("the fused shared expert (id = number of experts) was dropped from every row",)
    assert (read_trace(tmp_path / "out.parquet").experts == routing(7)).all()


BAD_SGLANG = {
    "truncated bytes": (sglang_reply(base64.b64encode(b"12345").decode()), "5 bytes: not whole int32 (truncated?)"),
    "truncated tail": (sglang_reply(int32(routing(6))), "36 expert ids do not fit (truncated?): 7 x 4 layers x 2"),
    "no base64": (sglang_reply("é"), "routed_experts is not base64"),
    "fused in k": (sglang_reply(int32(np.where(routing(7) == 7, 8, routing(7)))), "is outside 0 to 7"),
    "three routed": (sglang_reply(int32(routing(7, k=3))), "row 0: 3 experts, of which not exactly one"),
    "twice": (sglang_reply(int32(np.full((7, 3, 2), 5))), "row 0, layer 1: expert 5 is there twice"),
    "late": (
        sglang_reply(int32(np.concatenate([routing(6), np.full((1, 3, 2), 5)]))),
        "row 6, layer 1: expert 5 is there twice",
    ),
    "not asked": ({"meta_info": {"prompt_tokens": 1, "completion_tokens": 1}}, "field 'routed_experts' is missing"),
    "no counts": ({"meta_info": {"routed_experts": ""}}, "prompt_tokens is None"),
    "other reply": ({"text": ""}, "is this a reply of SGLang?"),
    "no choice": ({"choices": [3], "usage": {"prompt_tokens": 3}}, "choices[0]: an object is needed, got 3"),
    "no extension": ({"choices": [{}], "usage": {"prompt_tokens": 3}}, "choices[0].sgl_ext: an object is needed"),
    "no usage": ({"choices": [{}], "usage": {"prompt_tokens": 3, "completion_tokens": "x"}}, "completion_tokens is"),
    "ambiguous": (
        {
            "choices": [{"sgl_ext": {"routed_experts": int32(routing(4))}}] * 2,
            "usage": {"prompt_tokens": 3, "completion_tokens": 4},
        },
        "24 expert ids fit in more than one way",
    ),
}


@pytest.mark.parametrize("name", BAD_SGLANG)
def test_bad_sglang(name: str, imported: Any) -> None:
    reply, expected = BAD_SGLANG[name]
    with pytest.raises(FileError) as caught:
        imported("sglang", json.dumps(reply))
    assert expected in str(caught.value)
    assert "in.json: line 1" in str(caught.value)
