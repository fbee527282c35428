"""Files of SGLang's expert-distribution recorder (`.pt`), told apart by what they hold.

Mode stat (and stat_approx) counts tokens per step, layer and expert: a histogram. Mode per_token keeps every token's
experts: a recording, if one request ran at a time, for passes do not name the request of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.traces.importers.base import Block, Blocks, Counts, Source, id_list, whole
from foreload.traces.importers.tensors import load_pt
from foreload.traces.schema import DECODE, PREFILL

EXTEND, DECODE_MODE, IDLE = 1, 2, 4  # SGLang's ForwardMode
Ids = NDArray[np.int64]


def recorder(source: Source) -> Blocks | Counts:
    """Counts of mode stat, or the rows of mode per_token; FileError for other files."""
    value = load_pt(source)
    if isinstance(value, dict) and "logical_count" in value:
        return Counts(_counts(source, value["logical_count"]))
    records = value.get("records") if isinstance(value, dict) else None
    if not isinstance(records, list):
        raise source.error("", "neither 'logical_count' (mode stat) nor 'records' (mode per_token)")
    if any(not isinstance(one, dict) or "topk_ids_of_layer" not in one for one in records):
        raise source.error("", "records without 'topk_ids_of_layer': modes stat and per_token can be imported")
    return Blocks(_rows(source, records, value.get("last_physical_to_logical_map")))


def _counts(source: Source, value: Any) -> Ids:
    """[MoE layers, experts], summed over the steps; steps of zeros are unused places of the recorder's buffer."""
    counts = _array(source, "logical_count", value)
    if counts.ndim == 2:
        counts = counts[None]
    where = "logical_count"
    if counts.ndim != 3:
        raise source.error(where, f"{counts.ndim} axes: steps, layers, experts are needed")
    if (counts < 0).any():
        raise source.error(where, f"step {int(np.argwhere(counts < 0)[0, 0])}: a count is negative")
    used = np.asarray(counts.any(axis=(1, 2)))
    if not used.all():
        source.note(f"{int((~used).sum())} of {len(used)} steps are zero: unused places of the recorder's buffer")
    chosen = _moe_layers(source, where, counts, 1)
    if chosen.shape[2] != source.shape.experts:
        raise source.error(where, f"{chosen.shape[2]} experts: the model has {source.shape.experts}")
    return np.asarray(chosen.sum(axis=0), np.int64)


def _moe_layers(source: Source, where: str, values: Ids, axis: int) -> Ids:
    """The MoE layers of an array that holds all layers, or MoE layers alone."""
    shape = source.shape
    found = values.shape[axis]
    if found == shape.layers:
        return np.take(values, shape.moe_layers, axis)
    if found == shape.n_moe_layers:
        return values
    raise source.error(where, f"{found} layers: the model has {shape.layers}, of which {shape.n_moe_layers} MoE layers")


def _array(source: Source, where: str, value: Any) -> Ids:
    import torch

    array = value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    if array.dtype.kind not in "iu":
        raise source.error(where, f"a tensor of integers is needed, got {array.dtype}")
    return np.asarray(array, np.int64)


def _rows(source: Source, records: list[dict[str, Any]], physical_map: Any) -> Iterator[Block]:
    logical = None
    if physical_map is not None:
        logical = _moe_layers(source, "map", _array(source, "last_physical_to_logical_map", physical_map), 0)
        if (logical != np.arange(logical.shape[1])).any():
            source.note("physical experts were mapped by the last map: wrong if the placement changed while recording")
    request, reached = -1, -1
    for number, record in enumerate(records):
        where = f"record {number}"
        mode = whole(source, where, "forward_mode", record.get("forward_mode"))
        positions = np.array(id_list(source, where, "positions", record.get("positions")), np.int64)
        if mode == IDLE or not len(positions):
            continue
        _check_pass(source, where, mode, record, positions)
        if (mode == EXTEND and positions[0] != reached + 1) or positions[0] == 0 or request < 0:
            request += 1
        elif positions[0] != reached + 1:
            raise source.error(where, f"position {positions[0]} does not follow {reached}: {_ONE}")
        reached = int(positions[-1])
        tokens = np.array(id_list(source, where, "input_ids", record.get("input_ids")), np.int64)
        if len(tokens) != len(positions):
            raise source.error(where, f"{len(tokens)} input_ids for {len(positions)} positions")
        experts = _experts(source, where, record["topk_ids_of_layer"], logical)
        if len(experts) != len(positions):
            raise source.error(where, f"{len(experts)} rows for {len(positions)} positions (truncated?)")
        kept = _recorded(source, experts)
        phase = PREFILL if mode == EXTEND else DECODE
        if kept.any():
            rows = np.flatnonzero(kept)
            yield Block(request, phase, positions[kept], experts[kept], where, rows, token_id=tokens[kept])


_ONE = "passes do not name requests: record with one at a time (--max-running-requests 1)"


def _check_pass(source: Source, where: str, mode: int, record: dict[str, Any], positions: Ids) -> None:
    if mode not in (EXTEND, DECODE_MODE):
        raise source.error(where, f"forward_mode {mode}: {EXTEND} (extend) and {DECODE_MODE} (decode) can be imported")
    several = len(record.get("extend_seq_lens") or ()) > 1 if mode == EXTEND else len(positions) > 1
    if several or (np.diff(positions) != 1).any():
        raise source.error(where, f"several requests in one pass: {_ONE}")


def _experts(source: Source, where: str, value: Any, logical: Ids | None) -> Ids:
    """[tokens, MoE layers, k] logical ids of `topk_ids_of_layer` [layers, tokens, width], -1 where none."""
    shape = source.shape
    ids = _array(source, f"{where}, topk_ids_of_layer", value)
    if ids.ndim != 3 or ids.shape[2] < shape.top_k:
        found = " x ".join(map(str, ids.shape))
        raise source.error(where, f"topk_ids_of_layer is {found}: layers, tokens and at least {shape.top_k} experts")
    ids = _moe_layers(source, where, ids, 0)
    rest = ids[:, :, shape.top_k :]
    unused = (rest == -1) | (ids == 0).all(axis=2, keepdims=True)
    unused |= (rest == 0) & (rest == 0).all(axis=2, keepdims=True)  # the buffer is zero before its first reset
    if not unused.all():
        row = int(np.argwhere(~unused)[0, 1])
        problem = (
            f"row {row}: more than {shape.top_k} experts: recorded with shared-expert fusion, which makes it invalid"
        )
        raise source.error(where, problem)
    ids = ids[:, :, : shape.top_k].transpose(1, 0, 2)
    if logical is None:
        return ids
    if (ids >= logical.shape[1]).any():
        row = int(np.argwhere(ids >= logical.shape[1])[0, 0])
        raise source.error(where, f"row {row}: a physical expert is outside 0 to {logical.shape[1] - 1}")
    mapped = logical[np.arange(len(logical))[None, :, None], np.maximum(ids, 0)]
    return np.where(ids < 0, ids, mapped)


def _recorded(source: Source, experts: Ids) -> NDArray[np.bool_]:
    """[tokens]: False for padding, that is -1 (or, before the buffer's first reset, one id) in every place."""
    same = (experts == experts[:, :, :1]).all(axis=2) if experts.shape[2] > 1 else experts[:, :, 0] < 0
    kept: NDArray[np.bool_] = np.logical_not(np.asarray(same.all(axis=1)))
    if not kept.all():
        source.note("rows that were not recorded (-1 or zero in every layer) are left out")
    return kept
