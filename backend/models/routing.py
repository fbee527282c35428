"""Routing functions: from gate logits to the experts of each token and their weights. All arithmetic is fp32.

`SCORINGS` lists them by the name that `ModelShape.scoring` gives; `route` and `choice` work on any hidden state's
logits, so predictors ask the family's own scoring.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foreload.shape import ModelShape, Scoring

SMALLEST_SUM = 1e-20
Scores = tuple[Tensor, Tensor]
"""What experts are ranked by, and what their weights are taken from, each fp32 [n, experts]."""


def _softmax(logits: Tensor, correction: Tensor | None, shape: ModelShape) -> Scores:
    """Groups rank by their best expert; experts of other groups count as 0 (arXiv 2405.04434, section 2.2)."""
    scores = logits.softmax(dim=-1, dtype=torch.float32)
    if shape.groups > 1:
        best = scores.unflatten(-1, (shape.groups, -1)).amax(-1)
        scores = scores.masked_fill(_outside(best, shape), 0.0)
    return scores, scores


def _sigmoid(logits: Tensor, correction: Tensor | None, shape: ModelShape) -> Scores:
    """The correction bias moves the ranking alone; groups rank by their two best (arXiv 2412.19437, section 2.1)."""
    scores = logits.float().sigmoid()
    ranked = scores if correction is None else scores + correction
    if shape.groups > 1:
        best = ranked.unflatten(-1, (shape.groups, -1)).topk(2, dim=-1).values.sum(-1)
        ranked = ranked.masked_fill(_outside(best, shape), float("-inf"))
    return ranked, scores


def _logits(logits: Tensor, correction: Tensor | None, shape: ModelShape) -> Scores:
    scores = logits.float()
    return scores, scores


SCORINGS: dict[Scoring, Callable[[Tensor, Tensor | None, ModelShape], Scores]] = {
    "softmax_topk": _softmax,
    "topk_softmax": _logits,
    "sigmoid_topk": _sigmoid,
}


def _outside(group_scores: Tensor, shape: ModelShape) -> Tensor:
    """Whether each expert is outside the `top_groups` best groups, bool [n, experts]."""
    chosen = group_scores.topk(shape.top_groups, dim=-1).indices
    outside = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, chosen, False)
    return outside.repeat_interleave(shape.experts // shape.groups, dim=-1)


def choice(logits: Tensor, correction: Tensor | None, shape: ModelShape) -> Tensor:
    """What experts rank by, [n, experts]: the k largest are chosen, those that cannot be are 0 or -inf."""
    if shape.scoring == "softmax_topk" and shape.groups == 1:
        return logits  # softmax keeps their order
    return SCORINGS[shape.scoring](logits, correction, shape)[0]


def route(logits: Tensor, correction: Tensor | None, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """Ids [n, k], best first, and fp32 weights [n, k] from gate logits [n, experts] (bias included).

    `correction` [experts] is the family's correction bias, if it has one.
    """
    ranked, scores = SCORINGS[shape.scoring](logits, correction, shape)
    best, ids = torch.topk(ranked, shape.top_k, dim=-1)
    weights = best if ranked is scores else scores.gather(-1, ids)
    if shape.scoring == "topk_softmax":
        weights = weights.softmax(dim=-1)
    elif shape.normalise_weights:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + SMALLEST_SUM if shape.scoring == "sigmoid_topk" else total)
    return ids, weights * shape.routed_scale if shape.routed_scale != 1 else weights
