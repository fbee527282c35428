"""Megatron-core's router traces (`--moe-routing-trace-path`): one JSON object per step and layer.

Layers are numbered from 0 over all layers of the decoder; records of multi-token-prediction layers are skipped.
The trace does not say which request a token belongs to, nor the phase.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from foreload.traces.importers.base import Block, Blocks, Source, id_list, problem_of, whole
from foreload.traces.importers.json_files import json_lines
from foreload.traces.schema import DECODE, PREFILL

_NOTE = "requests and phases are not recorded: one request; steps of one token are decode, longer ones prefill"
Layers = dict[int, list[list[int]]]


def megatron(source: Source) -> Blocks:
    """One rank's file; the lines of one step follow each other."""
    return Blocks(_megatron(source))


def _megatron(source: Source) -> Iterator[Block]:
    source.note(_NOTE)
    step, tokens, position, where = -1, 0, 0, ""
    layers: Layers = {}
    ranks: set[int] = set()
    for number, value in json_lines(source):
        if value.get("mtp_idx") is not None or value.get("block", "decoder") != "decoder":
            source.note("records of multi-token-prediction layers are left out")
            continue
        now = f"line {number}"
        found = whole(source, now, "step", value.get("step"))
        if found != step:
            if layers:
                yield _block(source, where, layers, position, tokens)
            if found < step:
                raise source.error(now, f"step {found} follows step {step}: one file per rank is needed, as written")
            step, position, layers = found, position + tokens, {}
            tokens = whole(source, now, "num_tokens", value.get("num_tokens"), 1)
        where = now
        ranks.add(whole(source, where, "rank", value.get("rank", 0)))
        if len(ranks) > 1:
            raise source.error(where, "records of several ranks: import the file of one rank")
        _add(source, where, layers, value, tokens)
    if layers:
        yield _block(source, where, layers, position, tokens)


def _add(source: Source, where: str, layers: Layers, value: dict[str, Any], tokens: int) -> None:
    """Take one layer of the step; FileError if it is no MoE layer, there already or of another length."""
    layer = whole(source, where, "layer", value.get("layer"))
    rows = value.get("top_indices")
    if layer not in source.shape.moe_layers:
        raise source.error(where, f"layer {layer} is no MoE layer of the model: give them with --moe-layers")
    if layer in layers:
        raise source.error(where, f"step {value['step']} has layer {layer} already")
    if not isinstance(rows, list) or len(rows) != tokens or value.get("num_tokens") != tokens:
        found = len(rows) if isinstance(rows, list) else "no"
        raise source.error(where, f"{found} rows of top_indices: the step has {tokens} tokens")
    for row, ids in enumerate(rows):
        problem = problem_of(id_list(source, f"{where}, row {row}", "experts", ids), source.shape)
        if problem:
            raise source.error(f"{where}, row {row}, layer {layer}", problem)
    layers[layer] = rows


def _block(source: Source, where: str, layers: Layers, position: int, tokens: int) -> Block:
    missing = [number for number in source.shape.moe_layers if number not in layers]
    if missing:
        raise source.error(where, f"the step ends here without layer {missing[0]} (truncated?)")
    experts = np.array([layers[number] for number in source.shape.moe_layers], np.int64).transpose(1, 0, 2)
    return Block(0, DECODE if tokens == 1 else PREFILL, position + np.arange(tokens), experts, where)
