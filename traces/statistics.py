"""Statistics of a recording, gathered piece by piece: memory does not grow with its length.

A token is a row that is neither prompt nor rejected draft. What is shown is a `Statistics` value: DataFrames whose
columns are listed there.

    with TraceReader(path) as reader:
        found = analyze(reader)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from foreload.traces.counting import count_gaps, count_load, count_recall
from foreload.traces.io import TraceReader
from foreload.traces.schema import PREFILL, Trace, TraceMeta

LONGEST_GAP = 4096
MIN_WINDOW, MAX_WINDOWS = 128, 64
MAX_SUBJECTS = 24
"""Subjects (or, where none are named, requests) told apart; those that begin later are left out of drift."""


@dataclass(frozen=True)
class Statistics:
    """What a recording says. Shares are of expert uses; NaN is `not known` (no pair of tokens, no second subject).

    layers: one row per MoE layer: layer (the model's number), unused (experts), top_share (of the busiest expert),
        busiest_eighth (share of the busiest eighth of the experts), entropy_bits (of the load), effective_experts
        (2 ** entropy), next_token_overlap (experts of a token that the next one needs again), reuse_p50 and reuse_p90
        (tokens between two uses of an expert within a request; LONGEST_GAP and more count as that), first_uses (share
        of uses that are an expert's first in its request), subject_cosine (load of two subjects, mean over pairs),
        window_cosine (load of a window and of the next one, mean).
    overall: the mean over layers of the same columns; quantiles are those of all uses together.
    predictions: predictor, depth, layer, tokens (with a prediction), recall (at k), weighted_recall (share of router
        weight; NaN without weights), recall_2k (NaN if recorded narrower).
    subjects: a, b, cosine of their load, mean over layers. windows: first_token, tokens, to_previous, to_first.
    """

    meta: TraceMeta
    rows: int
    tokens: int
    requests: int
    window_tokens: int
    layers: pd.DataFrame
    overall: dict[str, float]
    predictions: pd.DataFrame
    subjects: pd.DataFrame
    windows: pd.DataFrame

    def recall(self) -> pd.DataFrame:
        """Per predictor and depth: recall, weighted_recall and recall_2k, mean over its layers."""
        kept = self.predictions.drop(columns=["layer", "tokens"])
        return kept.groupby(["predictor", "depth"], as_index=False, sort=False).mean()


def analyze(reader: TraceReader) -> Statistics:
    """Statistics of the whole recording; FileError where a value in it is wrong."""
    gathered = Gatherer(reader.meta, reader.rows)
    for group in reader.groups():
        gathered.add(group)
    return gathered.statistics()


class Gatherer:
    """Counts, of pieces added in recorded order."""

    def __init__(self, meta: TraceMeta, rows: int) -> None:
        """`rows` of the whole recording, which set the length of the windows drift is looked at in."""
        L, E = meta.moe_layers, meta.experts
        self.meta = meta
        self.window_tokens = max(MIN_WINDOW, -(-rows // MAX_WINDOWS))
        self._load = np.zeros((L, E), np.int64)
        self._last = np.full((L, E), -1, np.int64)
        self._gaps = np.zeros((L, LONGEST_GAP + 1), np.int64)
        self._rows, self._tokens, self._pairs = 0, 0, 0
        self._before: tuple[int, int] = (-1, -1)  # request and position of the token before
        self._requests: set[int] = set()
        self._subjects: dict[str, NDArray[np.int64]] = {}
        self._windows: list[tuple[int, NDArray[np.float64], NDArray[np.float64]]] = []
        self._window = np.zeros((L, E), np.int64)
        self._first: NDArray[np.int64] | None = None
        self._previous = self._window
        self._found = {(p.predictor, p.depth): np.zeros((L, 3), np.int64) for p in meta.predictions}
        self._weight = {key: np.zeros((L, 2)) for key in self._found}

    def add(self, group: Trace) -> None:
        """The next rows."""
        self._rows += group.rows
        self._requests.update(np.unique(group.request).tolist())
        rows = np.flatnonzero((group.phase != PREFILL) & group.accepted)
        if not len(rows):
            return
        tokens = group.take(rows)
        experts = np.ascontiguousarray(tokens.experts)
        count_load(experts, self._load)
        self._add_gaps(tokens, experts)
        self._add_subjects(tokens.request, experts)
        self._add_windows(experts)
        weights = np.zeros((0, 1, 1), np.float32) if tokens.weights is None else tokens.weights.astype(np.float32)
        for key, predicted in tokens.predictions.items():
            count_recall(experts, np.ascontiguousarray(predicted), weights, self._found[key], self._weight[key])
        self._tokens += tokens.rows

    def _add_gaps(self, tokens: Trace, experts: NDArray[np.int16]) -> None:
        request = np.concatenate([[self._before[0]], tokens.request])
        position = np.concatenate([[self._before[1]], tokens.position]).astype(np.int64)
        fresh = request[1:] != request[:-1]
        self._pairs += int((~fresh & (position[1:] == position[:-1] + 1)).sum())
        count_gaps(experts, position[1:], fresh, self._last, self._gaps)
        self._before = (int(request[-1]), int(position[-1]))

    def _add_subjects(self, request: NDArray[np.int32], experts: NDArray[np.int16]) -> None:
        names = self.meta.subjects
        order = list(dict.fromkeys(request.tolist()))
        for number in order:
            name = names[number] if number < len(names) else f"request {number}"
            if name not in self._subjects and len(self._subjects) == MAX_SUBJECTS:
                continue
            load = self._subjects.setdefault(name, np.zeros_like(self._load))
            count_load(experts[request == number], load)

    def _add_windows(self, experts: NDArray[np.int16]) -> None:
        at = 0
        while at < len(experts):
            room = self.window_tokens - (self._tokens + at) % self.window_tokens
            part = experts[at : at + room]
            count_load(part, self._window)
            at += len(part)
            if len(part) == room:
                self._close_window(self._tokens + at - self.window_tokens)

    def _close_window(self, first_token: int) -> None:
        if self._first is None:
            self._first = self._previous = self._window
        else:
            self._windows.append(
                (first_token, _cosine(self._window, self._previous), _cosine(self._window, self._first))
            )
        self._previous, self._window = self._window, np.zeros_like(self._load)

    def statistics(self) -> Statistics:
        """Of everything added."""
        names = list(self._subjects)
        pairs = [(a, b) for at, a in enumerate(names) for b in names[at + 1 :]]
        between = [_cosine(self._subjects[a], self._subjects[b]) for a, b in pairs]
        layers = self._layer_table(between)
        overall = {name: _mean(layers[name].to_numpy(float)) for name in layers.columns if name != "layer"}
        gaps = self._gaps[:, 1:].sum(axis=0)
        overall |= {"reuse_p50": _quantile(gaps, 0.5), "reuse_p90": _quantile(gaps, 0.9)}
        return Statistics(
            meta=self.meta,
            rows=self._rows,
            tokens=self._tokens,
            requests=len(self._requests),
            window_tokens=self.window_tokens,
            layers=layers,
            overall=overall,
            predictions=self._prediction_table(),
            subjects=pd.DataFrame(
                [(a, b, _mean(found)) for (a, b), found in zip(pairs, between, strict=True)],
                columns=["a", "b", "cosine"],
            ),
            windows=pd.DataFrame(
                [(first, self.window_tokens, _mean(near), _mean(far)) for first, near, far in self._windows],
                columns=["first_token", "tokens", "to_previous", "to_first"],
            ),
        )

    def _layer_table(self, between: list[NDArray[np.float64]]) -> pd.DataFrame:
        layers, experts = self._load.shape
        total = np.maximum(self._load.sum(axis=1), 1)
        share = np.sort(self._load / total[:, None], axis=1)[:, ::-1]
        bits = -(share * np.log2(share, where=share > 0, out=np.zeros_like(share))).sum(axis=1)
        unknown = np.full(layers, np.nan)
        k = self.meta.top_k
        near = [window[1] for window in self._windows]
        return pd.DataFrame(
            {
                "layer": list(self.meta.layer_numbers),
                "unused": (self._load == 0).sum(axis=1),
                "top_share": share[:, 0],
                "busiest_eighth": share[:, : max(1, experts // 8)].sum(axis=1),
                "entropy_bits": bits,
                "effective_experts": 2.0**bits,
                "next_token_overlap": self._gaps[:, 1] / (k * self._pairs) if self._pairs else unknown,
                "reuse_p50": [_quantile(row[1:], 0.5) for row in self._gaps],
                "reuse_p90": [_quantile(row[1:], 0.9) for row in self._gaps],
                "first_uses": self._gaps[:, 0] / total,
                "subject_cosine": np.mean(between, axis=0) if between else unknown,
                "window_cosine": np.mean(near, axis=0) if near else unknown,
            }
        )

    def _prediction_table(self) -> pd.DataFrame:
        rows: list[tuple[Any, ...]] = []
        k = self.meta.top_k
        for p in self.meta.predictions:
            found, weight = self._found[p.predictor, p.depth], self._weight[p.predictor, p.depth]
            for index in np.flatnonzero(found[:, 0]):
                uses, at_k, at_2k = found[index].tolist()
                covered = weight[index, 1] / weight[index, 0] if weight[index, 0] else np.nan
                wide = at_2k / uses if p.width >= 2 * k else np.nan
                number = self.meta.layer_numbers[index]
                rows.append((p.predictor, p.depth, number, uses // k, at_k / uses, covered, wide))
        names = ["predictor", "depth", "layer", "tokens", "recall", "weighted_recall", "recall_2k"]
        return pd.DataFrame(rows, columns=names)


def _cosine(a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.float64]:
    """Per layer, [L]."""
    x, y = a.astype(float), b.astype(float)
    size = np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))
    found: NDArray[np.float64] = (x * y).sum(axis=1) / np.maximum(size, 1e-12)
    return found


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def _quantile(counts: NDArray[np.int64], share: float) -> float:
    """The smallest gap (index + 1) that `share` of all are not above; NaN if there are none."""
    total = int(counts.sum())
    if not total:
        return float("nan")
    return float(np.searchsorted(np.cumsum(counts), share * total)) + 1
