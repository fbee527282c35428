"""Predictors of later layers' experts from one layer's residual stream, and execution by prediction.

Notation: r_l is the residual stream after attention at layer l, d_l the weighted default vectors of the experts
executed there. A predictor of layer t = l + h scores the experts of t from a state: `gate` from r_l, `quasi_hidden`
and `estimator` from r_l + d_l. The rolled form adds the default vectors of the experts it predicts in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recipes.train.config import ModelConfig

from .live import Live, State

PREDICTORS = ("gate", "quasi_hidden", "estimator")


class Estimator(nn.Module):
    """One network for all layers: the router input expected at layer l + 1 -> scores of that layer's experts."""

    def __init__(self, c: ModelConfig, shrink: int = 2, expand: int = 4) -> None:
        super().__init__()
        width = c.hidden // shrink
        self.down = nn.Linear(c.hidden, width)
        self.layer = nn.Embedding(c.layers, width)
        self.inner = nn.Linear(width, expand * width)
        self.outer = nn.Linear(expand * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, c.experts)

    def forward(self, q: Tensor, layers: Tensor) -> Tensor:
        """q [..., N, hidden] with `layers` [...]: the layer each q comes from; scores [..., N, experts]."""
        z = self.down(q) + self.layer(layers)[..., None, :]
        z = z + self.outer(functional.silu(self.inner(z)))
        scores: Tensor = self.head(self.norm(z))
        return scores


@dataclass(frozen=True)
class Calibration:
    """Default vectors [layers, experts, hidden] fp32 and the estimator."""

    dv: Tensor
    estimator: Estimator

    def default(self, layer: int, ids: Tensor, weights: Tensor) -> Tensor:
        """d_l [N, hidden]: weighted default vectors of the experts executed at `layer`."""
        dense = weights.new_zeros(len(ids), self.dv.shape[1]).scatter_(1, ids, weights)
        return dense @ self.dv[layer]  # reads far less than gathering k vectors per token


class Predictor:
    """Scores of one predictor kind for any target layer."""

    def __init__(self, live: Live, calibration: Calibration) -> None:
        self.live, self.calibration = live, calibration
        self.layers = torch.arange(live.c.layers, device=live.device)

    def start(self, kind: str, state: State) -> Tensor:
        """The state a prediction starts from, [N, hidden]."""
        if kind == "gate":
            return state.r
        return state.r + self.calibration.default(state.layer, state.ids, state.weights)

    def scores(self, kind: str, target: int, stream: Tensor) -> tuple[Tensor, Tensor]:
        """(scores [N, experts] of layer `target`, its expected router input) from a residual stream."""
        q = self.live.moe_input(target, stream)
        if kind == "estimator":
            return self.calibration.estimator(q, self.layers[target - 1]), q
        return self.live.scores(target, q), q

    def ahead(self, kind: str, state: State, depth: int, rolled: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(h, scores, expected router input) for every h up to `depth` whose layer exists."""
        stream = self.start(kind, state)
        for h in range(1, min(depth, self.live.c.layers - 1 - state.layer) + 1):
            scores, q = self.scores(kind, state.layer + h, stream)
            yield h, scores, q
            if rolled:
                stream = stream + self.calibration.default(state.layer + h, *self.live.route(scores))


class Speculation:
    """A `choose` that executes predictions: at the named layers, for the tokens of `mask`; true routing elsewhere."""

    def __init__(self, predictor: Predictor, kinds: Sequence[str | None], mask: Tensor | None = None) -> None:
        self.predictor, self.kinds, self.mask = predictor, kinds, mask
        self._last: State | None = None

    def __call__(self, state: State) -> tuple[Tensor, Tensor]:
        """The routing to execute; kinds[layer] is None where the router decides. The first layer must be None."""
        kind, ids, weights = self.kinds[state.layer], state.ids, state.weights
        if kind is not None:
            assert self._last is not None
            stream = self.predictor.start(kind, self._last)
            guessed, share = self.predictor.live.route(self.predictor.scores(kind, state.layer, stream)[0])
            if self.mask is None:
                ids, weights = guessed, share
            else:
                mask = self.mask[:, None]
                ids, weights = torch.where(mask, guessed, ids), torch.where(mask, share, weights)
        self._last = State(state.layer, state.r, state.h, state.scores, ids, weights)
        return ids, weights
