"""How predictable routing is: recall, weighted recall, recall at 2k and drift, by predictor, form, depth and layer.

A table is [member, form, depth, MoE layer predicted, metric]; a layer with none `depth` before it holds zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from foreload.backend.predict.base import Gates
from foreload.backend.predict.calibration import Calibration, Member
from foreload.backend.predict.hybrid import MEMBERS

METRICS = ("recall", "weighted", "recall_2k", "cosine")
FORMS = ("plain", "rolled")
NAMES: tuple[Member, ...] = ("quasi_hidden", "estimator", "gate")


class Routing(Protocol):
    """One MoE layer as it was routed and executed; n tokens."""

    @property
    def r(self) -> Tensor:
        """[n, hidden] residual stream after attention."""

    @property
    def h(self) -> Tensor:
        """[n, hidden] the gate's input."""

    @property
    def ids(self) -> Tensor:
        """[n, k]."""

    @property
    def weights(self) -> Tensor:
        """[n, k]."""


def recalled(guessed: Tensor, true: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sums over tokens of the share of true experts [n, k] guessed, and of the share of their router weight."""
    chosen = torch.zeros(len(guessed), experts, device=guessed.device).scatter_(1, guessed, 1.0)
    hits = chosen.gather(1, true)
    return hits.mean(-1).sum(), (hits * weights).sum(-1).div(weights.sum(-1)).sum()


class RecallSums:
    """Sums over everything added, for every member of `hybrid`, plain and rolled, at every depth up to `depth`."""

    def __init__(self, gates: Gates, calibration: Calibration, depth: int) -> None:
        meta = calibration.meta
        self.experts, self.tokens, self.depth = meta.experts, 0, min(depth, meta.moe_layers - 1)
        self._predictors = [[MEMBERS[name](gates, calibration, form == "rolled") for form in FORMS] for name in NAMES]
        shape = (len(NAMES), len(FORMS), self.depth, meta.moe_layers, len(METRICS))
        self.sums = torch.zeros(shape, dtype=torch.float64, device=calibration.dv.device)

    def add(self, layers: Sequence[Routing]) -> None:
        """All MoE layers of one exact forward, in order."""
        self.tokens += len(layers[0].r)
        k = layers[0].ids.shape[1]
        wide = min(2 * k, self.experts)
        for m, forms in enumerate(self._predictors):
            for f, predictor in enumerate(forms):
                for at, seen in enumerate(layers[:-1]):
                    found = predictor.ahead(at, seen.r, seen.ids, seen.weights, self.depth)
                    best = predictor.best(at, found, wide)
                    for h, (_, q) in enumerate(found, 1):
                        true, top = layers[at + h], best[h - 1]
                        at_k = recalled(top[:, :k], true.ids, true.weights, self.experts)
                        at_2k = recalled(top, true.ids, true.weights, self.experts)[0]
                        cosine = functional.cosine_similarity(q.float(), true.h.float(), dim=-1).sum()
                        self.sums[m, f, h - 1, at + h] += torch.stack([*at_k, at_2k, cosine])

    def table(self) -> Tensor:
        """Means, fp64 on the host."""
        return (self.sums / max(1, self.tokens)).cpu()


def choose_hybrid(selection: Tensor) -> tuple[tuple[Member | None, ...], ...]:
    """Per depth and layer: the member of best plain recall, by the table of the selection split; None for no target."""
    best = selection[:, 0, :, :, 0].argmax(0).tolist()
    return tuple(
        tuple(None if layer <= depth else NAMES[index] for layer, index in enumerate(row))
        for depth, row in enumerate(best)
    )


def recall_report(report: Tensor, choice: Sequence[Sequence[str | None]]) -> dict[str, Any]:
    """predictor -> form -> depth_N -> each metric by layer (from the first there is), and `mean` of each metric."""
    result: dict[str, Any] = {}
    for depth in range(report.shape[2]):
        picks = [NAMES.index(name or "gate") for name in choice[depth]]
        for f, form in enumerate(FORMS):
            rows: dict[str, Tensor] = {name: report[m, f, depth] for m, name in enumerate(NAMES)}
            rows["hybrid"] = torch.stack([report[m, f, depth, layer] for layer, m in enumerate(picks)])
            for name, row in rows.items():
                values = row[depth + 1 :]
                entry: dict[str, Any] = {metric: rounded(values[:, i]) for i, metric in enumerate(METRICS)}
                entry["mean"] = {metric: round(float(values[:, i].mean()), 4) for i, metric in enumerate(METRICS)}
                result.setdefault(name, {}).setdefault(form, {})[f"depth_{depth + 1}"] = entry
    return result


def rounded(values: Tensor) -> list[float]:
    """Four decimals."""
    return [round(float(v), 4) for v in values.tolist()]
