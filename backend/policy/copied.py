"""How many bytes went to the device, from the brain's counters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.brain import Counter

COPIES = (Counter.FETCHED, Counter.PREFETCHED, Counter.UPLOADED)


def counted_bytes(counters: NDArray[np.int64], layer_bytes: Sequence[int], chosen: Sequence[Counter]) -> int:
    """Bytes of the experts in the `chosen` counters; arguments as for `copied_bytes`."""
    experts = counters[:, list(chosen)].sum(axis=1)
    return int(experts @ np.asarray(layer_bytes, np.int64))


def copied_bytes(counters: NDArray[np.int64], layer_bytes: Sequence[int]) -> int:
    """Bytes of all copies; counters [MoE layers, len(Counter)], layer_bytes [MoE layers] of one expert each."""
    return counted_bytes(counters, layer_bytes, COPIES)
