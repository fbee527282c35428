"""The trace schema (design: section 7b): what one recording of routing holds.

R = rows (token positions in time order), L = MoE layers, k = experts per token. A row belongs to a request, a step
(one forward of the model) and a phase; rows of one step are consecutive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

TRACE_SCHEMA = 1
PREFILL, DECODE, DRAFT_VERIFY = 0, 1, 2
PHASES = ("prefill", "decode", "draft_verify")


class PredictionColumn(BaseModel):
    """Prediction columns `p<layer>_<predictor>_<depth>`: experts predicted for `layer`, `depth` layers earlier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    predictor: str
    depth: Annotated[int, Field(ge=1)]
    width: Annotated[int, Field(ge=1)]


class TraceMeta(BaseModel):
    """Provenance, kept as JSON in the Parquet file metadata under the key `foreload`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = TRACE_SCHEMA
    model: str
    revision: str = ""
    weights_hash: str
    tokenizer_hash: str
    shape: dict[str, Any]  # the fields of ModelShape
    shape_hash: str
    moe_layers: int
    experts: int
    top_k: int
    scoring: str
    source: str  # who recorded it: "foreload engine", or the importer's name
    sampling: dict[str, Any]
    machine: str
    software: dict[str, str]
    seed: int
    subjects: tuple[str, ...] = ()  # one per request, if known
    has_weights: bool = False
    predictions: tuple[PredictionColumn, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One recording in memory."""

    meta: TraceMeta
    request: NDArray[np.int32]  # [R]
    step: NDArray[np.int32]  # [R] counts forwards over the whole recording
    phase: NDArray[np.int8]  # [R] PREFILL, DECODE or DRAFT_VERIFY
    position: NDArray[np.int32]  # [R] position in its request
    token_id: NDArray[np.int32]  # [R] the token fed in at that position
    accepted: NDArray[np.bool_]  # [R] False for a rejected draft
    experts: NDArray[np.int16]  # [R, L, k] in rank order
    weights: NDArray[np.float16] | None  # [R, L, k]
    predictions: Mapping[tuple[str, int], NDArray[np.int16]]  # (predictor, depth) -> [R, L, width], -1 = none

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.request)

    @property
    def decode_rows(self) -> int:
        """Number of rows that are plain decode steps."""
        return int((self.phase == DECODE).sum())
