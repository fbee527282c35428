"""The host's side of a decode step, compiled: from what each layer tells to the brain's decision and the launches.

Python's lock is let go for the whole step; the native library and the CPU experts are called by address.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numba import types as numba_types
from numba.extending import intrinsic as numba_intrinsic
from numpy.typing import NDArray

from foreload.backend.cuda.kernels.ops import TAG
from foreload.backend.cuda.plan import merge_told, sort_demand, write_plan
from foreload.backend.policy.rules import Rules
from foreload.backend.policy.split import SplitCosts
from foreload.backend.policy.state import READ, PolicyState
from foreload.backend.policy.step import ACT_CPU, demand, finish, prefetch
from foreload.compiled import uncounted, unlocked

# numba's own annotations do not cover what is used here.
ir: Any = import_module("llvmlite.ir")
types: Any = numba_types
intrinsic: Any = numba_intrinsic

BEGUN, ROUTED, CHOSEN, PLANNED, SUBMITTED, GUESSED, FORESEEN, ISSUED, LAUNCHED, COMPUTED, ENDED = range(11)
CPU_BEGUN, CPU_ENDED, ON_CPU = 11, 12, 13
N_TIMES = 14
"""Columns of `Host.times`: when each part of a layer-step was done, and how many experts the CPU had from when to when.

COMPUTED is 0 where it had none."""
NO_TICKET = -9
WORK_EXPERTS, WORK_TAG = 0, 4
"""Words of `fl_work`."""

DONE, UNTOLD, NO_SLOT, FAILED, ASTRAY, UNSEEN = 0, 1, 2, 3, 4, 5
"""`Host.outcome`: all layers are done; a layer did not tell in time; the demand found no staging slot; CUDA's error; a
layer told of experts that it does not have; one told its routing, but not what it predicts."""
PATIENT = 10
"""Predictions follow the routing at once. So many times longer the host waits for them, since it has begun by then."""


class Native(NamedTuple):
    """Addresses: functions of the native library, and what they are called with."""

    now: int
    told: int
    serve: int
    lock: int
    unlock: int
    run: int
    wait_landed: int
    submit: int
    computed: int
    ahead: int
    link: int
    pool: int  # of CPU workers; 0: there are none
    stream: int


class Graphs(NamedTuple):
    """What a step launches: see `Program`."""

    enter: NDArray[np.uint64]  # [L + 1]
    planned: NDArray[np.uint64]  # [L], 0 where what enters a layer runs its plan
    waves: NDArray[np.uint64]  # [L, items]


class Host(NamedTuple):
    """Memory of the host's side; L layers, E experts, at most `items` items."""

    words: NDArray[np.int32]  # [L, items] ids as the device tells them
    guesses: NDArray[np.int32]  # [L, words]
    weights: NDArray[np.float32]  # [items] as the device tells them
    plan: NDArray[np.int64]  # [PLANNED * items]
    on_host: NDArray[np.int64]  # [items], scratch
    targets: NDArray[np.int64]  # [slots] device addresses
    used: NDArray[np.int32]  # [items] slots
    late: NDArray[np.int64]  # [3, items]: keys, firsts, counts
    step: NDArray[np.int64]  # `fc_step` as words
    blocks: NDArray[np.int64]  # [L, E] host addresses of experts
    layouts: NDArray[np.int64]  # [L] addresses of `fl_layout`
    work: NDArray[np.int32]  # `fl_work` as words; it points to the four below
    cpu_blocks: NDArray[np.int64]  # [items]
    cpu_first: NDArray[np.int32]  # [items + 1]
    cpu_rows: NDArray[np.int32]  # [items]
    cpu_weights: NDArray[np.float32]  # [items]
    experts: NDArray[np.int32]  # [items] of the demand
    counts: NDArray[np.int32]  # [items]
    places: NDArray[np.int64]  # [items]
    actions: NDArray[np.int8]  # [items]
    found: NDArray[np.int32]  # [E] predictions
    scratch: NDArray[np.int32]  # [2, E]
    times: NDArray[np.int64]  # [L, N_TIMES] nanoseconds
    outcome: NDArray[np.int64]  # [2]: which; with FAILED CUDA's error, with DONE the last layer's distinct experts


class Chosen(NamedTuple):
    """Demands in place of what is told, for probes; with `on` 0 nothing of it is read. P: most predictions."""

    on: int
    distinct: NDArray[np.int32]  # [L]
    items: NDArray[np.int32]  # [L]
    experts: NDArray[np.int32]  # [L, items]
    counts: NDArray[np.int32]  # [L, items]
    places: NDArray[np.int64]  # [L, items]
    predicted: NDArray[np.int32]  # [L, depths, P]
    predictions: NDArray[np.int32]  # [L, depths] how many there are
    wait_ns: NDArray[np.int64]  # [L] waited before a layer-step is planned


