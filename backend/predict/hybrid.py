"""`hybrid`: per layer and depth the predictor that recalled most on the calibration's selection split."""

from __future__ import annotations

from torch import Tensor

from foreload.backend.predict.base import Gates, Predictor
from foreload.backend.predict.calibration import Calibration
from foreload.backend.predict.estimator import Estimating
from foreload.backend.predict.gate import Gate
from foreload.backend.predict.quasi_hidden import QuasiHidden

MEMBERS = {kind.name: kind for kind in (QuasiHidden, Estimating, Gate)}
"""What `hybrid` chooses from, preferred in this order among equals."""


class Hybrid(Predictor):
    """Asks, for each layer ahead, the predictor chosen for it."""

    name = "hybrid"

    def __init__(self, gates: Gates, calibration: Calibration | None, rolled: bool = False) -> None:
        super().__init__(gates, calibration, rolled)
        self._members = {name: kind(gates, calibration, rolled) for name, kind in MEMBERS.items()}
        self._choice = self.calibrated.meta.hybrid

    def start(self, at: int, r: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What the predictor of the next layer starts from."""
        return self._member(at, 1).start(at, r, ids, weights)

    def ahead(self, at: int, r: Tensor, ids: Tensor, weights: Tensor, depth: int) -> list[tuple[Tensor, Tensor]]:
        """See `Predictor.ahead`; each member looks as far as it was chosen for."""
        reach = min(depth, self.gates.n_layers - 1 - at)
        chosen = [self._member(at, h) for h in range(1, reach + 1)]
        deepest = {member.name: h for h, member in enumerate(chosen, 1)}
        seen = {name: self._members[name].ahead(at, r, ids, weights, h) for name, h in deepest.items()}
        return [seen[member.name][h] for h, member in enumerate(chosen)]

    def _member(self, at: int, depth: int) -> Predictor:
        return self._members[self._choice[depth - 1][at + depth] or Gate.name]
