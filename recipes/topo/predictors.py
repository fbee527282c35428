"""The engine's predictors on this recipe's model, and execution by prediction.

Notation: r_l is the residual stream after attention at layer l, d_l the weighted default vectors of the experts
executed there. What a predictor is, and the calibration it uses, is `foreload.backend.predict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from foreload.backend.predict.calibration import Calibration
from foreload.backend.predict.hybrid import MEMBERS

from .live import Live, State

PREDICTORS = tuple(MEMBERS)


class LiveGates:
    """The model's norms and routers as `foreload.backend.predict.base.Gates`."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self.n_layers = live.c.layers
        self.moe_input, self.scores = live.moe_input, live.scores

    def choose(self, at: int, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights [N, k] by the router's rule."""
        return self._live.route(scores)

    def choice(self, at: int, scores: Tensor) -> Tensor:
        """The scores themselves: softmax keeps their order."""
        return scores


class Predictor:
    """Scores of every predictor kind for any target layer."""

    def __init__(self, live: Live, calibration: Calibration) -> None:
        self.live, self.calibration, self.gates = live, calibration, LiveGates(live)
        self._kinds = {
            (name, rolled): kind(self.gates, calibration, rolled)
            for name, kind in MEMBERS.items()
            for rolled in (False, True)
        }

    def ahead(self, kind: str, state: State, depth: int, rolled: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(h, scores, expected router input) for every h up to `depth` whose layer exists."""
        found = self._kinds[kind, rolled].ahead(state.layer, state.r, state.ids, state.weights, depth)
        for h, (scores, q) in enumerate(found, 1):
            yield h, scores, q


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
            _, scores, _ = next(self.predictor.ahead(kind, self._last, 1, rolled=False))
            guessed, share = self.predictor.live.route(scores)
            if self.mask is None:
                ids, weights = guessed, share
            else:
                mask = self.mask[:, None]
                ids, weights = torch.where(mask, guessed, ids), torch.where(mask, share, weights)
        self._last = State(state.layer, state.r, state.h, state.scores, ids, weights)
        return ids, weights
