"""`gate`: a later layer's own norm and gate on this layer's residual stream (Speculating Experts, section 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.models.decoder import Decoder


def predict_gate(decoder: Decoder, moe_layer: int, r: Tensor, depth: int, width: int) -> Tensor:
    """Experts predicted from r [n, hidden] of MoE layer `moe_layer` for the next `depth` MoE layers.

    Returns ids [targets, n, width], best first, for the targets that exist: at most `depth`, fewer near the last layer.
    """
    layers = decoder.shape.moe_layers
    targets = layers[moe_layer + 1 : moe_layer + 1 + depth]
    scores = [F.linear(decoder.moe_input(layer, r), decoder.layers[layer].gate) for layer in targets]
    return torch.topk(torch.stack(scores), width, dim=-1).indices
