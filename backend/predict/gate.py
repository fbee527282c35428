"""`gate`: a later layer's own norm and gate on this layer's residual stream (Speculating Experts, section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from foreload.backend.models.decoder import Decoder


def predict_gate(decoder: Decoder, moe_layer: int, r: Tensor, depth: int, width: int) -> Tensor:
    """Experts predicted from r [n, hidden] of MoE layer `moe_layer` for the next `depth` MoE layers.

    Returns ids [targets, n, width], best first, for the targets that exist: at most `depth`, fewer near the last layer.
    """
    targets = range(moe_layer + 1, min(moe_layer + 1 + depth, decoder.shape.n_moe_layers))
    scores = [decoder.choice(at, decoder.moe_input(at, r)) for at in targets]
    return torch.topk(torch.stack(scores), width, dim=-1).indices
