"""The run with perfect predictions: the same policy, told the truth. No bound: wrong guesses can help by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from foreload.settings import GATE_SIDE, Settings
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel
from foreload.simulator.result import SimResult
from foreload.traces.schema import Trace


def truthful(settings: Settings) -> Settings:
    """`settings` as they are run with the truth: their own depth and predictor, or one layer ahead by the gate.

    Layers that execute predictions do not differ then from those that route.
    """
    if settings.predictor in GATE_SIDE:
        return settings.changed(speculate_layers=(), prefetch_rolled=False)
    return settings.changed(predictor="gate", prefetch_depth=1)


def with_the_truth(trace: Trace, settings: Settings) -> Trace:
    """The recording with the executed experts as predictions of the predictor of `settings`, at each of its depths."""
    k, wide = trace.meta.top_k, max(trace.meta.top_k, settings.prefetch_width or 0)
    found = dict(trace.predictions)
    for depth in range(1, settings.prefetch_depth + 1):
        table = np.full((*trace.experts.shape[:2], wide), -1, np.int16)
        table[:, depth:, :k] = trace.experts[:, depth:]
        found[settings.predictor, depth] = table
    return replace(trace, predictions=found)


def perfect(
    trace: Trace,
    costs: CostModel,
    settings: Settings,
    capacity: tuple[int, ...],
    requests: Sequence[int] | None = None,
    warm: NDArray[np.int64] | None = None,
) -> SimResult:
    """What `settings` would do if every prediction were right; arguments and errors as for `simulate`."""
    told = truthful(settings)
    return simulate(with_the_truth(trace, told), costs, costs.shape, told, capacity, requests, warm=warm)
