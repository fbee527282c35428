"""What a layer-step learns about the next ones: experts to prefetch, and the routing of a speculated layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.observe import RouteLog
from foreload.backend.policy.window import merge_predictions
from foreload.backend.predict.base import Predictor
from foreload.backend.replay import Replay


@dataclass(frozen=True)
class Guess:
    """Routing to execute at the next layer: predicted ids [n, k] and fp32 weights [n, k], and the ids on the host."""

    ids: Tensor
    weights: Tensor
    experts: NDArray[np.int64]


class LookAhead:
    """The active predictor, and those an observer wants recorded. Used by the decoding thread alone."""

    def __init__(self, top_k: int) -> None:
        self.predictor: Predictor | None = None
        self.depth, self.width = 0, top_k
        self.speculated: frozenset[int] = frozenset()
        self.replay: Replay | None = None

    def follow(self, predictor: Predictor | None, depth: int, width: int, speculated: Sequence[int]) -> None:
        """Predict by `predictor` (None: not at all) from now on."""
        self.predictor, self.depth, self.width = predictor, depth, width
        self.speculated = frozenset(speculated)

    def at(
        self, at: int, r: Tensor, ids: Tensor, weights: Tensor, log: RouteLog | None
    ) -> tuple[list[NDArray[np.int32]], Guess | None]:
        """At layer `at` with residual stream r [n, hidden] and executed routing [n, k].

        Returns the experts to prefetch for each of the next layers, best first, and what the next one executes if it is
        speculated. The observer's predictions go to `log`.
        """
        if log is not None:
            self.record(at, r, ids, weights, log)
        if self.predictor is None or at + 1 == self.predictor.gates.n_layers:
            return [], None
        found = self.predictor.ahead(at, r, ids, weights, self.depth)
        best = self.predictor.best(at, found, self.width)
        if self.replay is not None:
            best = self.replay.guessed(self.predictor, at, best)
        prefetches = [merge_predictions(of_layer) for of_layer in best.cpu().numpy()]
        if at + 1 not in self.speculated:
            return prefetches, None
        chosen, shares = self.predictor.gates.choose(at + 1, found[0][0])
        if self.replay is not None:
            chosen, shares = self.replay.route(at + 1, len(chosen))
        return prefetches, Guess(chosen, shares, chosen.cpu().numpy())

    def record(self, at: int, r: Tensor, ids: Tensor, weights: Tensor, log: RouteLog) -> None:
        """Predictions at layer `at` that an observer wants, for its log."""
        for predictor, depths in log.predictors:
            found = predictor.ahead(at, r, ids, weights, max(depths))
            if found:
                ranked = predictor.best(at, found, log.width).cpu().numpy()
                for depth in depths:
                    if depth <= len(ranked):
                        log.predicted[predictor.key, depth][:, at + depth] = ranked[depth - 1]


class Shadow:
    """True recall of executed predictions: the gate of a speculated layer runs beside them and decides nothing."""

    def __init__(self, layers: int) -> None:
        self.found = np.zeros(layers, np.int64)
        self.demanded = np.zeros(layers, np.int64)

    def compare(self, at: int, executed: NDArray[np.int64], true: Tensor) -> None:
        """Executed ids [n, k] of a layer beside those its gate names [n, k]."""
        wanted = true.cpu().numpy()
        self.found[at] += int((executed[:, :, None] == wanted[:, None, :]).any(axis=2).sum())
        self.demanded[at] += wanted.size

    def recall(self) -> dict[int, float]:
        """Share of the true experts that were executed, by speculated MoE layer that ran."""
        return {int(at): float(self.found[at] / self.demanded[at]) for at in np.flatnonzero(self.demanded)}
