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
    assumed: bool = False  # whether `demand` at speculated layers is what an exact recording's predictions say


def request_numbers(trace: Trace) -> tuple[int, ...]:
    """The requests of a trace in the order they begin."""
    return tuple(dict.fromkeys(trace.request.tolist()))


def load_requests(
    trace: Trace, shape: ModelShape, settings: Settings | None = None, requests: Sequence[int] | None = None
) -> list[Request]:
    """The (chosen) requests in order, with the predictions that `settings` need.

    Raises MismatchError if the trace is of another shape, holds draft steps, lacks a request, a predictor, a depth or
    the width, executed other predictions than the settings would, or names an expert the model does not have.
    """
    _check(trace, shape)
    if settings is not None and settings.draft.kind != "none":
        raise MismatchError(f"trace: holds no verify windows of draft {settings.draft.kind!r}: it is of plain decode")
    known = request_numbers(trace)
    chosen = known if requests is None else tuple(requests)
    missing = [number for number in chosen if number not in known]
    if missing:
        raise MismatchError(f"trace: request {missing[0]} is not in it: it holds {', '.join(map(str, known))}")
    if settings is None:
        return [_request(trace, number, (), None) for number in chosen]
    predictions = _predictions(trace, shape, settings)
    executed = _executed(trace, shape, settings)
    return [_request(trace, number, predictions, executed) for number in chosen]


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
        table = _table(trace, settings.prediction(depth), depth)
        if table.shape[2] < width:
            raise MismatchError(f"trace: predictions are {table.shape[2]} wide, prefetch_width is {width}")
        found.append(table[:, :, :width])
    return tuple(found)


def _table(trace: Trace, predictor: str, depth: int) -> NDArray[np.int16]:
    found = trace.predictions.get((predictor, depth))
    if found is None:
        held = ", ".join(f"{name} {at}" for name, at in sorted(trace.predictions)) or "none"
        raise MismatchError(f"trace: no predictions of {predictor} at depth {depth}: it holds {held}")
    return found


def _executed(trace: Trace, shape: ModelShape, settings: Settings) -> NDArray[np.int16] | None:
    """Experts [R, L, k] with those predicted for speculated layers in place of the true ones, assuming that later
    routing does not drift; None where the recording shows what was executed.

    MismatchError if the recording executed other predictions than `settings` would.
    """
    layers, meta = settings.speculated(shape), trace.meta
    if (layers, settings.predictor if layers else "") == (meta.speculated, meta.speculated_by):
        return None
    if meta.speculated:
        raise MismatchError(
            f"trace: recorded with layers {_listed(meta.speculated)} speculated by {meta.speculated_by}, "
            f"the settings speculate {_listed(layers)}: record again"
        )
    table = _table(trace, settings.predictor, 1)[:, :, : shape.top_k]
    if table.shape[2] < shape.top_k:
        raise MismatchError(f"trace: predictions are {table.shape[2]} wide, a speculated layer executes {shape.top_k}")
    executed, decode = trace.experts.copy(), trace.phase == DECODE
    executed[:, layers] = table[:, layers]
    if (executed[decode] < 0).any():
        raise MismatchError(f"trace: lacks predictions of {settings.predictor} for some tokens of speculated layers")
    return executed


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def _request(
    trace: Trace, number: int, predictions: tuple[NDArray[np.int16], ...], executed: NDArray[np.int16] | None
) -> Request:
    rows = trace.request == number
    prompt, decode = rows & (trace.phase == PREFILL), rows & (trace.phase == DECODE)
    experts = np.ascontiguousarray((trace.experts if executed is None else executed)[decode], np.int32)
    return Request(
        number=number,
        prompt=np.ascontiguousarray(trace.experts[prompt], np.int32),
        experts=experts,
        demand=np.sort(experts, axis=2),
        context=tuple((trace.position[decode] + 1).tolist()),
        predicted=tuple(np.ascontiguousarray(table[decode], np.int32) for table in predictions),
        assumed=executed is not None,
    )
