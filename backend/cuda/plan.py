"""A layer-step's demand and plan as arrays, from what the device has told. Compiled: it runs once per layer-step."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.step import ACT_CPU, ACT_HIT
from foreload.compiled import uncounted


@uncounted
def sort_demand(
    words: NDArray[np.int32],
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    places: NDArray[np.int64],
    tokens: NDArray[np.int32],
) -> int:
    """`demand_of` the ids in the lower halves of words [items], into experts, counts and places [items] each.

    tokens [E] is scratch. Returns how many distinct experts there are; -1 if one of them is not among E.
    """
    tokens[:] = 0
    for item in range(len(words)):
        if words[item] & 0xFFFF >= len(tokens):
            return -1
        tokens[words[item] & 0xFFFF] += 1
    distinct, start = 0, 0
    for expert in range(len(tokens)):
        count = tokens[expert]
        if count:
            experts[distinct], counts[distinct] = expert, count
            tokens[expert] = start
            distinct, start = distinct + 1, start + count
    for item in range(len(words)):
        expert = words[item] & 0xFFFF
        places[tokens[expert]] = item
        tokens[expert] += 1
    return distinct


@uncounted
def merge_told(words: NDArray[np.int32], rows: int, found: NDArray[np.int32], scratch: NDArray[np.int32]) -> int:
    """`merge_predictions` of the ids in the lower halves of words [rows * width] (0xFFFF: none), into found.

    scratch [2, E]. Returns how many distinct experts there are; -1 if one of them is not among E.
    """
    width, n = len(words) // rows, 0
    for at in range(len(words)):
        if scratch.shape[1] <= words[at] & 0xFFFF < 0xFFFF:
            return -1
    if rows == 1:
        for at in range(width):
            if words[at] & 0xFFFF != 0xFFFF:
                found[n] = words[at] & 0xFFFF
                n += 1
        return n
    votes, best = scratch[0], scratch[1]
    votes[:] = 0
    best[:] = width
    for at in range(len(words)):
        expert = words[at] & 0xFFFF
        if expert != 0xFFFF:
            votes[expert] += 1
            best[expert] = min(best[expert], at % width)
    for expert in range(len(votes)):
        if votes[expert] == 0:
            continue
        at = n
        while at and (
            votes[found[at - 1]] < votes[expert]
            or (votes[found[at - 1]] == votes[expert] and best[found[at - 1]] > best[expert])
        ):
            found[at] = found[at - 1]
            at -= 1
        found[at] = expert
        n += 1
    return n


@uncounted
def write_plan(
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    places: NDArray[np.int64],
    actions: NDArray[np.int8],
    first_key: int,
    slots: NDArray[np.int32],
    targets: NDArray[np.int64],
    turn: int,
    plan: NDArray[np.int64],
    on_host: NDArray[np.int64],
    used: NDArray[np.int32],
    late: NDArray[np.int64],
) -> tuple[int, int]:
    """Enter a demand (experts [d], counts [d], places, actions [d]) into the plan [4, items] of this `turn`.

    slots [E]: this layer's; targets [slots] addresses; on_host [items] is scratch. Each word of the plan is written
    once, as `Ops.take_plan` reads it, also where the demand has fewer places than there are items. Writes the slots of
    resident experts to `used`, and key, first item and items of those that come later to the three rows of `late`.
    Returns how many there are of both.
    """
    items, tag, n_used, n_late, first = len(on_host), turn << 32, 0, 0, 0
    on_host[:] = 0
    for i in range(items):
        address, span = 0, 0
        if i < len(experts):
            count = counts[i]
            if actions[i] == ACT_HIT:
                slot = slots[experts[i]]
                address, span = targets[slot], count << 16 | first
                used[n_used] = slot
                n_used += 1
            elif actions[i] == ACT_CPU:
                for at in range(first, first + count):
                    on_host[places[at]] = 1
            else:
                late[0, n_late], late[1, n_late], late[2, n_late] = first_key + experts[i], first, count
                n_late += 1
            first += count
        plan[i] = tag | (address & 0xFFFFFFFF)
        plan[items + i] = tag | (address >> 32)
        plan[2 * items + i] = tag | span
    for i in range(items):
        plan[3 * items + i] = tag | on_host[i] << 31 | (places[i] if i < len(places) else 0)
    return n_used, n_late
