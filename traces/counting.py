"""Compiled counts over the rows of one piece of a recording. R rows, L layers, k experts per row, E experts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.compiled import plain


@plain
def count_load(experts: NDArray[np.int16], load: NDArray[np.int64]) -> None:
    """Add the uses of each expert of [R, L, k] to load [L, E]."""
    for row in range(experts.shape[0]):
        for layer in range(experts.shape[1]):
            for i in range(experts.shape[2]):
                load[layer, experts[row, layer, i]] += 1


@plain
def count_gaps(
    experts: NDArray[np.int16],
    position: NDArray[np.int64],
    fresh: NDArray[np.bool_],
    last: NDArray[np.int64],
    gaps: NDArray[np.int64],
) -> None:
    """Add to gaps [L, G + 1] how many tokens lie between a use and the one before, G standing for G and more.

    gaps[:, 0] are first uses in a request, 1 is use by two tokens in a row. last [L, E] is the position of each
    expert's last use, -1 if none, and is carried from piece to piece; `fresh` [R] forgets it.
    """
    longest = gaps.shape[1] - 1
    for row in range(experts.shape[0]):
        if fresh[row]:
            last[:] = -1
        for layer in range(experts.shape[1]):
            for i in range(experts.shape[2]):
                expert = experts[row, layer, i]
                gap = 0
                if last[layer, expert] >= 0:
                    gap = min(max(1, position[row] - last[layer, expert]), longest)
                gaps[layer, gap] += 1
                last[layer, expert] = position[row]


@plain
def count_recall(
    experts: NDArray[np.int16],
    predicted: NDArray[np.int16],
    weights: NDArray[np.float32],
    found: NDArray[np.int64],
    weight: NDArray[Any],
) -> None:
    """Add to found [L, 3] the experts demanded, among the first k predicted, and among the first 2k.

    predicted [R, L, width], best first; a row whose first is -1 has none and is left out. weights [R, L, k], or empty:
    their sum over all demanded and over those among the first k is added to weight [L, 2].
    """
    k, width = experts.shape[2], predicted.shape[2]
    for row in range(experts.shape[0]):
        for layer in range(experts.shape[1]):
            if predicted[row, layer, 0] < 0:
                continue
            for i in range(k):
                rank = width + 2 * k
                for at in range(min(width, 2 * k)):
                    if predicted[row, layer, at] == experts[row, layer, i]:
                        rank = at
                found[layer, 0] += 1
                found[layer, 1] += rank < k
                found[layer, 2] += rank < 2 * k
                if len(weights):
                    weight[layer, 0] += weights[row, layer, i]
                    weight[layer, 1] += weights[row, layer, i] if rank < k else 0.0
