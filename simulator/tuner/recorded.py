"""What all recordings hold that settings can use and the profile can cost: predictors, by recall, and drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreload.settings import GATE_SIDE, MAX_PREFETCH_DEPTH, Draft, Settings
from foreload.simulator.costs import CostModel, predict_probe
from foreload.simulator.workload import recorded_draft
from foreload.traces.schema import PREFILL, Trace

Look = tuple[str, bool]
"""A predictor, and whether it is rolled."""
RECALL_ROWS = 512
"""Decode rows of a recording by which predictors are compared."""


def prediction_name(look: Look, depth: int) -> str:
    """The name of its predictions at `depth` in recordings."""
    name, rolled = look
    fields = {"predictor": name, "prefetch_depth": max(2, depth) if rolled else depth, "prefetch_rolled": rolled}
    return Settings.parse(fields).prediction(depth)


def looks(traces: Sequence[Trace], costs: CostModel) -> dict[int, tuple[Look, ...]]:
    """Per depth the looks whose predictions are all there and costed, most recall first."""
    found: dict[int, tuple[Look, ...]] = {}
    for depth in range(1, MAX_PREFETCH_DEPTH + 1):
        every = [(name, rolled) for name in GATE_SIDE for rolled in ((False, True) if depth > 1 else (False,))]
        known = [look for look in every if _usable(traces, costs, look, depth)]
        if known:
            recall = {look: _recall(traces, look, depth) for look in known}
            found[depth] = tuple(sorted(known, key=lambda look: -recall[look]))
    return found


def _usable(traces: Sequence[Trace], costs: CostModel, look: Look, depth: int) -> bool:
    names = [(prediction_name(look, at), at) for at in range(1, depth + 1)]
    held = all(name in trace.predictions for trace in traces for name in names)
    return held and costs.measured(predict_probe(names[-1][0]))


def _recall(traces: Sequence[Trace], look: Look, depth: int) -> float:
    """Share of the experts of the first decode rows that are among the first k predicted, mean of the recordings."""
    shares = []
    for trace in traces:
        rows = np.flatnonzero(trace.phase != PREFILL)[:RECALL_ROWS]
        predicted = trace.predictions[prediction_name(look, depth), depth]
        experts, guesses = trace.experts[rows, depth:], predicted[rows, depth:, : trace.meta.top_k]
        shares.append(_share(experts, guesses) if len(rows) else 0.0)
    return float(np.mean(shares))


def _share(experts: NDArray[np.int16], guesses: NDArray[np.int16]) -> float:
    return float((experts[..., None] == guesses[:, :, None]).any(-1).mean())


def widest(traces: Sequence[Trace], found: dict[int, tuple[Look, ...]]) -> int:
    """How many experts every prediction of `found` names at least; 0 without any."""
    tables = [
        trace.predictions[prediction_name(look, at), at].shape[2]
        for trace in traces
        for depth, known in found.items()
        for look in known
        for at in range(1, depth + 1)
    ]
    return min(tables, default=0)


def usable_draft(traces: Sequence[Trace], costs: CostModel) -> Draft | None:
    """The draft whose windows all recordings hold, if the profile can cost it."""
    drafts = {_draft(trace) for trace in traces}
    draft = drafts.pop()
    if drafts or draft is None or not costs.has_windows(draft.kind):
        return None
    return draft if draft.kind != "model" or draft.model == costs.profile.meta.draft_model else None


def _draft(trace: Trace) -> Draft | None:
    recorded = recorded_draft(trace)
    if recorded is None:
        return None
    draft = Draft.model_validate({"kind": recorded[0], "gamma": recorded[1]})
    model = trace.meta.sampling.get("draft_model") or draft.model_name
    return draft if draft.kind != "model" else draft.model_copy(update={"model": model})
