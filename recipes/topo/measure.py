"""How predictable routing is: recall, weighted recall, recall at 2k, drift, next-token overlap and expert load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foreload.backend.predict.recall import RecallSums, choose_hybrid, recall_report, rounded

from .live import Live, State
from .predictors import Predictor


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


@torch.no_grad()
def measure(
    predictor: Predictor, windows: dict[str, Tensor], depth: int, batch_rows: int
) -> tuple[dict[str, RecallSums], Usage, dict[str, Usage]]:
    """Recall per kind of text and routing statistics over windows {kind: [W, T]}."""
    live = predictor.live
    total, recalls, usages = Usage(live), {}, {}
    for kind, rows in windows.items():
        recalls[kind], usages[kind] = RecallSums(predictor.gates, predictor.calibration, depth), Usage(live)
        for part in rows.split(batch_rows):
            states: list[State] = []
            live.forward(part.to(live.device), visit=states.append)
            recalls[kind].add(states)
            for usage in (total, usages[kind]):
                usage.add(states, part.shape[1])
    return recalls, total, usages


def pooled(recalls: dict[str, RecallSums]) -> Tensor:
    """The table over all kinds together, weighted by tokens."""
    tokens = sum(r.tokens for r in recalls.values())
    return torch.stack([r.sums for r in recalls.values()]).sum(0).cpu() / max(1, tokens)


__all__ = ["RecallSums", "Usage", "choose_hybrid", "measure", "pooled", "recall_report"]
