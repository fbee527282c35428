"""A trace as the simulator runs it: requests with prompt rows and decode rows, checked against model and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreload.errors import MismatchError
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.traces.schema import DECODE, DRAFT_VERIFY, PREFILL, Trace


@dataclass(frozen=True)
class Request:
    """One request: experts of its prompt [P, L, k] and of its decode tokens [T, L, k], in token order."""

    number: int
    prompt: NDArray[np.int32]
    experts: NDArray[np.int32]
    demand: NDArray[np.int32]  # [T, L, k] the same, each layer's ascending, as the brain is asked
    context: tuple[int, ...]  # [T] positions attended to
    predicted: tuple[NDArray[np.int32], ...]  # per depth 1.., [T, L, width] experts predicted for a layer


def request_numbers(trace: Trace) -> tuple[int, ...]:
    """The requests of a trace in the order they begin."""
    return tuple(dict.fromkeys(trace.request.tolist()))


def load_requests(
    trace: Trace, shape: ModelShape, settings: Settings | None = None, requests: Sequence[int] | None = None
) -> list[Request]:
    """The (chosen) requests in order, with the predictions that `settings` need.

    Raises MismatchError if the trace is of another shape, holds draft steps, lacks a request, a predictor, a depth or
    the width, or names an expert the model does not have.
    """
    _check(trace, shape)
    if settings is not None and settings.draft.kind != "none":
        raise MismatchError(f"trace: holds no verify windows of draft {settings.draft.kind!r}: it is of plain decode")
    known = request_numbers(trace)
    chosen = known if requests is None else tuple(requests)
    missing = [number for number in chosen if number not in known]
    if missing:
        raise MismatchError(f"trace: request {missing[0]} is not in it: it holds {', '.join(map(str, known))}")
    predictions = _predictions(trace, shape, settings) if settings is not None else ()
    return [_request(trace, number, predictions) for number in chosen]


def _check(trace: Trace, shape: ModelShape) -> None:
    if trace.meta.shape_hash != shape.hash:
        raise MismatchError(f"trace: recorded from model shape {trace.meta.shape_hash}, this model is {shape.hash}")
    expected = (shape.n_moe_layers, shape.top_k)
    if trace.experts.shape[1:] != expected:
        raise MismatchError(f"trace: has experts of shape {trace.experts.shape[1:]} per row, the model {expected}")
    if trace.rows and not 0 <= int(trace.experts.min()) <= int(trace.experts.max()) < shape.experts:
        raise MismatchError(f"trace: names an expert outside 0..{shape.experts - 1}")
    if (trace.phase == DRAFT_VERIFY).any():
        raise MismatchError("trace: holds draft_verify steps: only plain decode can be simulated")


def _predictions(trace: Trace, shape: ModelShape, settings: Settings) -> tuple[NDArray[np.int16], ...]:
    width = settings.width(shape)
    found = []
    for depth in range(1, settings.prefetch_depth + 1):
        table = trace.predictions.get((settings.predictor, depth))
        if table is None:
            held = ", ".join(f"{name} {at}" for name, at in sorted(trace.predictions)) or "none"
            raise MismatchError(f"trace: no predictions of {settings.predictor} at depth {depth}: it holds {held}")
        if table.shape[2] < width:
            raise MismatchError(f"trace: predictions are {table.shape[2]} wide, prefetch_width is {width}")
        found.append(table[:, :, :width])
    return tuple(found)


def _request(trace: Trace, number: int, predictions: tuple[NDArray[np.int16], ...]) -> Request:
    rows = trace.request == number
    prompt, decode = rows & (trace.phase == PREFILL), rows & (trace.phase == DECODE)
    experts = np.ascontiguousarray(trace.experts[decode], np.int32)
    return Request(
        number=number,
        prompt=np.ascontiguousarray(trace.experts[prompt], np.int32),
        experts=experts,
        demand=np.sort(experts, axis=2),
        context=tuple((trace.position[decode] + 1).tolist()),
        predicted=tuple(np.ascontiguousarray(table[decode], np.int32) for table in predictions),
    )
