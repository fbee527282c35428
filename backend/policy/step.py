"""One layer-step of decode as the brain sees it: demand, prefetch, finish (design: sections 2, 3, 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.ahead import prefetch_ahead
from foreload.backend.policy.copies import (
    cancel,
    commit_uploads,
    drop_unused,
    enqueue,
    give_place,
    keep_or_release,
    note_upload,
    promote,
    release,
)
from foreload.backend.policy.order import ONE_USE, aged, has_room, prefers, worst_kept
from foreload.backend.policy.rules import (
    ADMIT_BACKGROUND,
    ADMIT_NONE,
    AGED,
    FETCH,
    MAKESPAN,
    NO_AHEAD,
    SPLIT_MAKESPAN,
    SPLIT_TAU,
    Rules,
)
from foreload.backend.policy.split import (
    Load,
    SplitCosts,
    cpu_ns,
    fetch_count,
    fetch_level,
    in_order,
    is_read,
    link_backlog_ns,
    objective_ns,
)
from foreload.backend.policy.state import (
    ABSENT,
    AHEAD,
    DECODE,
    DEMAND,
    DISCARD,
    HITS,
    IN_FLIGHT,
    KEPT,
    LANDED,
    LATE,
    LAYER,
    MISSES,
    N_AHEAD,
    N_DEMAND_HELD,
    N_FREE,
    N_IN_FLIGHT,
    N_SERVED,
    N_UNFILLED,
    N_UPLOADS,
    ON_CPU,
    PREFETCH,
    QUEUED,
    READ,
    STEP,
    UPLOAD,
    WASTED,
    WORST_UNKNOWN,
    PolicyState,
)
from foreload.backend.policy.utility import update_utility
from foreload.compiled import inlined, uncounted

ACT_HIT, ACT_LATE, ACT_FETCH, ACT_CPU = 0, 1, 2, 3


@inlined
def enter(state: PolicyState, layer: int) -> None:
    """`layer` is the computing layer from now on; orders within it and the one before may be others then."""
    state.worst[state.scalars[LAYER]] = WORST_UNKNOWN
    state.worst[layer] = WORST_UNKNOWN
    state.scalars[LAYER] = layer


@inlined
def _look_up(state: PolicyState, rules: Rules, layer: int, expert: int) -> int:
    """ACT_HIT, ACT_LATE, or ACT_FETCH for an absent expert; what is on its way becomes the demand's.

    A prefetch that only waits for the link is decided anew where the CPU may have it; `tau` fetches it anyway.
    """
    status, purpose = state.status[layer, expert], state.purpose[layer, expert]
    anew = purpose == UPLOAD or (purpose == PREFETCH and rules.miss != FETCH and rules.miss != SPLIT_TAU)
    if status == QUEUED and anew:
        cancel(state, layer, expert)
        return ACT_FETCH
    if status == ABSENT:
        return ACT_FETCH
    if status == KEPT:
        return ACT_HIT
    if purpose == AHEAD and status == LANDED:
        state.status[layer, expert] = KEPT
        return ACT_HIT
    if purpose == AHEAD:
        give_place(state, layer)
    elif purpose == DISCARD:
        state.counters[DECODE, layer, WASTED] -= 1
    state.purpose[layer, expert] = DEMAND
    state.scalars[N_DEMAND_HELD] += 1
    return ACT_HIT if status == LANDED else ACT_LATE


@inlined
def _put_in_order(
    state: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    missing: NDArray[np.int32],
    tokens: NDArray[np.int32],
) -> None:
    """Sort indices of absent experts in place, and write their `tokens`."""
    in_order(state, layer, experts, counts, missing)
    for at in range(len(missing)):
        tokens[at] = counts[missing[at]]


@inlined
def _fetch(
    state: PolicyState,
    rules: Rules,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    missing: NDArray[np.int32],
    load: Load,
    costs: SplitCosts,
    action: NDArray[np.int8],
) -> bool:
    """Share the absent experts out between link and CPU, if they are not the CPU's; False if no staging slot was left
    for a fetch.
    """
    tokens, scores = state.scratch[1, : len(missing)], state.scratch[2, : len(missing)]
    _put_in_order(state, layer, experts, counts, missing, tokens)
    for at in range(len(missing)):
        scores[at] = state.score[layer, experts[missing[at]]]
    fetched, tau = 0, 0
    if rules.miss == SPLIT_TAU:
        tau = fetch_level(rules, tokens, scores, load, costs)
        state.tau[layer] = tau
    else:
        fetched = fetch_count(rules, tokens, load, costs)
    for at in range(len(missing)):
        i = missing[at]
        fetch = state.score[layer, experts[i]] >= tau if rules.miss == SPLIT_TAU else fetched > 0
        if action[i] == ACT_CPU or not fetch:
            action[i] = ACT_CPU
            state.counters[DECODE, layer, ON_CPU] += 1
            continue
        if not enqueue(state, layer, experts[i], DEMAND):
            return False
        state.scalars[N_DEMAND_HELD] += 1
        fetched -= 1
    return True


@inlined
def _room(state: PolicyState, reserve: int) -> bool:
    """Whether a copy nobody has demanded may take a slot and still leave `reserve` for the next layer-step."""
    spare = state.scalars[N_FREE] - state.scalars[N_UNFILLED]
    return bool(spare > 0 and spare + state.scalars[N_DEMAND_HELD] > reserve)


@inlined
def _note_served(state: PolicyState, layer: int, experts: NDArray[np.int32], action: NDArray[np.int8]) -> None:
    """What the CPU computed in the layer-step that ends may be uploaded in the next."""
    n = 0
    for i in range(len(experts)):
        if action[i] == ACT_CPU:
            state.served[n] = layer * state.status.shape[1] + experts[i]
            n += 1
    state.scalars[N_SERVED] = n


@inlined
def _queue_uploads(state: PolicyState, rules: Rules, action: NDArray[np.int8], costs: SplitCosts) -> None:
    """Queue experts that the CPU computed in the layer-step before, the most preferred first, if the cache would keep
    them: where the link has nothing to fetch meanwhile, and as far as no more than `admit_per_step` uploads are under
    way. What the CPU reads now would be read by the link and all cores at once.

    Where other copies follow, an upload must be half done when the next layer asks for its own.
    """
    on_cpu, served = 0, state.scalars[N_SERVED]
    for i in range(len(action)):
        if action[i] == ACT_FETCH:
            return
        on_cpu += action[i] == ACT_CPU
    if served == 0:
        return
    if rules.shares_link and costs.io_ns > 2 * (cpu_ns(on_cpu, on_cpu, costs) + costs.dense_ns):
        return
    every = state.status.shape[1]
    layer = state.served[0] // every
    worst = worst_kept(state, rules, layer)
    for _ in range(rules.admit_per_step - state.scalars[N_UPLOADS]):
        best = -1
        for i in range(served):
            expert = state.served[i] % every
            candidate = state.status[layer, expert] == ABSENT
            if candidate and (best < 0 or prefers(state, rules, layer, expert, layer, best)):
                best = expert
        if best < 0 or not _room(state, rules.reserve):
            return
        above = worst >= 0 and prefers(state, rules, layer, best, worst // every, worst % every)
        if not above and not has_room(state, rules, layer):
            return
        enqueue(state, layer, best, UPLOAD)


@inlined
def _end_ns(
    state: PolicyState,
    rules: Rules,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    missing: NDArray[np.int32],
    most: int,
    load: Load,
    costs: SplitCosts,
) -> int:
    """When link and CPU are done with experts, shared out as they will be; at most so many are fetched."""
    tokens, left = state.scratch[1, : len(missing)], 0
    _put_in_order(state, layer, experts, counts, missing, tokens)
    fetched = min(fetch_count(rules, tokens, load, costs), most)
    for at in range(fetched, len(missing)):
        left += tokens[at]
    return objective_ns(fetched, len(missing) - fetched, left, load, rules, costs)


@inlined
def _not_waited_for(
    state: PolicyState,
    rules: Rules,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    missing: NDArray[np.int32],
    absent: int,
    load: Load,
    costs: SplitCosts,
    action: NDArray[np.int8],
) -> int:
    """Experts in flight that are shared out like absent ones, appended to `missing`, since the layer-step ends sooner
    than if it waited for them, by a quarter of a copy at least (how far it is can only be guessed): all or none; how
    many. Their copies become uploads, or are discarded if nothing is kept.
    """
    waiting_ns = _end_ns(state, rules, layer, experts, counts, missing[:absent], absent, load, costs)
    moved = 0
    for i in range(len(experts)):
        if action[i] == ACT_LATE and state.status[layer, experts[i]] == IN_FLIGHT:
            missing[absent + moved] = i
            moved += 1
    less = Load(load.resident, load.late - moved, load.backlog_ns, load.ahead_ns)
    moved_ns = _end_ns(state, rules, layer, experts, counts, missing[: absent + moved], absent, less, costs)
    if moved_ns + costs.io_ns // 4 >= waiting_ns:
        kept = 0
        for at in range(absent + moved):  # they are in order by now
            if action[missing[at]] != ACT_LATE:
                missing[kept] = missing[at]
                kept += 1
        return 0
    for at in range(absent + moved):
        i = missing[at]
        if action[i] == ACT_LATE:
            action[i] = ACT_CPU
            state.scalars[N_DEMAND_HELD] -= 1
            state.purpose[layer, experts[i]] = DISCARD
            if rules.admission != ADMIT_NONE:
                state.purpose[layer, experts[i]] = UPLOAD
                note_upload(state, layer, experts[i])
    return moved


@uncounted
def demand(
    state: PolicyState,
    rules: Rules,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    costs: SplitCosts,
    action: NDArray[np.int8],
) -> bool:
    """Look the whole demand of a layer-step up at once and decide what happens to each expert; then queue uploads.

    experts [n] distinct, counts [n] tokens each; writes action [n]. Only here do recency, counts and uses change.
    Returns False if no staging slot was left for a fetch (an error: staging holds one step's demand).
    """
    enter(state, layer)
    state.begun[layer] = state.scalars[STEP]
    commit_uploads(state, rules)
    resident, late, ahead, absent = 0, 0, 0, 0
    missing = state.scratch[0]
    for i in range(len(experts)):
        expert = experts[i]
        queued = state.status[layer, expert] == QUEUED
        action[i] = _look_up(state, rules, layer, expert)
        if action[i] == ACT_HIT:
            resident += 1
        elif action[i] == ACT_FETCH:
            missing[absent] = i
            absent += 1
        else:
            late += 1
            if queued:
                promote(state, layer, expert)
                ahead += 1
        if rules.eviction == AGED:
            state.weight[layer, expert] = aged(state, rules, layer, expert) + ONE_USE
        state.last_step[layer, expert] = state.scalars[STEP]
        state.last_tokens[layer, expert] = counts[i]
        state.uses[layer, expert] += 1
    state.worst[layer] = WORST_UNKNOWN
    backlog = link_backlog_ns(state.scalars[N_IN_FLIGHT], ahead, costs.io_ns)
    load = Load(resident, late, backlog, state.scalars[N_AHEAD] * costs.io_ns)
    state.scalars[N_AHEAD] = 0
    if rules.miss == SPLIT_MAKESPAN and rules.objective == MAKESPAN and late > ahead:
        moved = _not_waited_for(state, rules, layer, experts, counts, missing, absent, load, costs, action)
        absent, late = absent + moved, late - moved
        load = Load(resident, late, backlog, load.ahead_ns)
    counters = state.counters[DECODE, layer]
    counters[HITS] += resident
    counters[LATE] += late
    counters[MISSES] += absent
    if not _fetch(state, rules, layer, experts, counts, missing[:absent], load, costs, action):
        return False
    if rules.admission == ADMIT_BACKGROUND:
        _queue_uploads(state, rules, action, costs)
    return True


@inlined
def _waits(state: PolicyState, layer: int, expert: int) -> bool:
    """Whether a predicted expert is neither on the device nor on its way."""
    queued = state.status[layer, expert] == QUEUED and state.purpose[layer, expert] == PREFETCH
    return bool(state.status[layer, expert] == ABSENT or queued)


@inlined
def _read_ahead(state: PolicyState, layer: int, predicted: NDArray[np.int32]) -> None:
    """Leave the last of at least two experts that are predicted for the next layer and wait to the CPU."""
    waiting, last = 0, -1
    for i in range(len(predicted)):
        if predicted[i] >= 0 and _waits(state, layer, predicted[i]):
            waiting, last = waiting + 1, predicted[i]
    state.scalars[READ] = -1
    if waiting > 1:
        if state.status[layer, last] == QUEUED:
            cancel(state, layer, last)
        state.scalars[READ] = layer * state.status.shape[1] + last


@uncounted
def prefetch(state: PolicyState, rules: Rules, layer: int, predicted: NDArray[np.int32]) -> None:
    """Queue copies of the experts predicted for `layer`, best first (-1: none); cancel what is no longer predicted."""
    if rules.cpu_reads and layer == state.scalars[LAYER] + 1:
        _read_ahead(state, layer, predicted)
    for expert in range(state.status.shape[1]):
        if state.status[layer, expert] == QUEUED and state.purpose[layer, expert] == PREFETCH:
            wanted = False
            for i in range(len(predicted)):
                wanted = wanted or predicted[i] == expert
            if not wanted:
                cancel(state, layer, expert)
    for i in range(len(predicted)):
        expert = predicted[i]
        if expert < 0:
            continue
        status = state.status[layer, expert]
        if is_read(state, layer, expert):
            continue
        if status == ABSENT and _room(state, rules.reserve):
            state.scalars[N_AHEAD] += enqueue(state, layer, expert, PREFETCH)
        elif status == IN_FLIGHT and state.purpose[layer, expert] == DISCARD:
            state.purpose[layer, expert] = PREFETCH
            state.counters[DECODE, layer, WASTED] -= 1


@inlined
def finish(
    state: PolicyState,
    rules: Rules,
    layer: int,
    experts: NDArray[np.int32],
    action: NDArray[np.int8],
    costs: SplitCosts,
) -> None:
    """End of a layer-step: utilities follow its demand, what it fetched is kept or dropped, and so are its unused
    prefetches; then prefetches for the layer's next step are queued.
    """
    state.scalars[N_DEMAND_HELD] = 0
    if rules.utility:
        update_utility(state, rules, layer)
        state.worst[layer] = WORST_UNKNOWN
    if rules.admission == ADMIT_BACKGROUND:
        _note_served(state, layer, experts, action)
    fetched = 0
    for i in range(len(experts)):
        fetched += action[i] == ACT_FETCH
        if action[i] != ACT_CPU and state.status[layer, experts[i]] == LANDED:
            if rules.admission == ADMIT_NONE:
                release(state, layer, experts[i])
            else:
                keep_or_release(state, rules, layer, experts[i])
    if rules.ahead == NO_AHEAD:
        drop_unused(state, layer)
    else:
        prefetch_ahead(state, rules, layer, fetched, costs)


@uncounted
def end_step(state: PolicyState) -> None:
    """All layers of a decode step are done: the first one is next."""
    state.scalars[STEP] += 1
    state.scalars[LAYER] = 0
    state.worst[:] = WORST_UNKNOWN
