"""A layer-step's plan as the kernels read it, from what the brain decided. Compiled: it runs once per layer-step."""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from foreload.backend.policy.step import ACT_CPU, ACT_HIT


@njit(cache=True)
def write_plan(
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    places: NDArray[np.int64],
    actions: NDArray[np.int8],
    first_key: int,
    slots: NDArray[np.int32],
    targets: NDArray[np.int64],
    plan: NDArray[np.int64],
    listed: NDArray[np.int64],
    on_host: NDArray[np.int64],
    used: NDArray[np.int32],
    late: NDArray[np.int64],
) -> tuple[int, int]:
    """Enter a demand (experts [d], counts [d], places [items], actions [d]) into the plan [items, 4] of this step.

    slots [E]: this layer's; targets [slots] addresses. Writes the slots of resident experts to `used`, and key, first
    item and items of those that come later to the three rows of `late`. Returns how many there are of both.
    """
    n_used, n_late, first = 0, 0, 0
    plan[:, 0] = 0
    for at in range(len(places)):
        listed[at] = places[at]
        on_host[at] = 0
    for i in range(len(experts)):
        count = counts[i]
        if actions[i] == ACT_HIT:
            slot = slots[experts[i]]
            plan[i, 0], plan[i, 1], plan[i, 2] = targets[slot], first, count
            used[n_used] = slot
            n_used += 1
        elif actions[i] == ACT_CPU:
            for at in range(first, first + count):
                on_host[places[at]] = 1
        else:
            late[0, n_late], late[1, n_late], late[2, n_late] = first_key + experts[i], first, count
            n_late += 1
        first += count
    return n_used, n_late
