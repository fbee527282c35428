"""What needs live weights, in steps: recall and drift, quality of executed predictions, each layer alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.train.export import check, round_to_bf16
from recipes.train.model import Model

from .measure import choose_hybrid, measure, pooled, recall_report
from .predictors import Predictor
from .quality import layers_alone, quality
from .text import REPORT, SELECTION, SUBJECTS, Texts


@dataclass(frozen=True)
class Sizes:
    """How much text is measured; windows per kind of text."""

    length: int = 1024
    prompt: int = 256
    select: int = 16
    report: int = 32
    alone: int = 3
    batch_rows: int = 16
    depth: int = 4

    @staticmethod
    def tiny() -> Sizes:
        """Seconds on a CPU."""
        return Sizes(length=64, prompt=16, select=2, report=2, alone=1, batch_rows=2, depth=3)


class Evaluation:
    """Fills `result`; every step leaves it complete as far as it goes."""

    def __init__(self, predictor: Predictor, texts: Texts, sizes: Sizes, result: dict[str, Any]) -> None:
        self.predictor, self.texts, self.sizes, self.result = predictor, texts, sizes, result
        self.hybrid: list[list[str | None]] = []

    def _windows(self, split: int, most: int) -> dict[str, Tensor]:
        return {kind: self.texts.windows(kind, split, self.sizes.length, most) for kind in SUBJECTS}

    def steps(self, until: float) -> Iterator[tuple[str, Callable[[], None]]]:
        """Names and steps in order; `until` (of `time.perf_counter`) bounds the last."""
        yield "select", self.select
        yield "recall", self.recall
        yield "quality", self.quality
        yield "alone", lambda: self.alone(until)

    def select(self) -> None:
        """Hybrid choice per depth and layer on the selection split."""
        s = self.sizes
        recalls, _, _ = measure(self.predictor, self._windows(SELECTION, s.select), s.depth, s.batch_rows)
        self.hybrid = [list(row) for row in choose_hybrid(pooled(recalls))]
        self.result["hybrid"] = {f"depth_{h + 1}": row for h, row in enumerate(self.hybrid)}

    def recall(self) -> None:
        """Recall, drift and usage on the report split."""
        s = self.sizes
        recalls, usage, usages = measure(self.predictor, self._windows(REPORT, s.report), s.depth, s.batch_rows)
        self.result["recall"] = recall_report(pooled(recalls), self.hybrid)
        self.result["recall_by_subject"] = {
            kind: {
                name: {depth: entry["mean"] for depth, entry in forms["plain"].items()}
                for name, forms in recall_report(r.table(), self.hybrid).items()
            }
            for kind, r in recalls.items()
        }
        self.result["usage"] = usage.report()
        self.result["usage_by_subject"] = {
            kind: {"next_token_overlap": u.report()["next_token_overlap_mean"]} for kind, u in usages.items()
        }
        counts = torch.stack([u.counts.double() for u in usages.values()])
        share = counts / counts.sum(-1, keepdim=True)
        pairs = [(share[a] - share[b]).abs().sum(-1) / 2 for a in range(len(share)) for b in range(a)]
        self.result["usage"]["distance_between_subjects"] = [
            round(float(x), 4) for x in torch.stack(pairs).mean(0).tolist()
        ]

    def quality(self) -> None:
        """Perplexity, KL and agreement of every variant; bits per byte by kind of text."""
        s = self.sizes
        found = quality(self.predictor, self._windows(REPORT, s.report), self.hybrid[0], s.prompt, s.batch_rows)
        self.result["quality"] = found
        self.result["bits_per_byte"] = {
            kind: round(found[kind]["exact"]["nats_per_token"] / math.log(2) * self.texts.tokens_per_byte(kind), 4)
            for kind in SUBJECTS
        }

    def alone(self, until: float) -> None:
        """Each layer speculated alone, by router and by estimator."""
        s = self.sizes
        part = torch.cat([*self._windows(REPORT, s.alone).values()])
        self.result["layers_alone"] = layers_alone(self.predictor, part, ("quasi_hidden", "estimator"), s.prompt, until)


def compare_export(model: Model, folder: Path) -> float:
    """Largest difference of logits between the exported folder in `transformers` and this recipe, fp32."""
    return check(round_to_bf16(model), folder)
