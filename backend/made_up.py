"""A recording for probes that need one: what is routed does not matter to them."""

from __future__ import annotations

import numpy as np

from foreload.shape import ModelShape
from foreload.traces.schema import DECODE, PredictionColumn, Trace, TraceMeta


def recording(shape: ModelShape, rows: int = 16) -> Trace:
    """Rows of plain decode that route and predict the first experts of every layer."""
    layers, k = shape.n_moe_layers, shape.top_k
    routed = np.broadcast_to(np.arange(k, dtype=np.int16), (rows, layers, k)).copy()
    column = PredictionColumn(predictor="gate", depth=1, width=k)
    meta = TraceMeta.of(
        shape, model="made up", weights_hash="", tokenizer_hash="", source="probes", sampling={}, machine="",
        software={}, seed=-1, predictions=(column,),
    )  # fmt: skip
    return Trace(
        meta=meta,
        request=np.zeros(rows, np.int32),
        step=np.arange(rows, dtype=np.int32),
        phase=np.full(rows, DECODE, np.int8),
        position=np.arange(rows, dtype=np.int32),
        token_id=np.zeros(rows, np.int32),
        accepted=np.ones(rows, np.bool_),
        experts=routed,
        weights=None,
        predictions={("gate", 1): routed},
    )
