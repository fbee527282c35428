"""Policy state: plain arrays in one named tuple, so that compiled functions take it whole.

L = MoE layers, E = experts per layer, S = slots of the device pool. An expert's `key` is layer * E + expert.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ABSENT, QUEUED, IN_FLIGHT, LANDED, KEPT = 0, 1, 2, 3, 4
"""Status of an expert: not on the device, copy queued, copy issued, in a slot but not a resident yet, resident."""

DEMAND, PREFETCH, UPLOAD, DISCARD, AHEAD = 0, 1, 2, 3, 4
"""Why a copy was made. Queue priority is that order, AHEAD with PREFETCH. DISCARD: a copy in flight that nobody wants
any more. AHEAD: a prefetch for the layer's next step; it holds a persistent slot from the moment it is queued."""

N_FREE, N_QUEUED, N_IN_FLIGHT, SEQUENCE, STEP, N_DEMAND_HELD, N_UNFILLED, LAYER, N_AHEAD = 0, 1, 2, 3, 4, 5, 6, 7, 8
N_UPLOADS, N_SERVED, READ, N_SCALARS = 9, 10, 11, 12
"""Indices into `scalars`. DEMAND_HELD: staging slots the running layer-step's demand holds and will give back.
UNFILLED: persistent slots no expert occupies yet. LAYER: the computing layer, the first between two steps. N_AHEAD:
prefetches queued since the last demand: about what the next one queues. N_UPLOADS, N_SERVED: entries of `uploads` and
`served`. READ: key of the expert that the CPU reads ahead, -1: none."""

HITS, LATE, MISSES, FETCHED, ON_CPU, PREFETCHED, WASTED, CANCELLED, UPLOADED = 0, 1, 2, 3, 4, 5, 6, 7, 8
N_COUNTERS = 9
"""Indices into `counters`, in experts. HITS + LATE + MISSES = demand; PREFETCHED and UPLOADED count issued copies;
WASTED counts issued prefetches their layer-step did not demand; CANCELLED counts copies taken back while queued."""

DECODE, PREFILL, WARM = 0, 1, 2
"""Phases copies are counted in. WARM: what a warm start loads before the first request."""

NEVER = 1 << 40
"""Steps to something that never happens, or since something that never did."""

WORST_UNKNOWN = -2


class PolicyState(NamedTuple):
    """All a decision may look at."""

    status: NDArray[np.int8]  # [L, E]
    purpose: NDArray[np.int8]  # [L, E]
    slot: NDArray[np.int32]  # [L, E], -1 without one
    last_step: NDArray[np.int64]  # [L, E], -1 if never demanded
    last_tokens: NDArray[np.int32]  # [L, E] tokens in that step
    uses: NDArray[np.int64]  # [L, E] steps that demanded it in this request
    weight: NDArray[np.int64]  # [L, E] uses that fade, as at its last one, where eviction is `aged`
    before: NDArray[np.int32]  # [L, E] tokens in the layer-step before the running one
    score: NDArray[np.int32]  # [L, E] utility s, 0..K
    theta_up: NDArray[np.float64]  # [L, E] boundary a rise must reach
    theta_down: NDArray[np.float64]  # [L, E] boundary a fall must reach
    warm: NDArray[np.int64]  # [L, E] count in the warm-start recording
    next_use: NDArray[np.int64]  # [L, E] step that demands it next, where an oracle says so; else NEVER
    prompt: NDArray[np.int32]  # [L, E] tokens in the running prompt's last chunk, -1 where it has not been
    asked: NDArray[np.int32]  # [L, E] tokens in the running prompt's chunks so far
    begun: NDArray[np.int64]  # [L] step of the layer's last layer-step, -1 before the first
    tau: NDArray[np.int32]  # [L] threshold of the layer's last split by utility, 0 before the first
    credit: NDArray[np.int64]  # [L] idle link nanoseconds the layer has not used yet
    worst: NDArray[np.int32]  # [L] resident that goes first, -1: none, WORST_UNKNOWN: to be found
    capacity: NDArray[np.int32]  # [L] persistent slots; a shared pool has their sum
    kept: NDArray[np.int32]  # [L] persistent slots in use
    free: NDArray[np.int32]  # [S] stack of free slots
    queue: NDArray[np.int32]  # [S] keys of queued copies, unordered
    rank: NDArray[np.int64]  # [S] their ranks; the smallest is issued first
    uploads: NDArray[np.int32]  # [S] keys of background uploads that are not residents yet, and of some taken back
    served: NDArray[np.int32]  # [E] keys of what the CPU computed in the last layer-step, where uploads are made
    scalars: NDArray[np.int64]  # [N_SCALARS]
    counters: NDArray[np.int64]  # [3 phases, L, N_COUNTERS]
    scratch: NDArray[np.int32]  # [3, E] of the function that runs: nothing is kept in it


HISTORY = (
    "last_step", "last_tokens", "uses", "weight", "before", "score", "theta_up", "theta_down", "warm", "next_use",
    "prompt", "asked", "begun", "tau", "credit", "counters",
)  # fmt: skip
"""Fields that outlive new settings."""


def new_state(
    capacity: NDArray[np.int32], experts: int, slots: int, theta_up: float = 0.5, theta_down: float = 0.5
) -> PolicyState:
    """Everything absent; `slots` free slots, of which sum(capacity) are persistent; boundaries as given."""
    layers = len(capacity)
    of_expert = (layers, experts)
    scalars = np.zeros(N_SCALARS, np.int64)
    scalars[N_FREE] = slots
    scalars[N_UNFILLED] = int(capacity.sum())
    scalars[READ] = -1
    return PolicyState(
        status=np.zeros(of_expert, np.int8),
        purpose=np.zeros(of_expert, np.int8),
        slot=np.full(of_expert, -1, np.int32),
        last_step=np.full(of_expert, -1, np.int64),
        last_tokens=np.zeros(of_expert, np.int32),
        uses=np.zeros(of_expert, np.int64),
        weight=np.zeros(of_expert, np.int64),
        before=np.zeros(of_expert, np.int32),
        score=np.zeros(of_expert, np.int32),
        theta_up=np.full(of_expert, theta_up),
        theta_down=np.full(of_expert, theta_down),
        warm=np.zeros(of_expert, np.int64),
        next_use=np.full(of_expert, NEVER, np.int64),
        prompt=np.full(of_expert, -1, np.int32),
        asked=np.zeros(of_expert, np.int32),
        begun=np.full(layers, -1, np.int64),
        tau=np.zeros(layers, np.int32),
        credit=np.zeros(layers, np.int64),
        worst=np.full(layers, WORST_UNKNOWN, np.int32),
        capacity=capacity.astype(np.int32),
        kept=np.zeros(layers, np.int32),
        free=np.arange(slots - 1, -1, -1, dtype=np.int32),
        queue=np.zeros(slots, np.int32),
        rank=np.zeros(slots, np.int64),
        uploads=np.zeros(slots, np.int32),
        served=np.zeros(experts, np.int32),
        scalars=scalars,
        counters=np.zeros((3, layers, N_COUNTERS), np.int64),
        scratch=np.zeros((3, experts), np.int32),
    )
