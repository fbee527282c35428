"""A step over several positions as the brain sees it: distinct experts with their tokens, and merged predictions."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Demand(NamedTuple):
    """The demand of one layer-step over n tokens of k experts each."""

    experts: NDArray[np.int32]  # [d] distinct, ascending
    counts: NDArray[np.int32]  # [d] tokens routed to each
    places: NDArray[np.int64]  # [n k] token * k + rank, those of the first expert first, each expert's ascending

    def starts(self) -> list[int]:
        """Where each expert's part of `places` begins, and the end of the last, [d + 1]."""
        return [0, *np.cumsum(self.counts).tolist()]


def demand_of(routed: NDArray[np.integer]) -> Demand:
    """The demand of routed [n, k], the experts of each token in rank order, distinct within a token."""
    flat = routed.reshape(-1)
    places = np.argsort(flat, kind="stable")
    ordered = flat[places].astype(np.int32)
    if len(routed) == 1:
        return Demand(ordered, np.ones(len(flat), np.int32), places)
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    counts = np.diff(starts, append=len(ordered)).astype(np.int32)
    return Demand(ordered[starts], counts, places)


def merge_predictions(predicted: NDArray[np.integer]) -> NDArray[np.int32]:
    """One list of the distinct experts predicted for a layer by n tokens, best first; predicted [n, width], -1: none.

    Ordered by (tokens that predict it, best rank, -id), so that a single token's list stays as it is.
    """
    flat = predicted.reshape(-1)
    if len(predicted) == 1:
        return flat[flat >= 0].astype(np.int32)
    ranks = np.tile(np.arange(predicted.shape[1]), len(predicted))
    known = flat >= 0
    experts, inverse, votes = np.unique(flat[known], return_inverse=True, return_counts=True)
    best = np.full(len(experts), predicted.shape[1])
    np.minimum.at(best, inverse, ranks[known])
    merged: NDArray[np.int32] = experts[np.lexsort((experts, best, -votes))].astype(np.int32)
    return merged
