"""A trace as the simulator runs it: requests with prompt rows and decode rows, checked against model and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.window import demand_of, merge_predictions
from foreload.errors import MismatchError
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.traces.remodel import cut_windows
from foreload.traces.schema import DRAFT_VERIFY, PREFILL, Trace


@dataclass(frozen=True)
class Request:
    """One request: experts of its prompt, and its S decode steps in order, of one token each or of a verify window.

    D = the most distinct experts of a layer-step. Rejected drafts are demand like any other token.
    """

    number: int
    prompt: NDArray[np.int32]  # [P, L, k]
    demand: NDArray[np.int32]  # [S, L, D] distinct experts, ascending, as the brain is asked; then -1
    counts: NDArray[np.int32]  # [S, L, D] tokens of each; 0 where there is none
    fed: tuple[int, ...]  # [S] tokens in the step
    emitted: tuple[int, ...]  # [S] tokens it added to the text
    context: tuple[int, ...]  # [S] positions attended to
    predicted: tuple[NDArray[np.int32], ...]  # per depth 1.., [S, L, width] experts predicted for a layer; then -1
    assumed: bool = False  # whether `demand` at speculated layers is what an exact recording's predictions say

    @property
    def tokens(self) -> int:
        """Tokens that decode added."""
        return sum(self.emitted)

    def ahead(self, depth: int) -> NDArray[np.int32]:
        """The predictions up to `depth` in one array, [depth, S, L, widest]; then -1."""
        tables = self.predicted[:depth]
        widest = max((table.shape[2] for table in tables), default=0)
        joined = np.full((depth, *self.demand.shape[:2], widest), -1, np.int32)
        for table, of_depth in zip(tables, joined, strict=True):
            of_depth[:, :, : table.shape[2]] = table
        return joined

    def needed(self, step: int) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Layer and expert of everything that a step demands."""
        layers, places = np.nonzero(self.counts[step])
        return layers, self.demand[step, layers, places]


def request_numbers(trace: Trace) -> tuple[int, ...]:
    """The requests of a trace in the order they begin."""
    return tuple(dict.fromkeys(trace.request.tolist()))


def load_requests(
    trace: Trace, shape: ModelShape, settings: Settings | None = None, requests: Sequence[int] | None = None
) -> list[Request]:
    """The (chosen) requests in order, with the predictions that `settings` need.

    Without a draft, steps are the tokens of the text one by one, also of a recording of verify windows; with one, they
    are the windows recorded with that draft, cut where the settings draft fewer tokens. Raises MismatchError if the
    trace is of another shape, lacks a request, a draft, a predictor, a depth or the width, executed other predictions
    than the settings would, or names an expert the model does not have.
    """
    _check(trace, shape)
    windows = settings is not None and settings.draft.kind != "none"
    if settings is not None and windows:
        trace = _drafted(trace, settings)
    known = request_numbers(trace)
    chosen = known if requests is None else tuple(requests)
    missing = [number for number in chosen if number not in known]
    if missing:
        raise MismatchError(f"trace: request {missing[0]} is not in it: it holds {', '.join(map(str, known))}")
    if settings is None:
        return [_request(trace, number, (), None, False) for number in chosen]
    predictions = _predictions(trace, shape, settings)
    executed = _executed(trace, shape, settings)
    return [_request(trace, number, predictions, executed, windows) for number in chosen]


def first_steps(request: Request, steps: int) -> Request:
    """The request as if it ended after so many decode steps."""
    return replace(
        request,
        demand=request.demand[:steps],
        counts=request.counts[:steps],
        fed=request.fed[:steps],
        emitted=request.emitted[:steps],
        context=request.context[:steps],
        predicted=tuple(table[:steps] for table in request.predicted),
    )


def recorded_draft(trace: Trace) -> tuple[str, int] | None:
    """Kind and gamma of the draft whose windows a trace holds; None for plain decode."""
    sampling = trace.meta.sampling
    if "draft" not in sampling or not (trace.phase == DRAFT_VERIFY).any():
        return None
    return str(sampling["draft"]), int(sampling["gamma"])


