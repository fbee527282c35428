"""The estimator's network (Speculating Experts, section 3): one for all layers, told by an embedding where it is."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from foreload.budget import ESTIMATOR_EXPAND, ESTIMATOR_SHRINK


class Estimator(nn.Module):
    """The router input expected at layer l + 1 -> scores of that layer's experts. E experts, H hidden, L MoE layers."""

    def __init__(self, hidden: int, experts: int, layers: int) -> None:
        super().__init__()
        width = max(1, hidden // ESTIMATOR_SHRINK)
        self.down = nn.Linear(hidden, width)
        self.layer = nn.Embedding(layers, width)
        self.inner = nn.Linear(width, ESTIMATOR_EXPAND * width)
        self.outer = nn.Linear(ESTIMATOR_EXPAND * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, experts)

    def forward(self, q: Tensor, layers: Tensor) -> Tensor:
        """q [..., N, H] with `layers` [...], the layer each q comes from: scores [..., N, E]."""
        return self._scores(self.down(q) + self.layer(layers)[..., None, :])

    def at(self, layer: int, q: Tensor) -> Tensor:
        """q [N, H] that all come from `layer`: scores [N, E]. Copies nothing from the host."""
        return self._scores(self.down(q) + self.layer.weight[layer])

    def _scores(self, z: Tensor) -> Tensor:
        z = z + self.outer(functional.silu(self.inner(z)))
        scores: Tensor = self.head(self.norm(z))
        return scores
