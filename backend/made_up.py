"""Recordings that are made up: of given routing, or, for probes, of routing that does not matter."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreload.shape import ModelShape
from foreload.traces.schema import DECODE, PredictionColumn, Trace, TraceMeta


def recording(shape: ModelShape, rows: int = 16) -> Trace:
    """Rows of plain decode that route and predict the first experts of every layer."""
    layers, k = shape.n_moe_layers, shape.top_k
    routed = np.broadcast_to(np.arange(k, dtype=np.int16), (rows, layers, k)).copy()
    return of_routing(shape, routed, routed, "probes", -1)


def of_routing(
    shape: ModelShape, routed: NDArray[np.int16], predicted: NDArray[np.int16], source: str, seed: int
) -> Trace:
    """One request of plain decode; routed [T, L, k], predicted by the gate one layer ahead [T, L, width]."""
    rows, column = len(routed), PredictionColumn(predictor="gate", depth=1, width=predicted.shape[2])
    meta = TraceMeta.of(
        shape, model="made up", weights_hash="", tokenizer_hash="", source=source, sampling={}, machine="none",
        software={}, seed=seed, predictions=(column,),
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
        predictions={("gate", 1): predicted},
    )
