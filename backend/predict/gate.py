"""`gate`: a later layer's own norm and gate on this layer's residual stream (Speculating Experts, section 3)."""

from __future__ import annotations

from torch import Tensor

from foreload.backend.predict.base import Predictor


class Gate(Predictor):
    """Predicts as if this layer's experts added nothing."""

    name = "gate"

    def start(self, at: int, r: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The residual stream itself."""
        return r
