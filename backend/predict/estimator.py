"""`estimator`: one small network for all layers, distilled from the gates (Speculating Experts, section 3)."""

from __future__ import annotations

from torch import Tensor

from foreload.backend.predict.quasi_hidden import QuasiHidden


class Estimating(QuasiHidden):
    """Reads the expected input of a layer, q = N(r_l + d_l), with the network in place of that layer's gate."""

    name = "estimator"

    def score(self, target: int, q: Tensor) -> Tensor:
        """Scores by the network, told which layer q comes from."""
        return self.calibrated.estimate(target - 1, q)
