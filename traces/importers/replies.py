"""Replies of servers that return the experts of each token: vLLM and SGLang, both `--enable-return-routed-experts`.

A file holds one reply, a list of them, or one a line.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.traces.importers.base import UNKNOWN_TOKEN, Block, Blocks, Source, id_list, mapping, whole
from foreload.traces.importers.json_files import documents
from foreload.traces.schema import DECODE, PREFILL

Ids = NDArray[np.int64]


def vllm(source: Source) -> Blocks:
    """vLLM: `prompt_routed_experts` [P, L, k] is prefill, `choices[].routed_experts` [T, L, k] is decode.

    L counts MoE layers. Rows of -1 (cached prefix) are dropped. The second choice of a reply is a request of its own.
    """
    return Blocks(_vllm(source))


def _vllm(source: Source) -> Iterator[Block]:
    request = 0
    for place, reply in documents(source):
        prompt = _nested(source, f"{place}, prompt_routed_experts", reply.get("prompt_routed_experts"))
        tokens = reply.get("prompt_token_ids")
        if len(prompt):
            where = f"{place}, prompt_routed_experts"
            yield from _kept(source, Block(request, PREFILL, np.arange(len(prompt)), prompt, where), tokens)
        length = len(prompt) or _prompt_tokens(source, place, reply)
        choices = reply.get("choices")
        if not isinstance(choices, list):
            raise source.error(place, "field 'choices' is missing: is this a reply of vLLM?")
        for index, one in enumerate(choices):
            choice = mapping(source, f"{place}, choices[{index}]", one)
            where = f"{place}, choices[{index}].routed_experts"
            rows = _nested(source, where, choice.get("routed_experts"))
            if len(rows):
                block = Block(request, DECODE, length + np.arange(len(rows)), rows, where)
                yield from _kept(source, block, choice.get("token_ids"))
            elif not len(prompt):
                source.note(f"{where}: absent (a preempted request has none): left out")
            request += 1


def _prompt_tokens(source: Source, place: str, reply: dict[str, Any]) -> int:
    usage = reply.get("usage")
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return 0 if count is None else whole(source, place, "usage.prompt_tokens", count)


def _nested(source: Source, where: str, value: Any) -> Ids:
    """Nested lists, or base64 of a .npy file, as [rows, L, k]."""
    shape = source.shape
    if value is None or value == []:
        return np.zeros((0, shape.n_moe_layers, shape.top_k), np.int64)
    if isinstance(value, str):
        return _npy(source, where, value)
    rows = value if isinstance(value, list) else [value]
    for number, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != shape.n_moe_layers:
            found = len(row) if isinstance(row, list) else type(row).__name__
            raise source.error(where, f"row {number}: {found} MoE layers: the model has {shape.n_moe_layers}")
        for layer, ids in zip(shape.moe_layers, row, strict=True):
            place = f"{where}, row {number}, layer {layer}"
            if len(id_list(source, place, "experts", ids)) != shape.top_k:
                raise source.error(place, f"{len(ids)} experts: the model takes {shape.top_k}")
    return np.array(rows, np.int64)


def _npy(source: Source, where: str, text: str) -> Ids:
    try:
        array = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise source.error(where, f"neither nested lists nor base64 of a .npy file: {error}") from error
    if array.dtype.kind not in "iu" or array.ndim != 3:
        raise source.error(
            where, f"{array.ndim} axes of {array.dtype}: [rows, MoE layers, top-k] of integers is needed"
        )
    found: Ids = array.astype(np.int64)
    return found


def _kept(source: Source, block: Block, tokens: Any) -> Iterator[Block]:
    """`block` without its rows of -1, with token ids where the reply has them."""
    n = len(block.position)
    ids = np.full(n, UNKNOWN_TOKEN)
    if tokens is not None:
        listed = id_list(source, block.where, "token ids", tokens)
        if len(listed) not in (n, n + (block.phase == DECODE)):
            raise source.error(block.where, f"{n} rows for {len(listed)} token ids")
        ids = np.array(listed[:n], np.int64)
    kept = ~(block.experts == -1).all(axis=(1, 2))
    if not kept.all():
        source.note(f"{block.where}: {int((~kept).sum())} rows of -1 (cached prefix) left out")
    if kept.any():
        rows = np.flatnonzero(kept)
        yield Block(
            block.request, block.phase, block.position[rows], block.experts[rows], block.where, rows, token_id=ids[rows]
        )


def sglang(source: Source) -> Blocks:
    """SGLang: base64 of int32 [tokens, layers, k] over positions [routed_experts_start_len, seqlen - 1).

    In `meta_info.routed_experts` or `choices[].sgl_ext.routed_experts`. Layers count all layers, or MoE layers alone.
    """
    return Blocks(_sglang(source))


def _sglang(source: Source) -> Iterator[Block]:
    request = 0
    for place, reply in documents(source):
        for where, holder, prompt, completion in _sglang_parts(source, place, reply):
            text = holder.get("routed_experts")
            if text is None:
                raise source.error(where, "field 'routed_experts' is missing: ask with return_routed_experts: true")
            start = whole(source, where, "routed_experts_start_len", holder.get("routed_experts_start_len", 0))
            flat = _int32(source, where, text)
            rows = None if completion is None else prompt + completion - 1 - start
            experts = _reshaped(source, where, flat, rows)
            position = start + np.arange(len(experts))
            split = max(0, min(prompt - start, len(experts)))
            if split:
                yield Block(request, PREFILL, position[:split], experts[:split], where)
            if split < len(experts):
                yield Block(request, DECODE, position[split:], experts[split:], where, np.arange(split, len(experts)))
            request += 1


def _sglang_parts(
    source: Source, place: str, reply: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any], int, int | None]]:
    """Per sequence of a reply: place, what holds `routed_experts`, prompt tokens, generated tokens if known."""
    meta = reply.get("meta_info")
    if isinstance(meta, dict):
        where = f"{place}, meta_info"
        counts = [whole(source, where, name, meta.get(name)) for name in ("prompt_tokens", "completion_tokens")]
        yield where, meta, counts[0], counts[1]
        return
    usage, choices = reply.get("usage"), reply.get("choices")
    if not isinstance(usage, dict) or not isinstance(choices, list):
        raise source.error(place, "neither 'meta_info' nor 'choices' and 'usage': is this a reply of SGLang?")
    prompt = whole(source, place, "usage.prompt_tokens", usage.get("prompt_tokens"))
    alone = usage.get("completion_tokens") if len(choices) == 1 else None
    if alone is not None:
        alone = whole(source, place, "usage.completion_tokens", alone)
    for index, choice in enumerate(choices):
        where = f"{place}, choices[{index}]"
        holder = mapping(source, f"{where}.sgl_ext", mapping(source, where, choice).get("sgl_ext"))
        yield f"{where}.sgl_ext", holder, prompt, alone


def _int32(source: Source, where: str, text: Any) -> Ids:
    try:
        raw = base64.b64decode(text, validate=True)
    except (ValueError, TypeError) as error:
        raise source.error(where, f"routed_experts is not base64: {error}") from error
    if len(raw) % 4:
        raise source.error(where, f"routed_experts has {len(raw)} bytes: not whole int32 (truncated?)")
    return np.frombuffer(raw, "<i4").astype(np.int64)


def _reshaped(source: Source, where: str, flat: Ids, rows: int | None) -> Ids:
    """[rows, MoE layers, k]: the one reading of `flat` that fits; a fused shared expert is dropped."""
    shape = source.shape
    forms = {(layers, width) for layers in (shape.layers, shape.n_moe_layers) for width in (0, 1)}
    fitting = [
        (layers, shape.top_k + extra)
        for layers, extra in sorted(forms)
        if (len(flat) == rows * layers * (shape.top_k + extra) if rows is not None
            else len(flat) % (layers * (shape.top_k + extra)) == 0)
    ]  # fmt: skip
    if len(fitting) != 1:
        wanted = f"{'tokens' if rows is None else rows} x {shape.layers} layers x {shape.top_k} experts"
        problem = "fit in more than one way" if fitting else "do not fit (truncated?)"
        raise source.error(where, f"{len(flat)} expert ids {problem}: {wanted} are expected")
    layers, width = fitting[0]
    experts = flat.reshape(-1, layers, width)
    if layers != shape.n_moe_layers:
        experts = experts[:, list(shape.moe_layers)]
    return experts if width == shape.top_k else _without_shared(source, where, experts)


def _without_shared(source: Source, where: str, experts: Ids) -> Ids:
    shared = experts >= source.shape.experts
    if not (shared.sum(axis=2) == 1).all():
        row = int(np.argwhere(shared.sum(axis=2) != 1)[0, 0])
        problem = f"row {row}: {source.shape.top_k + 1} experts, of which not exactly one is a fused shared expert"
        raise source.error(where, problem)
    source.note("the fused shared expert (id = number of experts) was dropped from every row")
    n, layers, width = experts.shape
    return experts[~shared].reshape(n, layers, width - 1)
