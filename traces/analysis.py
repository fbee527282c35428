"""What a recording says about routing: how evenly experts are used, how often they are used again."""

from __future__ import annotations

from typing import Any

import numpy as np

from foreload.traces.histogram import uses
from foreload.traces.schema import PREFILL, Trace


def expert_load(trace: Trace) -> list[dict[str, Any]]:
    """Per MoE layer, over all rows: `layer` (the model's number), `unused` experts, `top_share` of the busiest."""
    loads = []
    for layer, used in zip(trace.meta.layer_numbers, uses(trace.experts, trace.meta.experts), strict=True):
        total = int(used.sum())
        top = int(used.max()) / total if total else 0.0
        loads.append({"layer": layer, "unused": int((used == 0).sum()), "top_share": top})
    return loads


def reuse(trace: Trace) -> list[float | None]:
    """Per MoE layer: share of experts that a decoded token needs and the token decoded before it needed too.

    None where no two decoded tokens follow each other in a request. Rejected drafts are left out.
    """
    trace = trace.take(np.flatnonzero((trace.phase != PREFILL) & trace.accepted))
    pairs = np.flatnonzero((trace.request[1:] == trace.request[:-1]) & (trace.position[1:] == trace.position[:-1] + 1))
    if not len(pairs):
        return [None] * trace.meta.moe_layers
    shares: list[float | None] = []
    for index in range(trace.meta.moe_layers):
        before, now = trace.experts[pairs, index], trace.experts[pairs + 1, index]
        shares.append(float((now[:, :, None] == before[:, None, :]).any(axis=2).mean()))
    return shares
