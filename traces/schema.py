"""The trace schema (design: section 7b): what one recording of routing holds.

R = rows (token positions in time order), L = MoE layers, k = experts per token. A row belongs to a request, a step
(one forward of the model) and a phase; rows of one step are consecutive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from foreload.errors import UsageError
from foreload.shape import ModelShape

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
    model: Annotated[str, Field(min_length=1)]
    revision: str = ""
    weights_hash: str
    tokenizer_hash: str
    shape: dict[str, Any]  # the fields of ModelShape
    shape_hash: str
    moe_layers: Annotated[int, Field(ge=1)]
    experts: Annotated[int, Field(ge=1, le=32767)]
    top_k: Annotated[int, Field(ge=1)]
    scoring: str
    source: str  # who recorded it: "foreload engine", or the importer's name
    sampling: dict[str, Any]
    machine: str
    software: dict[str, str]
    seed: int  # -1: unknown
    subjects: tuple[str, ...] = ()  # one per request, if known
    has_weights: bool = False
    predictions: tuple[PredictionColumn, ...] = ()
    speculated: tuple[int, ...] = ()  # MoE layers, from 0, whose decode experts are predicted ones that were executed
    speculated_by: str = ""  # their predictor
    order: Literal["recorded", "unknown"] = "recorded"  # unknown: a histogram, see `foreload.traces.histogram`

    @classmethod
    def of(cls, shape: ModelShape, **provenance: Any) -> Self:
        """Metadata of a recording of `shape`; `provenance` are the fields that the shape does not give."""
        return cls(
            shape=asdict(shape),
            shape_hash=shape.hash,
            moe_layers=shape.n_moe_layers,
            experts=shape.experts,
            top_k=shape.top_k,
            scoring=shape.scoring,
            **provenance,
        )

    @field_validator("shape")
    @classmethod
    def _plain_shape(cls, value: dict[str, Any]) -> dict[str, Any]:
        """As JSON would give it back, so that metadata read equal metadata written."""
        plain: dict[str, Any] = json.loads(json.dumps(value))
        return plain

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.schema_version != TRACE_SCHEMA:
            raise ValueError(f"schema_version is {self.schema_version}: this Foreload reads {TRACE_SCHEMA}")
        shape = self.model_shape()
        for field, expected in (
            ("moe_layers", shape.n_moe_layers),
            ("experts", shape.experts),
            ("top_k", shape.top_k),
            ("shape_hash", shape.hash),
        ):
            if getattr(self, field) != expected:
                raise ValueError(f"{field} is {getattr(self, field)!r}: the shape says {expected!r}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}: a layer has {self.experts} experts")
        return self

    def model_shape(self) -> ModelShape:
        """The recorded model's shape; ValueError names the fields that are unknown or missing."""
        return ModelShape.from_fields(self.shape)

    @property
    def sampled(self) -> bool:
        """Whether tokens were drawn, at a temperature above 0."""
        return float(self.sampling.get("temperature", 0.0)) > 0

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The model's number of each MoE layer, used in column names."""
        return self.model_shape().moe_layers


@dataclass(frozen=True)
class Trace:
    """One recording in memory."""

    meta: TraceMeta
    request: NDArray[np.int32]  # [R]
    step: NDArray[np.int32]  # [R] counts forwards over the whole recording
    phase: NDArray[np.int8]  # [R] PREFILL, DECODE or DRAFT_VERIFY
    position: NDArray[np.int32]  # [R] position in its request
    token_id: NDArray[np.int32]  # [R] the token fed in at that position, -1 = unknown
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
        """Number of rows that are decoded tokens of the text: rejected drafts are none."""
        return int(((self.phase != PREFILL) & self.accepted).sum())

    def requests(self) -> tuple[int, ...]:
        """Request numbers in the order they were recorded."""
        return tuple(dict.fromkeys(self.request.tolist()))

    def select(self, requests: Iterable[int]) -> Trace:
        """The rows of these requests, in recorded order; UsageError names one that is not there."""
        wanted = set(requests)
        unknown = sorted(wanted - set(self.requests()))
        if unknown:
            raise UsageError(f"trace: request {unknown[0]} is not recorded: there are {_listed(self.requests())}")
        return self.take(np.flatnonzero(np.isin(self.request, sorted(wanted))))

    def take(self, rows: NDArray[np.intp] | slice) -> Trace:
        """The named rows as a trace of their own."""
        return Trace(
            meta=self.meta,
            request=self.request[rows],
            step=self.step[rows],
            phase=self.phase[rows],
            position=self.position[rows],
            token_id=self.token_id[rows],
            accepted=self.accepted[rows],
            experts=self.experts[rows],
            weights=None if self.weights is None else self.weights[rows],
            predictions={key: value[rows] for key, value in self.predictions.items()},
        )

    def step_starts(self) -> NDArray[np.int64]:
        """First row of each step and, last, the number of rows: step i is rows [starts[i], starts[i + 1])."""
        change = np.flatnonzero(self.step[1:] != self.step[:-1]) + 1
        first = [0] if self.rows else []
        return np.concatenate([first, change, [self.rows]]).astype(np.int64)


def demand(trace: Trace, rows: slice, layer: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The distinct experts that `rows` (of one step) need in MoE layer index `layer`, ascending, with tokens each."""
    experts, counts = np.unique(trace.experts[rows, layer], return_counts=True)
    return experts.astype(np.int32), counts.astype(np.int32)


def concatenate(meta: TraceMeta, parts: Iterable[Trace]) -> Trace:
    """Traces that follow each other, as one; none gives a trace without rows."""
    traces = [empty(meta), *parts]

    def joined(name: str) -> Any:
        return np.concatenate([getattr(trace, name) for trace in traces])

    names = ("request", "step", "phase", "position", "token_id", "accepted", "experts")
    weights = [trace.weights for trace in traces if trace.weights is not None]
    return Trace(
        meta=meta,
        **{name: joined(name) for name in names},
        weights=np.concatenate(weights) if meta.has_weights else None,
        predictions={
            key: np.concatenate([trace.predictions[key] for trace in traces]) for key in traces[0].predictions
        },
    )


def empty(meta: TraceMeta) -> Trace:
    """A trace without rows."""

    def lists(width: int, dtype: type[Any]) -> NDArray[Any]:
        return np.zeros((0, meta.moe_layers, width), dtype)

    return Trace(
        meta=meta,
        request=np.zeros(0, np.int32),
        step=np.zeros(0, np.int32),
        phase=np.zeros(0, np.int8),
        position=np.zeros(0, np.int32),
        token_id=np.zeros(0, np.int32),
        accepted=np.zeros(0, np.bool_),
        experts=lists(meta.top_k, np.int16),
        weights=lists(meta.top_k, np.float16) if meta.has_weights else None,
        predictions={(p.predictor, p.depth): lists(p.width, np.int16) for p in meta.predictions},
    )


def _listed(numbers: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "") if numbers else "none"
