"""What every predictor is: scores of later MoE layers' experts from one layer's residual stream (design: section 4).

Layers are MoE layers counted from 0; n tokens are predicted for at once. `r` is the residual stream after attention,
(`ids`, `weights`) the routing executed there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from foreload.backend.predict.calibration import Calibration
from foreload.errors import InternalError


class Gates(Protocol):
    """What a predictor needs of a model; the engine's decoder is one."""

    @property
    def n_layers(self) -> int:
        """MoE layers."""

    def moe_input(self, at: int, r: Tensor) -> Tensor:
        """The pre-MoE norm of a layer on a residual stream [n, hidden]."""

    def scores(self, at: int, h: Tensor) -> Tensor:
        """Gate scores [n, experts] of a normed input h [n, hidden]."""

    def choose(self, at: int, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and fp32 weights [n, k] by the family's own rule."""

    def choice(self, at: int, scores: Tensor) -> Tensor:
        """What the family ranks experts by, [n, experts]."""


class Predictor(ABC):
    """One way to predict. `rolled`: what lies further ahead is predicted as if the experts predicted before had run."""

    name: ClassVar[str]

    def __init__(self, gates: Gates, calibration: Calibration | None, rolled: bool = False) -> None:
        self.gates, self.calibration, self.rolled = gates, calibration, rolled

    @property
    def key(self) -> str:
        """The name in recordings and profiles."""
        return f"{self.name}_rolled" if self.rolled else self.name

    @property
    def plain(self) -> bool:
        """Whether it is later layers' own gates on what `start` gives, and nothing more."""
        kind, base = type(self), Predictor
        return not self.rolled and (kind.score, kind.ahead, kind.best) == (base.score, base.ahead, base.best)

    @abstractmethod
    def start(self, at: int, r: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The residual stream [n, hidden] that later layers are predicted from."""

    def score(self, target: int, q: Tensor) -> Tensor:
        """Scores [n, experts] of layer `target` from its expected normed input q [n, hidden]."""
        return self.gates.scores(target, q)

    def ahead(self, at: int, r: Tensor, ids: Tensor, weights: Tensor, depth: int) -> list[tuple[Tensor, Tensor]]:
        """(scores [n, experts], expected normed input [n, hidden]) of the next `depth` layers, as many as there are.

        Those of the next layer do not depend on `depth`, to the bit: it may be executed by them.
        """
        found = []
        stream = self.start(at, r, ids, weights)
        last = min(at + depth, self.gates.n_layers - 1)
        for target in range(at + 1, last + 1):
            q = self.gates.moe_input(target, stream)
            scores = self.score(target, q)
            found.append((scores, q))
            if self.rolled and target < last:
                stream = stream + self.calibrated.default(target, *self.gates.choose(target, scores)).to(stream.dtype)
        return found

    def best(self, at: int, ahead: list[tuple[Tensor, Tensor]], width: int) -> Tensor:
        """Ids [targets, n, width], best first, of what `ahead` found from layer `at`."""
        ranked = [self.gates.choice(target, scores) for target, (scores, _) in enumerate(ahead, at + 1)]
        return torch.topk(torch.stack(ranked), width, dim=-1).indices

    @property
    def calibrated(self) -> Calibration:
        """The calibration, which must be there."""
        if self.calibration is None:
            raise InternalError(f"predictor {self.key} was made without a calibration")
        return self.calibration
