"""Policy state: plain arrays in one named tuple, so that compiled functions take it whole.

L = MoE layers, E = experts per layer, S = slots of the device pool. An expert's `key` is layer * E + expert.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ABSENT, QUEUED, IN_FLIGHT, LANDED, KEPT = 0, 1, 2, 3, 4
"""Status of an expert: not on the device, copy queued, copy issued, in a staging slot, in a persistent slot."""

DEMAND, PREFETCH, UPLOAD, DISCARD = 0, 1, 2, 3
"""Why a copy was made, in queue priority. DISCARD: a copy in flight that nobody wants any more."""

N_FREE, N_QUEUED, N_IN_FLIGHT, SEQUENCE, STEP, N_DEMAND_HELD, N_UNFILLED = 0, 1, 2, 3, 4, 5, 6
"""Indices into `scalars`. DEMAND_HELD: staging slots the running layer-step's demand holds and will give back.
UNFILLED: persistent slots no expert occupies yet."""

HITS, LATE, MISSES, FETCHED, ON_CPU, PREFETCHED, WASTED, CANCELLED, UPLOADED = 0, 1, 2, 3, 4, 5, 6, 7, 8
N_COUNTERS = 9
"""Indices into `counters`, in experts. HITS + LATE + MISSES = demand; PREFETCHED and UPLOADED count issued copies;
WASTED counts issued prefetches nobody demanded; CANCELLED counts copies taken back while queued."""

DECODE, PREFILL = 0, 1


class PolicyState(NamedTuple):
    """All a decision may look at."""

    status: NDArray[np.int8]  # [L, E]
    purpose: NDArray[np.int8]  # [L, E]
    slot: NDArray[np.int32]  # [L, E], -1 without one
    last_step: NDArray[np.int64]  # [L, E], -1 if never demanded
    last_tokens: NDArray[np.int32]  # [L, E] tokens in that step
    uses: NDArray[np.int64]  # [L, E] steps that demanded it in this request
    capacity: NDArray[np.int32]  # [L] persistent slots
    kept: NDArray[np.int32]  # [L] persistent slots in use
    free: NDArray[np.int32]  # [S] stack of free slots
    queue: NDArray[np.int32]  # [S] keys of queued copies, unordered
    rank: NDArray[np.int64]  # [S] their ranks; the smallest is issued first
    scalars: NDArray[np.int64]  # [7]
    counters: NDArray[np.int64]  # [2 phases, L, N_COUNTERS]


def new_state(capacity: NDArray[np.int32], experts: int, slots: int) -> PolicyState:
    """Everything absent; `slots` free slots, of which sum(capacity) are persistent."""
    layers = len(capacity)
    scalars = np.zeros(7, np.int64)
    scalars[N_FREE] = slots
    scalars[N_UNFILLED] = int(capacity.sum())
    return PolicyState(
        status=np.zeros((layers, experts), np.int8),
        purpose=np.zeros((layers, experts), np.int8),
        slot=np.full((layers, experts), -1, np.int32),
        last_step=np.full((layers, experts), -1, np.int64),
        last_tokens=np.zeros((layers, experts), np.int32),
        uses=np.zeros((layers, experts), np.int64),
        capacity=capacity.astype(np.int32),
        kept=np.zeros(layers, np.int32),
        free=np.arange(slots - 1, -1, -1, dtype=np.int32),
        queue=np.zeros(slots, np.int32),
        rank=np.zeros(slots, np.int64),
        scalars=scalars,
        counters=np.zeros((2, layers, N_COUNTERS), np.int64),
    )
