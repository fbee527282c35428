"""A synthetic recording like a given one: shape, skew, recency and predictability are found from its beginning.

Three knobs (skew, recency, persistence) meet three statistics: the load of the busiest quarter of the experts,
next-token overlap, and uses within a few tokens of the last. All are found together, by least squares.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from foreload.errors import UsageError
from foreload.shape import ModelShape
from foreload.traces.counting import count_gaps, count_load, count_recall
from foreload.traces.io import TraceReader
from foreload.traces.schema import PREFILL, Trace, concatenate
from foreload.traces.synthetic import PREDICTOR, Synthetic, chunks

FIT_TOKENS, FIT_LAYERS = 512, 8
_MIN_TOKENS = 32
_LOWEST, _HIGHEST = (0.02, 0.02, 1.0), (8.0, 10.0, 1000.0)
_STARTS = ((1.0, 2.0, 12.0), (0.2, 3.0, 12.0), (1.5, 0.7, 40.0))


@dataclass(frozen=True)
class Likeness:
    """What is matched; shares of expert uses."""

    busiest: float  # load of the busiest quarter of the experts
    overlap: float  # used by the token before
    within: float  # used within the last few tokens: as many as need half of the experts


def likeness(experts: NDArray[np.int16], position: NDArray[np.int64], fresh: NDArray[np.bool_], count: int) -> Likeness:
    """Of ids [R, L, k] of `count` experts; `fresh` [R] is whether a request begins."""
    load = np.zeros((experts.shape[1], count), np.int64)
    count_load(experts, load)
    reach = max(3, count // (2 * experts.shape[2]))
    gaps = np.zeros((experts.shape[1], reach + 2), np.int64)
    count_gaps(experts, position, fresh, np.full(load.shape, -1, np.int64), gaps)
    busiest = np.sort(load, axis=1)[:, ::-1][:, : max(1, count // 4)].sum() / load.sum()
    known = max(1, int(gaps.sum()))
    return Likeness(float(busiest), float(gaps[:, 1].sum() / known), float(gaps[:, 1 : reach + 1].sum() / known))


def fit(reader: TraceReader) -> Synthetic:
    """What makes a recording like this one; `tokens`, `requests` and `seed` are left at their defaults.

    Recall is that of the recorded predictor `gate`, or of the first there is, per depth and layer. UsageError if
    fewer than 32 tokens were decoded.
    """
    trace = _beginning(reader)
    if trace.rows < _MIN_TOKENS:
        raise UsageError(f"{reader.path}: holds {trace.rows} decoded tokens: a fit needs {_MIN_TOKENS}")
    shape = reader.meta.model_shape()
    layers = np.unique(np.linspace(0, shape.n_moe_layers - 1, min(FIT_LAYERS, shape.n_moe_layers)).astype(int))
    fresh = np.ones(trace.rows, np.bool_)
    fresh[1:] = trace.request[1:] != trace.request[:-1]
    wanted = likeness(
        np.ascontiguousarray(trace.experts[:, layers]), trace.position.astype(np.int64), fresh, shape.experts
    )
    nearest = _search(wanted, _part(shape, len(layers)), trace.rows)
    return replace(
        nearest, shape=shape, tokens=2000, recall=_recall(trace), name=f"synthetic, like {reader.meta.model}"
    )


def _beginning(reader: TraceReader) -> Trace:
    """The first FIT_TOKENS tokens that are neither prompts nor rejected drafts."""
    parts: list[Trace] = []
    left = FIT_TOKENS
    for group in reader.groups():
        rows = np.flatnonzero((group.phase != PREFILL) & group.accepted)[:left]
        parts.append(group.take(rows))
        left -= len(rows)
        if not left:
            break
    return concatenate(reader.meta, parts)


def _part(shape: ModelShape, layers: int) -> ModelShape:
    return replace(shape, layers=layers, moe_layers=tuple(range(layers)))


def _search(wanted: Likeness, shape: ModelShape, tokens: int) -> Synthetic:
    """What comes nearest."""
    from scipy.optimize import least_squares

    target = np.asarray(astuple(wanted))

    def guess(logs: NDArray[np.float64]) -> Synthetic:
        skew, recency, persistence = (round(float(value), 4) for value in np.exp(logs))
        return Synthetic(shape, tokens=tokens, skew=skew, recency=recency, persistence=persistence)

    def off(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = np.asarray(astuple(_made(guess(logs)))) - target
        return found

    bounds = (np.log(_LOWEST), np.log(_HIGHEST))
    tries = [least_squares(off, np.log(start), bounds=bounds, diff_step=0.1, max_nfev=10) for start in _STARTS]
    return guess(min(tries, key=lambda found: float(found.cost)).x)


def _made(spec: Synthetic) -> Likeness:
    experts = np.concatenate([piece.experts for piece in chunks(spec)])
    fresh = np.zeros(len(experts), np.bool_)
    fresh[0] = True
    return likeness(experts, np.arange(len(experts)), fresh, spec.shape.experts)


def _recall(trace: Trace) -> tuple[tuple[float, ...], ...]:
    """Per depth and layer; a layer without predictions has the mean of the others."""
    names = list(dict.fromkeys(predictor for predictor, _ in trace.predictions))
    if not names:
        return ()
    name = PREDICTOR if PREDICTOR in names else names[0]
    recall: list[tuple[float, ...]] = []
    for depth in range(1, trace.meta.moe_layers):
        predicted = trace.predictions.get((name, depth))
        if predicted is None:
            break
        found = np.zeros((trace.meta.moe_layers, 3), np.int64)
        weights = np.zeros((0, 1, 1), np.float32)
        count_recall(trace.experts, np.ascontiguousarray(predicted), weights, found, np.zeros((len(found), 2)))
        mean = found[:, 1].sum() / max(1, found[:, 0].sum())
        recall.append(tuple(float(at_k / uses) if uses else float(mean) for uses, at_k, _ in found.tolist()))
    return tuple(recall)
