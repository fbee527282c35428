"""Warm start: which experts are loaded before the first request."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.order import ONE_USE
from foreload.backend.policy.rules import ADMIT_NONE, POOL_SHARED, Rules
from foreload.backend.policy.state import ABSENT, N_UNFILLED, PolicyState


def steady_weight(counts: NDArray[np.int64], top_k: int, half_life: int) -> NDArray[np.int64]:
    """Fading uses [L, E] (`order.aged`) of experts that go on being demanded as often as in a recording: counts [L, E].

    1 / ln 2 half-lives of uses are there at a time, or as many as the recording has.
    """
    steps = np.maximum(counts.sum(axis=1, keepdims=True) // top_k, 1)
    lasting = max(1, round(half_life / math.log(2)))
    found: NDArray[np.int64] = counts * ONE_USE * np.minimum(lasting, steps) // steps
    return found


def warm_targets(state: PolicyState, rules: Rules, counted: bool) -> NDArray[np.bool_]:
    """Absent experts [L, E] for the persistent slots nobody holds: those a recording demanded most, then lower ids.

    Without counts (`counted`), only what admission `none` leaves no choice about: the layers (or the shared pool) that
    have a slot for every expert.
    """
    absent = state.status == ABSENT
    if not counted and rules.admission != ADMIT_NONE:
        return np.zeros(absent.shape, np.bool_)
    if rules.pool == POOL_SHARED:
        rooms = np.array([state.scalars[N_UNFILLED]])
        groups = absent.reshape(1, -1)
    else:
        rooms, groups = state.capacity - state.kept, absent
    counts = state.warm.reshape(groups.shape)
    target = np.zeros(groups.shape, np.bool_)
    for at, (room, free) in enumerate(zip(rooms, groups, strict=True)):
        if counted or free.sum() <= room:
            order = np.argsort(np.where(free, -counts[at], 1), kind="stable")
            target[at, order[: min(room, free.sum())]] = True
    return target.reshape(state.status.shape)
