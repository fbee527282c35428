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
        z = self.down(q) + self.layer(layers)[..., None, :]
        z = z + self.outer(functional.silu(self.inner(z)))
        scores: Tensor = self.head(self.norm(z))
        return scores


class Frozen:
    """A trained estimator for decoding: one layer's tokens at a time, with as few operations as it takes."""

    def __init__(self, trained: Estimator) -> None:
        down, inner, outer, head = trained.down, trained.inner, trained.outer, trained.head
        self.dtype = down.weight.dtype
        self._down, self._starts = down.weight, list(down.bias + trained.layer.weight)
        self._inner, self._outer, self._head = ((x.weight, x.bias) for x in (inner, outer, head))
        self._norm = (tuple(trained.norm.normalized_shape), trained.norm.weight, trained.norm.bias)

    def scores(self, layer: int, q: Tensor) -> Tensor:
        """q [N, H] that all come from `layer`: scores [N, E]. Copies nothing from the host."""
        z = functional.linear(q, self._down, self._starts[layer])
        z = z + functional.linear(functional.silu(functional.linear(z, *self._inner)), *self._outer)
        return functional.linear(functional.layer_norm(z, *self._norm), *self._head)
