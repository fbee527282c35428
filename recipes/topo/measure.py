"""How predictable routing is: recall, weighted recall, recall at 2k, drift, next-token overlap and expert load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .live import Live, State
from .predictors import PREDICTORS, Predictor

FORMS = ("plain", "rolled")
METRICS = ("recall", "weighted", "recall_2k", "cosine")
HYBRID = ("quasi_hidden", "estimator", "gate")  # what `hybrid` chooses from, preferred in this order among equals


def recall(guessed: Tensor, true: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sums over tokens of (share of the true experts guessed, share of the true router weight guessed)."""
    chosen = torch.zeros(len(guessed), experts, device=guessed.device).scatter_(1, guessed, 1.0)
    hits = chosen.gather(1, true)
    return hits.mean(-1).sum(), (hits * weights).sum(-1).div(weights.sum(-1)).sum()


class Recall:
    """Sums per predictor, form, depth and target layer over everything added."""

    def __init__(self, predictor: Predictor, depth: int) -> None:
        c, device = predictor.live.c, predictor.live.device
        self.predictor, self.depth, self.c = predictor, depth, c
        shape = (len(PREDICTORS), len(FORMS), depth, c.layers, len(METRICS))
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, states: list[State]) -> None:
        """All layers' states of one exact forward."""
        wide = min(2 * self.c.top_k, self.c.experts)
        self.tokens += len(states[0].r)
        for p, kind in enumerate(PREDICTORS):
            for f in range(len(FORMS)):
                for state in states[:-1]:
                    for h, scores, q in self.predictor.ahead(kind, state, self.depth, rolled=bool(f)):
                        true = states[state.layer + h]
                        best = scores.topk(wide, -1).indices
                        at_k = recall(best[:, : self.c.top_k], true.ids, true.weights, self.c.experts)
                        at_2k = recall(best, true.ids, true.weights, self.c.experts)
                        cosine = functional.cosine_similarity(q, true.h, dim=-1).sum()
                        self.sums[p, f, h - 1, state.layer + h] += torch.stack([*at_k, at_2k[0], cosine])

    def table(self) -> Tensor:
        """Means [predictor, form, depth, layer, metric], fp64 on the host."""
        return (self.sums / max(1, self.tokens)).cpu()


class Usage:
    """Expert counts per layer and next-token overlap."""

    def __init__(self, live: Live) -> None:
        self.c = live.c
        self.counts = torch.zeros(live.c.layers, live.c.experts, dtype=torch.long, device=live.device)
        self.shared = torch.zeros(live.c.layers, dtype=torch.float64, device=live.device)
        self.pairs = 0

    def add(self, states: list[State], length: int) -> None:
        """All layers' states of one exact forward over windows of `length`."""
        for state in states:
            flat = state.ids.reshape(-1)
            self.counts[state.layer].index_add_(0, flat, torch.ones_like(flat))
            ids = state.ids.view(-1, length, self.c.top_k)
            same = (ids[:, 1:, :, None] == ids[:, :-1, None, :]).any(-1)
            self.shared[state.layer] += same.double().mean(-1).sum()
        self.pairs += len(states[0].ids) // length * (length - 1)

    def report(self) -> dict[str, Any]:
        """Per layer: load relative to uniform, entropy, dead experts, next-token overlap."""
        share = (self.counts.double() / self.counts.sum(1, keepdim=True)).cpu()
        load = share * self.c.experts
        entropy = -(share * share.clamp(min=1e-12).log2()).sum(1)
        overlap = (self.shared / max(1, self.pairs)).cpu()
        return {
            "load_min": rounded(load.amin(1)), "load_max": rounded(load.amax(1)),
            "dead": (load < 0.1).sum(1).tolist(), "entropy_bits": rounded(entropy),
            "next_token_overlap": rounded(overlap), "next_token_overlap_mean": round(float(overlap.mean()), 4),
        }  # fmt: skip


def rounded(values: Tensor) -> list[float]:
    """Four decimals."""
    return [round(float(v), 4) for v in values.tolist()]


def choose_hybrid(selection: Tensor) -> list[list[str | None]]:
    """Per depth and target layer: the predictor of best plain recall on the selection split; None for no target."""
    order = [PREDICTORS.index(name) for name in HYBRID]
    choice: list[list[str | None]] = []
    for depth in range(selection.shape[2]):
        best = selection[order, 0, depth, :, 0].argmax(0).tolist()
        choice.append([None if layer <= depth else HYBRID[b] for layer, b in enumerate(best)])
    return choice


def recall_report(report: Tensor, choice: list[list[str | None]]) -> dict[str, Any]:
    """Per predictor, form and depth: each metric by target layer (from the first there is), and its mean."""
    result: dict[str, Any] = {}
    for depth in range(report.shape[2]):
        for f, form in enumerate(FORMS):
            rows = {name: report[p, f, depth] for p, name in enumerate(PREDICTORS)}
            picks = [PREDICTORS.index(name or "gate") for name in choice[depth]]
            rows["hybrid"] = torch.stack([report[p, f, depth, layer] for layer, p in enumerate(picks)])
            for name, row in rows.items():
                values = row[depth + 1 :]
                entry: dict[str, Any] = {m: rounded(values[:, i]) for i, m in enumerate(METRICS)}
                entry["mean"] = {m: round(float(values[:, i].mean()), 4) for i, m in enumerate(METRICS)}
                result.setdefault(name, {}).setdefault(form, {})[f"depth_{depth + 1}"] = entry
    return result


@torch.no_grad()
def measure(
    predictor: Predictor, windows: dict[str, Tensor], depth: int, batch_rows: int
) -> tuple[dict[str, Recall], Usage, dict[str, Usage]]:
    """Recall per kind of text and routing statistics over windows {kind: [W, T]}."""
    live = predictor.live
    total, recalls, usages = Usage(live), {}, {}
    for kind, rows in windows.items():
        recalls[kind], usages[kind] = Recall(predictor, depth), Usage(live)
        for part in rows.split(batch_rows):
            states: list[State] = []
            live.forward(part.to(live.device), visit=states.append)
            recalls[kind].add(states)
            for usage in (total, usages[kind]):
                usage.add(states, part.shape[1])
    return recalls, total, usages


def pooled(recalls: dict[str, Recall]) -> Tensor:
    """The table over all kinds together, weighted by tokens."""
    tokens = sum(r.tokens for r in recalls.values())
    return torch.stack([r.sums for r in recalls.values()]).sum(0).cpu() / max(1, tokens)
