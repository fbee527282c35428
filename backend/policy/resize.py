"""New settings between two steps: which residents stay, and which slots they move to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import state
from foreload.backend.policy.copies import evict
from foreload.backend.policy.order import worst_kept
from foreload.backend.policy.rules import POOL_SHARED, Rules
from foreload.backend.policy.state import HISTORY, PolicyState, new_state


def shed(old: PolicyState, rules: Rules, capacity: NDArray[np.int32]) -> None:
    """Evict residents, those that the new rules would evict first, until the new capacity [L] holds the rest."""
    old.worst[:] = state.WORST_UNKNOWN
    if rules.pool == POOL_SHARED:
        for _ in range(int(old.kept.sum()) - int(capacity.sum())):
            evict(old, worst_kept(old, rules, 0))
        return
    for layer, size in enumerate(capacity.tolist()):
        for _ in range(int(old.kept[layer]) - size):
            evict(old, worst_kept(old, rules, layer))


def resized(
    old: PolicyState, rules: Rules, capacity: NDArray[np.int32], slots: int
) -> tuple[PolicyState, list[tuple[int, int]]]:
    """The state with `slots` slots, and the (from, to) slot moves that keep the residents' contents, in order.

    Nothing may be queued, in flight or landed, and the residents must fit (`shed`).
    """
    fresh = new_state(capacity, old.status.shape[1], slots)
    kept = old.status == state.KEPT
    held = set(old.slot[kept].tolist())
    spare = iter([slot for slot in range(slots) if slot not in held])
    moves = []
    for layer, expert in np.argwhere(kept):
        slot = int(old.slot[layer, expert])
        target = slot if slot < slots else next(spare)
        if target != slot:
            moves.append((slot, target))
        fresh.slot[layer, expert] = target
    used = set(fresh.slot[kept].tolist())
    free = [slot for slot in range(slots - 1, -1, -1) if slot not in used]
    fresh.free[: len(free)] = free
    fresh.status[kept] = state.KEPT
    fresh.kept[:] = old.kept
    fresh.scalars[state.N_FREE] = len(free)
    fresh.scalars[state.N_UNFILLED] = int(fresh.capacity.sum() - fresh.kept.sum())
    fresh.scalars[state.STEP] = old.scalars[state.STEP]
    np.minimum(old.score, rules.levels, out=old.score)
    return fresh._replace(**{name: getattr(old, name) for name in HISTORY}), moves
