"""`quasi_hidden`: gates on the residual stream plus what the executed experts add on average (Speculating Experts,
section 3: default vectors)."""

from __future__ import annotations

from torch import Tensor

from foreload.backend.predict.base import Predictor


class QuasiHidden(Predictor):
    """Predicts as if every executed expert had given its default vector."""

    name = "quasi_hidden"

    def start(self, at: int, r: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """r_l + d_l."""
        return r + self.calibrated.default(at, ids, weights).to(r.dtype)
