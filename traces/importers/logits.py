"""Router logits of transformers (`output_router_logits=True`): a tensor [tokens, experts] per MoE layer.

Experts are chosen as the model does; their weights are known where the model says whether it normalises them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from foreload.errors import UsageError
from foreload.traces.importers.base import Block, Blocks, Source
from foreload.traces.importers.tensors import load_layers
from foreload.traces.schema import PREFILL

if TYPE_CHECKING:
    import torch

CHUNK_ROWS = 2048


def _softmax_topk(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in fp32, then the k largest: weights and ids."""
    import torch

    weights, ids = torch.topk(logits.softmax(dim=-1, dtype=torch.float32), top_k, dim=-1)
    return weights, ids


def _topk_softmax(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest logits, then softmax over those in fp32: weights and ids."""
    import torch

    best, ids = torch.topk(logits, top_k, dim=-1)
    return best.softmax(dim=-1, dtype=torch.float32), ids


SCORINGS: dict[str, Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]] = {
    "softmax_topk": _softmax_topk,
    "topk_softmax": _topk_softmax,
}


def hf_logits(source: Source) -> Blocks:
    """One request, as one prefill step: the forward that gave the logits. UsageError if the scoring is not known."""
    if source.shape.scoring not in SCORINGS:
        known = ", ".join(SCORINGS)
        raise UsageError(f"scoring {source.shape.scoring!r} gives no experts: give --model, or --scoring of {known}")
    if source.shape.groups > 1:
        raise UsageError(f"{source.shape.family} chooses experts within groups: logits alone do not give them here")
    known_weights = source.shape.family != "unknown"
    if not known_weights:
        source.note("router weights are left out: without --model it is not known whether they are normalised")
    source.note("logits are taken as one forward over one text: one request, prefill")
    return Blocks(_rows(source, known_weights), has_weights=known_weights)


def _rows(source: Source, weighted: bool) -> Iterator[Block]:
    import torch

    layers = _ordered(source)
    shape = source.shape
    for first in range(0, len(layers[0]), CHUNK_ROWS):
        ids, weights = [], []
        for number, layer in zip(shape.moe_layers, layers, strict=True):
            logits = layer[first : first + CHUNK_ROWS].float()
            finite = torch.isfinite(logits).all(dim=-1)
            if not finite.all():
                row = first + int(finite.logical_not().nonzero()[0, 0])
                raise source.error("", f"row {row}, layer {number}: logits are not finite")
            weight, chosen = SCORINGS[shape.scoring](logits, shape.top_k)
            ids.append(chosen.numpy())
            if shape.normalise_weights:
                weight = weight / weight.sum(dim=-1, keepdim=True)
            weights.append((weight * shape.routed_scale).numpy())
        yield Block(
            0,
            PREFILL,
            first + np.arange(len(ids[0])),
            np.stack(ids, axis=1),
            rows=first + np.arange(len(ids[0])),
            weights=np.stack(weights, axis=1) if weighted else None,
            same_step=first > 0,
        )


def _ordered(source: Source) -> list[torch.Tensor]:
    """The layers' logits in the order of the numbers in their names, each [tokens, experts]."""
    shape = source.shape
    named = load_layers(source)
    if len(named) == 1 and (only := next(iter(named.values()))).dim() == 3:
        named = {str(index): one for index, one in enumerate(only)}
    numbers = {name: [int(digits) for digits in re.findall(r"\d+", name)] for name in named}
    if len(named) != shape.n_moe_layers:
        raise source.error("", f"logits of {len(named)} layers: the model has {shape.n_moe_layers} MoE layers")
    if len(named) > 1 and len({tuple(found) for found in numbers.values() if found}) < len(named):
        raise source.error("", f"tensors {', '.join(list(named)[:4])}: their names do not number the layers")
    layers = [named[name] for name in sorted(named, key=lambda name: numbers[name])]
    rows = layers[0].shape[0] if layers[0].dim() else 0
    for number, layer in zip(shape.moe_layers, layers, strict=True):
        if layer.dim() != 2 or tuple(layer.shape) != (rows, shape.experts):
            found = " x ".join(map(str, layer.shape))
            wanted = f"{rows} x {shape.experts}"
            raise source.error("", f"layer {number}: logits are {found}: tokens x experts are {wanted} (truncated?)")
        if not layer.is_floating_point():
            raise source.error("", f"layer {number}: logits are {layer.dtype}: floats are needed")
    return layers
