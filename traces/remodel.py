"""Recordings as they would be of something else: of another model, with verify windows, with predictions executed.

What they then hold is assumed, not recorded: `source` says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.errors import MismatchError, UsageError
from foreload.shape import ModelShape
from foreload.traces.schema import DECODE, DRAFT_VERIFY, PREFILL, PredictionColumn, Trace


def of_shape(trace: Trace, shape: ModelShape) -> Trace:
    """The same routing as if `shape` had routed so.

    MismatchError unless both have as many MoE layers, experts and experts per token.
    """
    meta = trace.meta
    recorded, wanted = (meta.moe_layers, meta.experts, meta.top_k), (shape.n_moe_layers, shape.experts, shape.top_k)
    if recorded != wanted:
        raise MismatchError(
            "trace: has {} MoE layers of {} experts, top-{}".format(*recorded)
            + "; the model has {} of {}, top-{}".format(*wanted)
        )
    if meta.shape_hash == shape.hash:
        return trace
    return _said(
        trace,
        f"routing of {meta.model}, of another shape",
        shape=asdict(shape),
        shape_hash=shape.hash,
        scoring=shape.scoring,
        weights_hash="none",
        tokenizer_hash="none",
    )


def acceptance(trace: Trace) -> tuple[float, ...]:
    """Per place in recorded verify windows: the share of drafts kept among those whose predecessors were kept.

    Places that no window has reached take the share of the one before; UsageError if there are no windows.
    """
    windows = _windows(trace)
    longest = max((last - first for first, last in windows), default=1)
    if longest < 2:
        raise UsageError("trace: holds no verify windows to take acceptance from")
    found = [0.0]
    for place in range(1, longest):
        offered = [first for first, last in windows if last - first > place and trace.accepted[first + place - 1]]
        found.append(float(trace.accepted[np.array(offered) + place].mean()) if offered else found[-1])
    return tuple(found[1:])


def _windows(trace: Trace) -> list[tuple[int, int]]:
    starts = trace.step_starts().tolist()
    return [(first, last) for first, last in pairwise(starts) if trace.phase[first] == DRAFT_VERIFY]


EVENLY = (5**0.5 - 1) / 2
"""Multiples of it, without their whole parts, fill 0 to 1 evenly however many there are (Weyl)."""


def with_windows(
    trace: Trace, kind: str, gamma: int, kept: Sequence[float], seed: int = 0, model: str | None = None
) -> Trace:
    """A recording of plain decode as verify steps of up to gamma + 1 tokens, for drafts of `kind` (by `model`).

    A window is made of tokens that follow each other in the recording; the draft at place i of it is kept with
    probability `kept[i]` (the last one for places beyond) if those before it were, in windows that follow each other
    as evenly as can be, so that a few of them are like many. A rejected draft is taken to route as the token that came
    in its place. UsageError if there are windows already or a number is out of range.
    """
    if gamma < 1 or not kept or not all(0 <= share <= 1 for share in kept):
        raise UsageError(f"verify windows: gamma {gamma} must be at least 1, and acceptance {tuple(kept)} 0 to 1")
    if (trace.phase == DRAFT_VERIFY).any():
        raise UsageError("trace: holds verify windows already: others are made of plain decode")
    chance, survive = np.random.default_rng(seed).random(), np.cumprod([*kept, *[kept[-1]] * gamma][:gamma])
    rows: list[NDArray[np.intp]] = []
    accepted: list[NDArray[np.bool_]] = []
    for first, last in pairwise([*_texts(trace), trace.rows]):
        mine = np.arange(first, last)
        prompt = mine[trace.phase[mine] == PREFILL]
        for step in np.split(prompt, np.flatnonzero(np.diff(trace.step[prompt])) + 1):
            rows.append(step)
            accepted.append(np.ones(len(step), np.bool_))
        text, at = mine[trace.phase[mine] != PREFILL], 0
        while at < len(text):
            window = text[at : at + gamma + 1]
            emitted = 1 + int((survive[: len(window) - 1] > chance).sum())
            chance = (chance + EVENLY) % 1.0
            rows.append(window)
            accepted.append(np.arange(len(window)) < emitted)
            at += emitted
    sampling = {
        **trace.meta.sampling,
        "draft": kind,
        "gamma": gamma,
        **({} if model is None else {"draft_model": model}),
    }
    found = trace.take(np.concatenate(rows))
    found = replace(
        found,
        step=np.repeat(np.arange(len(rows), dtype=np.int32), [len(part) for part in rows]),
        phase=np.where(found.phase == PREFILL, PREFILL, DRAFT_VERIFY).astype(np.int8),
        accepted=np.concatenate(accepted),
    )
    return _said(found, "verify windows made up of consecutive tokens", sampling=sampling)


def cut_windows(trace: Trace, gamma: int) -> Trace:
    """A recording of verify steps as if at most `gamma` tokens had been drafted in each; as it is if none has more.

    Where more drafts than that were kept, the next step begins behind them and drafts what is left of them, as a draft
    that goes by the text would again; beyond, nothing is known, so such steps are shorter. UsageError for plain decode.
    """
    if gamma < 1 or not (trace.phase == DRAFT_VERIFY).any():
        raise UsageError(f"verify windows: gamma {gamma} must be at least 1, and the trace must hold windows")
    if gamma >= int(trace.meta.sampling.get("gamma", 0)):
        return trace
    rows: list[NDArray[np.intp]] = []
    accepted: list[NDArray[np.bool_]] = []
    for first, last in pairwise(trace.step_starts().tolist()):
        at, end = first, first + int(trace.accepted[first:last].sum())  # of what was kept
        cut = gamma + 1 if trace.phase[first] == DRAFT_VERIFY else last - first
        while at < end:
            window = np.arange(at, min(at + cut, last))
            rows.append(window)
            accepted.append(window < end)
            at += int(accepted[-1].sum())
    found = trace.take(np.concatenate(rows))
    found = replace(
        found,
        step=np.repeat(np.arange(len(rows), dtype=np.int32), [len(part) for part in rows]),
        accepted=np.concatenate(accepted),
    )
    return _said(found, f"verify windows cut to {gamma} drafts", sampling={**trace.meta.sampling, "gamma": gamma})


def without_windows(trace: Trace) -> Trace:
    """The same text decoded token by token: rejected drafts are left out."""
    if not (trace.phase == DRAFT_VERIFY).any():
        return trace
    kept = trace.take(np.flatnonzero(trace.accepted))
    alone = kept.phase != PREFILL
    begins = np.concatenate([[True], (np.diff(kept.step) != 0) | alone[1:]])
    sampling = {
        key: value for key, value in trace.meta.sampling.items() if key not in ("draft", "gamma", "draft_model")
    }
    plain = replace(
        kept, step=(np.cumsum(begins) - 1).astype(np.int32), phase=np.where(alone, DECODE, PREFILL).astype(np.int8)
    )
    return _said(plain, "", sampling=sampling)


def _texts(trace: Trace) -> list[int]:
    """The first row of each request."""
    return [0, *(np.flatnonzero(np.diff(trace.request)) + 1).tolist()]


def renamed(trace: Trace, names: Mapping[str, str]) -> Trace:
    """Predictions of the predictors `names` alone, under the names they are given there."""
    kept = {(names[name], depth): table for (name, depth), table in trace.predictions.items() if name in names}
    shown = ", ".join(f"{old} as {new}" for old, new in names.items() if old != new)
    return _with_predictions(trace, kept, f"predictions of {shown}" if shown else "")


def better_of(trace: Trace, names: Sequence[str], as_name: str, rows: slice) -> Trace:
    """With predictions one layer ahead that are, per layer, those of the one of `names` that recalls most in `rows`."""
    tables = [trace.predictions[name, 1] for name in names]
    recall = [[_recall(trace, table, rows, at) for at in range(trace.meta.moe_layers)] for table in tables]
    best = np.argmax(recall, axis=0)
    width = min(table.shape[2] for table in tables)
    chosen = np.stack([tables[which][:, at, :width] for at, which in enumerate(best.tolist())], axis=1)
    return _with_predictions(trace, {**trace.predictions, (as_name, 1): chosen}, "")


def as_deep(trace: Trace, name: str, depth: int) -> Trace:
    """With predictions of `name` at `depth`: those one layer ahead, as if they had been made that much earlier."""
    table = trace.predictions[name, 1].copy()
    table[:, :depth] = -1
    return _with_predictions(
        trace, {**trace.predictions, (name, depth): table}, f"predictions of {name} no worse {depth} layers ahead"
    )


def _recall(trace: Trace, table: NDArray[np.int16], rows: slice, at: int) -> float:
    true, guessed = trace.experts[rows, at], table[rows, at, : trace.meta.top_k]
    return float((true[:, :, None] == guessed[:, None, :]).any(axis=2).mean())


def _with_predictions(trace: Trace, tables: Mapping[tuple[str, int], NDArray[np.int16]], said: str) -> Trace:
    columns = tuple(PredictionColumn(predictor=n, depth=d, width=table.shape[2]) for (n, d), table in tables.items())
    return _said(replace(trace, predictions=tables), said, predictions=columns)


def executing(trace: Trace, predictor: str, layers: Sequence[int]) -> Trace:
    """As if decode had executed what `predictor` says a layer ahead of `layers`; later routing is taken not to drift.

    MismatchError if the recording lacks those predictions.
    """
    table, k = trace.predictions.get((predictor, 1)), trace.meta.top_k
    decode = trace.phase != PREFILL
    if table is None or table.shape[2] < k or (table[decode][:, list(layers), :k] < 0).any():
        raise MismatchError(f"trace: lacks the predictions of {predictor} that speculated layers execute")
    experts = trace.experts.copy()
    for layer in layers:
        experts[decode, layer] = table[decode, layer, :k]
    said = f"predictions of {predictor} executed"
    return _said(replace(trace, experts=experts), said, speculated=tuple(layers), speculated_by=predictor)


def _said(trace: Trace, said: str, **fields: Any) -> Trace:
    """With other metadata, and what is assumed added to the source."""
    source = f"{trace.meta.source}; assumed: {said}" if said else trace.meta.source
    return replace(trace, meta=trace.meta.model_copy(update={"source": source, **fields}))
