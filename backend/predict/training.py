"""Default vectors and the shared estimator from forwards over text; every function here sees one chunk at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from foreload.backend.predict.base import Gates
from foreload.backend.predict.calibration import Calibration
from foreload.backend.predict.lens import Seen
from foreload.backend.predict.network import Estimator
from foreload.shape import Scoring

RATE, WARM_UP_STEPS, COOL_DOWN = 2e-3, 50, 0.6


class Watch:
    """A lens that changes nothing and keeps what it saw of one chunk."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    def route(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """The true routing."""
        self.seen.append(seen)
        return seen.ids, seen.weights

    def ran(self, at: int, ids: Tensor, out: Tensor, shared: Tensor | None) -> None:
        """Nothing."""


class DefaultVectors:
    """A lens that sums every expert's unweighted output over the tokens routed to it. L layers, E experts, H hidden."""

    def __init__(self, layers: int, experts: int, hidden: int, device: torch.device) -> None:
        self._sums = torch.zeros(layers, experts, hidden, device=device)
        self.counts = torch.zeros(layers, experts, dtype=torch.long, device=device)
        self._shared = torch.zeros(layers, hidden, device=device)
        self._tokens = torch.zeros(layers, dtype=torch.long, device=device)
        self._experts = torch.arange(experts, device=device)

    def route(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """The true routing."""
        return seen.ids, seen.weights

    def ran(self, at: int, ids: Tensor, out: Tensor, shared: Tensor | None) -> None:
        """Add outputs [n, k, H]; a product with the one-hot matrix adds to each expert in one go."""
        chosen = (ids.reshape(-1) == self._experts[:, None]).float()
        self._sums[at] += chosen @ out.reshape(-1, out.shape[-1]).float()
        self.counts[at] += chosen.sum(-1).long()
        if shared is not None:
            self._shared[at] += shared.float().sum(0)
        self._tokens[at] += len(out)

    def means(self) -> Tensor:
        """[L, E, H] fp32; unseen experts are zero."""
        return self._sums / self.counts.clamp(min=1)[..., None]

    def shared_means(self) -> Tensor:
        """[L, H] fp32; zero without shared experts."""
        return self._shared / self._tokens.clamp(min=1)[:, None]


class Trainer:
    """Trains an estimator on (q_l, router distribution of layer l + 1) with a KL loss, over a known number of steps.

    Where the family scores by sigmoid, each expert is a distribution of its own.
    """

    def __init__(self, gates: Gates, scoring: Scoring, calibration: Calibration, steps: int) -> None:
        self._sigmoid = scoring == "sigmoid_topk"
        self._gates, self._calibration, self._total = gates, calibration, max(1, steps)
        self.estimator: Estimator = calibration.estimator.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(self.estimator.parameters(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
        self._layers = torch.arange(gates.n_layers - 1, device=calibration.dv.device)
        self.steps, self.kl = 0, float("nan")

    def pairs(self, seen: list[Seen]) -> tuple[Tensor, Tensor]:
        """Inputs q [L - 1, n, H] and what the gates said [L - 1, n, E], of one chunk."""
        inputs, targets = [], []
        for before, after in pairwise(seen):
            d = self._calibration.default(before.at, before.ids, before.weights)
            inputs.append(self._gates.moe_input(after.at, before.r + d.to(before.r.dtype)))
            targets.append(self._gates.scores(after.at, after.h).float())
        return torch.stack(inputs).float(), torch.stack(targets)

    def _loss(self, found: Tensor, true: Tensor) -> Tensor:
        """KL(true || found) of scores [L - 1, n, E], in nats, mean over layers and tokens."""
        if not self._sigmoid:
            return functional.kl_div(found.log_softmax(-1), true.softmax(-1), reduction="none").sum(-1).mean()
        wanted, loss = true.sigmoid(), functional.binary_cross_entropy_with_logits
        cross, own = (loss(scores, wanted, reduction="none") for scores in (found, true))
        return (cross - own).sum(-1).mean()

    def step(self, q: Tensor, target: Tensor) -> float:
        """One step; returns the loss in nats."""
        share = self.steps / self._total
        rate = RATE * min(1.0, (self.steps + 1) / WARM_UP_STEPS) * min(1.0, (1.0 - share) / COOL_DOWN)
        self._optimizer.param_groups[0]["lr"] = rate
        with torch.enable_grad():
            loss = self._loss(self.estimator(q, self._layers), target)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()
        self.steps += 1
        self.kl = float(loss.detach())
        return self.kl
