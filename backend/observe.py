"""What a forward tells those who watch it: routing for the recorder, spans for the timeline."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from foreload.backend.predict import Predictor


@dataclass(frozen=True)
class Routed:
    """Routing of one forward over n positions of one request."""

    phase: int  # of `traces.schema`
    position: int  # of the first row
    kept: int  # rows that stay; the others are rejected drafts
    token_ids: NDArray[np.int32]  # [n]
    experts: NDArray[np.int16]  # [n, MoE layers, k] in rank order
    weights: NDArray[np.float16]  # [n, MoE layers, k]
    predicted: dict[tuple[str, int], NDArray[np.int16]]  # (predictor, depth) -> [n, MoE layers, width], -1 = none


class Observer(Protocol):
    """Receives every forward's routing; decode forwards also carry these predictions."""

    width: int
    predictors: Sequence[tuple[Predictor, tuple[int, ...]]]  # each with the depths wanted of it

    def routed(self, routed: Routed) -> None:
        """One forward is done."""


class RouteLog:
    """Collects one forward's routing layer by layer for an observer."""

    def __init__(self, observer: Observer, tokens: int, layers: int, top_k: int) -> None:
        self._observer = observer
        self.experts = np.zeros((tokens, layers, top_k), np.int16)
        self.weights = np.zeros((tokens, layers, top_k), np.float16)
        self.width, self.predictors = observer.width, observer.predictors
        self.predicted = {
            (predictor.key, depth): np.full((tokens, layers, observer.width), -1, np.int16)
            for predictor, depths in observer.predictors
            for depth in depths
        }

    def close(self, phase: int, position: int, token_ids: list[int], kept: int) -> None:
        """Hand the forward over."""
        ids = np.asarray(token_ids, np.int32)
        self._observer.routed(Routed(phase, position, kept, ids, self.experts, self.weights, self.predicted))


class Marks:
    """Consecutive spans of the decoding thread: `mark(kind)` ends the span begun by the mark before it."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int, int, int]] = []  # kind, layer, expert, begun, done (perf_counter ns)
        self.since_ns = time.perf_counter_ns()

    def start(self) -> None:
        """Begin a span here, without recording the time since the last mark."""
        self.since_ns = time.perf_counter_ns()

    def mark(self, kind: str, layer: int = -1, expert: int = -1) -> None:
        """Record the span since the last mark."""
        now = time.perf_counter_ns()
        self.spans.append((kind, layer, expert, self.since_ns, now))
        self.since_ns = now

    def add(self, kind: str, layer: int, begun: int, done: int) -> None:
        """Record a span that was measured elsewhere; the next one begins behind it."""
        self.spans.append((kind, layer, -1, begun, done))
        self.since_ns = done


class NoMarks(Marks):
    """Records nothing."""

    def start(self) -> None:
        """Nothing."""

    def mark(self, kind: str, layer: int = -1, expert: int = -1) -> None:
        """Nothing."""

    def add(self, kind: str, layer: int, begun: int, done: int) -> None:
        """Nothing."""
