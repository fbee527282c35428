"""What executing predicted experts costs: perplexity, KL and top-1 agreement against exact routing, teacher-forced.

A window is a prompt and the text after it. One causal forward over both equals decoding the text token by token, so
speculation is a mask: prompt tokens route truly (except where the variant says otherwise), later tokens as predicted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foreload.backend.quality import Loss

from .live import Live
from .predictors import Predictor, Speculation

Kinds = Sequence[str | None]


def report(loss: Loss) -> dict[str, float]:
    """Perplexity, mean KL(exact || variant) in nats, share of equal first choices; rounded."""
    found = loss.figures()
    return {
        "nats_per_token": round(found.nats_per_token, 5), "perplexity": round(found.perplexity, 4),
        "kl": round(found.kl, 5), "top1_agreement": round(found.top1_agreement, 5), "tokens": found.tokens,
    }  # fmt: skip


def _scores(live: Live, part: Tensor, prompt: int, speculation: Speculation | None) -> Tensor:
    hidden = live.forward(part, choose=speculation)
    return live.logits(hidden[:, prompt - 1 : -1]).flatten(0, 1)


def variants(layers: int, hybrid: Kinds) -> dict[str, tuple[Kinds, bool]]:
    """Name -> (predictor per layer, whether prompt tokens speculate too)."""

    def all_but_first(kind: str) -> Kinds:
        return [None, *[kind] * (layers - 1)]

    return {
        "router_pf": (all_but_first("quasi_hidden"), False),
        "est_pf": (all_but_first("estimator"), False),
        "hybrid_pf": ([None, *hybrid[1:]], False),
        "router_pf_prefill": (all_but_first("quasi_hidden"), True),
    }


@torch.no_grad()
def quality(
    predictor: Predictor, windows: dict[str, Tensor], hybrid: Kinds, prompt: int, batch_rows: int
) -> dict[str, dict[str, Any]]:
    """Per kind of text and variant, and over all texts together."""
    live = predictor.live
    named = variants(live.c.layers, hybrid)
    total = {name: Loss(live.device) for name in ("exact", *named)}
    result: dict[str, dict[str, Any]] = {}
    for kind, rows in windows.items():
        losses = {name: Loss(live.device) for name in total}
        for part in rows.split(batch_rows):
            part = part.to(live.device)
            targets = part[:, prompt:].flatten()
            exact = _scores(live, part, prompt, None)
            for name in losses:
                scores = exact
                if name != "exact":
                    kinds, everywhere = named[name]
                    scores = _scores(live, part, prompt, _speculation(predictor, kinds, part, prompt, everywhere))
                losses[name].add(scores, exact, targets)
                total[name].add(scores, exact, targets)
        result[kind] = {name: report(loss) for name, loss in losses.items()}
    result["all"] = {name: report(loss) for name, loss in total.items()}
    return result


def _speculation(predictor: Predictor, kinds: Kinds, part: Tensor, prompt: int, everywhere: bool) -> Speculation:
    mask = torch.ones(part.shape, dtype=torch.bool, device=part.device)
    if not everywhere:
        mask[:, :prompt] = False
    return Speculation(predictor, kinds, mask.flatten())


@torch.no_grad()
def layers_alone(
    predictor: Predictor, part: Tensor, kinds: Sequence[str], prompt: int, until: float
) -> dict[str, list[dict[str, float] | None]]:
    """For each predictor: the loss when one layer alone is speculated, by layer; None for the first and after `until`.

    `until` is a time of `time.perf_counter`.
    """
    live = predictor.live
    part = part.to(live.device)
    targets, exact = part[:, prompt:].flatten(), _scores(live, part, prompt, None)
    result: dict[str, list[dict[str, float] | None]] = {kind: [None] for kind in kinds}
    for layer in range(1, live.c.layers):
        for kind in kinds:
            if time.perf_counter() > until:
                result[kind].append(None)
                continue
            only: list[str | None] = [None] * live.c.layers
            only[layer] = kind
            loss = Loss(live.device)
            loss.add(_scores(live, part, prompt, _speculation(predictor, only, part, prompt, False)), exact, targets)
            result[kind].append(report(loss))
    return result