class Step(NamedTuple):
    """Numbers of a step."""

    number: int
    rows: int
    top_k: int
    depth: int
    width: int
    patience_ns: int
    ends: int  # 1: layer-steps end here
    whole: int  # 1: the step is one launch, the brain only hears of it


@intrinsic  # type: ignore[untyped-decorator]
def _call(context: Any, address: Any, arguments: Any) -> Any:
    """Call the C function int64 (*)(int64, ...) at an address with a tuple of whole numbers."""
    kinds = list(arguments)

    def build(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(word, [word] * len(kinds))
        given = [
            context.cast(builder, builder.extract_value(values[1], at), kind, types.int64)
            for at, kind in enumerate(kinds)
        ]
        return builder.call(builder.inttoptr(values[0], function.as_pointer()), given)

    return types.int64(types.int64, arguments), build


@uncounted
def _stopped(h: Host, at: int, outcome: int, error: int) -> int:
    """Stop at a layer. Whoever hears of it lets the device go on (`HostMemory.release`)."""
    h.outcome[0], h.outcome[1] = outcome, error
    return at


@uncounted
def _choose(h: Host, c: Chosen, step: Step, at: int) -> tuple[int, int]:
    """Enter the demand of a layer-step into `h`; how many distinct experts and items there are."""
    if not c.on:
        items = step.rows * step.top_k
        return sort_demand(h.words[at, :items], h.experts, h.counts, h.places, h.scratch[0]), items
    for i in range(c.distinct[at]):
        h.experts[i], h.counts[i] = c.experts[at, i], c.counts[at, i]
    for i in range(c.items[at]):
        h.places[i] = c.places[at, i]
    return c.distinct[at], c.items[at]


@uncounted
def _prefetch(h: Host, c: Chosen, step: Step, state: PolicyState, rules: Rules, at: int, ahead: int) -> bool:
    """Tell the brain what is predicted for a later layer; False if there are no such experts."""
    if c.on:
        if ahead < c.predictions.shape[1]:
            prefetch(state, rules, at + 1 + ahead, c.predicted[at, ahead, : c.predictions[at, ahead]])
        return True
    size = step.rows * step.width
    n = merge_told(h.guesses[at, ahead * size : (ahead + 1) * size], step.rows, h.found, h.scratch)
    if n >= 0:
        prefetch(state, rules, at + 1 + ahead, h.found[:n])
    return n >= 0


@uncounted
def _submit(n: Native, h: Host, step: Step, at: int, distinct: int, turn: int) -> int:
    """Hand the CPU its experts; the ticket, NO_TICKET if it has none, or an error (below 0).

    Sums of outputs go where `combine` reads them.
    """
    experts, pair, first = 0, 0, 0
    for i in range(distinct):
        if h.actions[i] == ACT_CPU:
            h.cpu_blocks[experts] = h.blocks[at, h.experts[i]]
            experts += 1
            for place in h.places[first : first + h.counts[i]]:
                h.cpu_rows[pair], h.cpu_weights[pair] = place // step.top_k, h.weights[place]
                pair += 1
            h.cpu_first[experts] = pair
        first += h.counts[i]
    h.times[at, ON_CPU] = experts
    if not experts:
        return NO_TICKET
    h.work[WORK_EXPERTS], h.work[WORK_TAG] = experts, turn
    ticket: int = _call(n.submit, (n.pool, h.layouts[at], h.work.ctypes.data))
    return ticket


@uncounted
def _told(n: Native, h: Host, c: Chosen, step: Step, at: int) -> bool:
    """Wait for a layer's routing; False if it does not come in time."""
    t = h.times[at]
    t[BEGUN] = _call(n.now, (0,))
    words = step.rows * step.top_k
    if not _call(n.told, (n.link, h.words[at].ctypes.data, words, step.number & TAG, step.patience_ns)):
        return False
    t[ROUTED] = t[CHOSEN] = _call(n.now, (0,))
    while c.on and c.wait_ns[at] and t[CHOSEN] < t[ROUTED] + c.wait_ns[at]:
        t[CHOSEN] = _call(n.now, (0,))
    return True


@uncounted
def _read_ahead(n: Native, h: Host, state: PolicyState, layer: int) -> None:
    """Tell the CPU's workers what to read while they are idle."""
    key, block = state.scalars[READ], 0
    if key >= 0:
        block = h.blocks[layer, key % state.status.shape[1]]
    _call(n.ahead, (n.pool, h.layouts[layer], block))


@uncounted
def _foresee(n: Native, h: Host, c: Chosen, step: Step, state: PolicyState, rules: Rules, at: int, depth: int) -> int:
    """Wait for a layer's predictions, made while the CPU computes already, and tell the brain; the outcome."""
    t = h.times[at]
    t[GUESSED] = t[FORESEEN] = t[SUBMITTED]
    if not depth:
        return DONE
    words, patience_ns = depth * step.rows * step.width, PATIENT * step.patience_ns
    if not _call(n.told, (n.link, h.guesses[at].ctypes.data, words, step.number & TAG, patience_ns)):
        return UNSEEN
    t[GUESSED] = _call(n.now, (0,))
    known = True
    _call(n.lock, (n.link,))
    for ahead in range(depth):
        known &= _prefetch(h, c, step, state, rules, at, ahead)
    _call(n.unlock, (n.link, 0))
    if rules.cpu_reads:
        _read_ahead(n, h, state, at + 1)
    t[FORESEEN] = _call(n.now, (0,))
    return DONE if known else ASTRAY


@uncounted
def _launch(n: Native, g: Graphs, h: Host, at: int, n_used: int, n_late: int) -> int:
    """Launch what waits for copies, and behind it what enters the next layer; the error."""
    h.step[0], h.step[1], h.step[2] = n.stream, g.planned[at], g.waves[at].ctypes.data
    h.step[7], h.step[9], h.step[10] = n_late, n_used, g.enter[at + 1]
    error: int = _call(n.run, (n.link, h.step.ctypes.data))
    return error


@unlocked
def run_layers(
    first: int,
    last: int,
    step: Step,
    n: Native,
    g: Graphs,
    h: Host,
    c: Chosen,
    state: PolicyState,
    rules: Rules,
    costs: SplitCosts,
) -> int:
    """The layer-steps `first` .. `last` - 1; returns the layer it stopped at (`last`: none), `h.outcome` says why."""
    layers = len(h.words)
    for at in range(first, last):
        t = h.times[at]
        if not _told(n, h, c, step, at):
            return _stopped(h, at, UNTOLD, 0)
        distinct, items = _choose(h, c, step, at)
        if distinct < 0:
            return _stopped(h, at, ASTRAY, 0)
        experts, counts, actions = h.experts[:distinct], h.counts[:distinct], h.actions[:distinct]
        _call(n.lock, (n.link,))
        room = demand(state, rules, at, experts, counts, costs, actions)
        if step.whole:
            finish(state, rules, at, experts, actions, costs)
        _call(n.unlock, (n.link, 0))
        if not room:
            return _stopped(h, at, NO_SLOT, 0)
        if step.whole:
            continue
        turn = step.number * layers + at
        n_used, n_late = write_plan(
            experts, counts, h.places[:items], actions, at * state.status.shape[1], state.slot[at], h.targets,
            turn, h.plan, h.on_host[: step.rows * step.top_k], h.used, h.late,
        )  # fmt: skip
        t[PLANNED] = _call(n.now, (0,))
        ticket = _submit(n, h, step, at, distinct, turn)
        t[SUBMITTED] = _call(n.now, (0,))
        outcome = _foresee(n, h, c, step, state, rules, at, min(step.depth, layers - 1 - at))
        if outcome != DONE:
            return _stopped(h, at, outcome, 0)
        error = _call(n.serve, (n.link,))
        t[ISSUED] = _call(n.now, (0,))
        error = error or _launch(n, g, h, at, n_used, n_late)
        t[LAUNCHED] = _call(n.now, (0,))
        t[COMPUTED] = 0
        if ticket >= 0:
            error = error or _call(n.computed, (n.link, n.pool, ticket, t[CPU_BEGUN:].ctypes.data))
            t[COMPUTED] = _call(n.now, (0,))
        if step.ends:
            error = error or _call(n.wait_landed, (n.link, h.late.ctypes.data, n_late))
            _call(n.lock, (n.link,))
            finish(state, rules, at, experts, actions, costs)
            let_go = _call(n.unlock, (n.link, 1))
            error = error or let_go
        t[ENDED] = _call(n.now, (0,))
        h.outcome[1] = distinct
        if error or (ticket < 0 and ticket != NO_TICKET):
            return _stopped(h, at, FAILED, error)
    h.outcome[0] = DONE
    return last