def _drafted(trace: Trace, settings: Settings) -> Trace:
    """With the windows that `settings` would make; MismatchError if the trace does not hold them, nor longer ones."""
    wanted, found = (settings.draft.kind, settings.draft.gamma), recorded_draft(trace)
    if found is None or wanted[0] != found[0] or wanted[1] > found[1]:
        held = "plain decode" if found is None else f"those of draft {found[0]!r} with gamma {found[1]}"
        raise MismatchError(f"trace: holds no verify windows of draft {wanted[0]!r} with gamma {wanted[1]}, but {held}")
    model = trace.meta.sampling.get("draft_model")
    if settings.draft.kind == "model" and model not in (None, settings.draft.model_name):
        raise MismatchError(
            f"trace: drafts are of model {model!r}, the settings draft with {settings.draft.model_name!r}"
        )
    return cut_windows(trace, settings.draft.gamma)


def _check(trace: Trace, shape: ModelShape) -> None:
    if trace.meta.shape_hash != shape.hash:
        raise MismatchError(f"trace: recorded from model shape {trace.meta.shape_hash}, this model is {shape.hash}")
    expected = (shape.n_moe_layers, shape.top_k)
    if trace.experts.shape[1:] != expected:
        raise MismatchError(f"trace: has experts of shape {trace.experts.shape[1:]} per row, the model {expected}")
    if trace.rows and not 0 <= int(trace.experts.min()) <= int(trace.experts.max()) < shape.experts:
        raise MismatchError(f"trace: names an expert outside 0..{shape.experts - 1}")


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
    executed, decode = trace.experts.copy(), trace.phase != PREFILL
    executed[:, layers] = table[:, layers]
    if (executed[decode] < 0).any():
        raise MismatchError(f"trace: lacks predictions of {settings.predictor} for some tokens of speculated layers")
    return executed


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def _request(
    trace: Trace,
    number: int,
    predictions: tuple[NDArray[np.int16], ...],
    executed: NDArray[np.int16] | None,
    windows: bool,
) -> Request:
    mine = trace.request == number
    prompt = mine & (trace.phase == PREFILL)
    decode = np.flatnonzero(mine & (trace.phase != PREFILL) & (trace.accepted | windows))
    steps = trace.step[decode] if windows else np.arange(len(decode))
    starts = np.flatnonzero(np.diff(steps, prepend=-1))
    fed = np.diff(starts, append=len(decode))
    accepted = np.concatenate([[0], np.cumsum(trace.accepted[decode])])
    emitted = np.diff(accepted[[*starts.tolist(), len(decode)]])
    demand, counts = _demand((trace.experts if executed is None else executed)[decode], fed)
    return Request(
        number=number,
        prompt=np.ascontiguousarray(trace.experts[prompt], np.int32),
        demand=demand,
        counts=counts,
        fed=tuple(fed.tolist()),
        emitted=tuple(emitted.tolist()),
        context=tuple((trace.position[decode[starts + fed - 1]] + 1).tolist()),
        predicted=tuple(_merged(table[decode], fed) for table in predictions),
        assumed=executed is not None,
    )


def _demand(experts: NDArray[np.int16], fed: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Demand and counts [S, L, D] of the rows experts [R, L, k], of which `fed` [S] belong to each step."""
    if len(experts) == len(fed):
        alone = np.sort(experts.astype(np.int32), axis=2)
        return alone, np.ones_like(alone)
    layers = experts.shape[1]
    found = [[demand_of(rows[:, layer]) for layer in range(layers)] for rows in np.split(experts, np.cumsum(fed)[:-1])]
    widest = max(len(one.experts) for step in found for one in step)
    demand = np.full((len(fed), layers, widest), -1, np.int32)
    counts = np.zeros((len(fed), layers, widest), np.int32)
    for step, of_step in enumerate(found):
        for layer, one in enumerate(of_step):
            demand[step, layer, : len(one.experts)] = one.experts
            counts[step, layer, : len(one.experts)] = one.counts
    return demand, counts


def _merged(predicted: NDArray[np.int16], fed: NDArray[np.int64]) -> NDArray[np.int32]:
    """What the rows [R, L, width] of each step predict together, [S, L, wider], as the engine merges it."""
    if len(predicted) == len(fed):
        return np.ascontiguousarray(predicted, np.int32)
    layers, steps = predicted.shape[1], np.split(predicted, np.cumsum(fed)[:-1])
    lists = [[merge_predictions(rows[:, layer]) for layer in range(layers)] for rows in steps]
    widest = max(len(one) for step in lists for one in step)
    merged = np.full((len(fed), layers, widest), -1, np.int32)
    for step, of_step in enumerate(lists):
        for layer, one in enumerate(of_step):
            merged[step, layer, : len(one)] = one
    return merged
