"""The simulated machine as arrays and compiled functions: clocks, link, CPU pool, GPU stream (see `devices`).

An event loop without a calendar: at any time at most six things can happen next (three running jobs, the GPU stream's
own event, new work for it, the host's wake-up), and the earliest does; of equal times, completions first, then in the
order in which they were scheduled. The host's code is straight-line: where it must wait, it runs the loop.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import copies
from foreload.backend.policy.state import PolicyState
from foreload.compiled import inlined
from foreload.simulator.compiled.rates import Rates, in_turn, less_ns
from foreload.simulator.costs import SCALE
from foreload.simulator.variation import GOLDEN, SILVER

LINK, CPU, GPU = 0, 1, 2

KINDS = (
    "embed", "attention", "route", "predict", "plan", "experts_gpu", "finish", "head", "prefill_layer",
    "prefill_expert", "draft", "sample", "wait_link", "wait_issue", "wait_cpu", "wait_gpu", "wake", "cold", "interrupt",
)  # fmt: skip
"""Kinds of host time, in the order of the columns of `Machine.time`."""
(
    EMBED, ATTENTION, ROUTE, PREDICT, PLAN, EXPERTS_GPU, FINISH, HEAD, PREFILL_LAYER, PREFILL_EXPERT, DRAFT, SAMPLE,
    WAIT_LINK, WAIT_ISSUE, WAIT_CPU, WAIT_GPU, WAKE, COLD, INTERRUPT,
) = range(len(KINDS))  # fmt: skip

# Indices into `Machine.at`.
(
    NOW,  # of the event loop
    HOST,  # of the decoding thread, which runs ahead while nothing else is at work
    ORDER,  # of scheduling
    ROW,  # of `time`: decode or prefill
    PHASE,  # that copies are counted in
    IDLE,  # waited for copies since it was last reset
    INTERRUPTIONS,
    N_ISSUED,
    N_LOG,
    WATCH,  # number of the log; what landed before it began is forgotten
    HOST_WAIT,
    HOST_KEY,
    HOST_DUE,
    HOST_ORDER,
    STREAM,  # what the GPU stream waits for
    STREAM_KEY,
    STREAM_DUE,
    STREAM_ORDER,
    STREAM_START,
    HOST_FIRST,  # whether the host waited for the copy before the stream did
    WORK,  # the event that wakes an idle stream
    WORK_DUE,
    WORK_ORDER,
    FREE_AT,  # when the stream has done all that it began
    FIRST,  # launch in the ring
    N_LAUNCHED,
    N_BLOCKED,
    N_COMING,
    ASYNCHRONOUS,
    FAILED,
    RESTED_SINCE,  # when the CPU's workers had nothing more to do
    BATCHES,  # of CPU experts so far
    BESIDE,  # copies so far that began beside CPU experts
    TOLD,  # when the CPU's workers heard what to read ahead
    N_AT,
) = range(35)

RUNNING, DUE_SOON, ON_ISSUE, ON_LANDING, ON_CPU, ON_GPU, ON_DRAINED = range(7)
"""HOST_WAIT: the host runs, its wake-up is scheduled, or what must happen before it is."""
S_IDLE, S_LANDING, S_LANDED, S_STARTING, S_SHARING, S_SHARED = range(6)
"""STREAM: nothing to do; waits for a copy; its arrival is scheduled; waits to start beside CPU experts; runs beside
them; their end is scheduled."""
W_NONE, W_DUE, W_PAST = range(3)
"""WORK: not announced, announcement scheduled, announced while the stream was busy."""

ACTIVE, REMAINING, RATE, SINCE, EXPERTS, DUE, SCHEDULED = range(7)
"""Columns of `Machine.job`."""
SEEN_GPU, SEEN_CPU, SEEN_CPU_RATE, SEEN_BOTH = range(4)
"""Rows of `Machine.seen`: [n, tokens] resident experts, [n, tokens] CPU experts; of the first format alone, as
contention is that of one: [n, 0] those beside a copy (0: it), and [g, c] beside each other."""
L_BEGUN, L_ENDED, L_WORK, L_EXPERTS, L_KEY, L_LANDED = range(6)
"""Columns of `Machine.launch`."""


class Machine(NamedTuple):
    """All state but the policy's."""

    at: NDArray[np.int64]  # [N_AT]
    time: NDArray[np.int64]  # [3, kinds] of decode, prompts and warm start
    job: NDArray[np.int64]  # [3, 7]
    issued: NDArray[np.int64]  # [2] keys in the stream of copies, the transferring one first
    log: NDArray[np.int64]  # keys in the order of issue since `watch`
    landed_at: NDArray[np.int64]  # [L * E]
    landed_in: NDArray[np.int64]  # [L * E] the watch in which it landed
    launch: NDArray[np.int64]  # [ring, 5]
    blocked: NDArray[np.int64]  # [spans, 2] in which the stream waited for a copy, since the last sync
    counts: NDArray[np.int32]  # [E] scratch of a prompt's layer-step, as the next two
    target: NDArray[np.bool_]  # [E]
    todo: NDArray[np.int64]  # [E]
    ahead: NDArray[np.int64]  # [E] of a prompt: what is worth copying early for the following layer
    early: NDArray[np.int64]  # [E] what was copied early for the layer
    action: NDArray[np.int8]  # [2, K] of this layer-step and the one before
    done: NDArray[np.bool_]  # [K] scratch
    coming: NDArray[np.int64]  # [K] keys of the copies that the open layer-step runs on
    seen: NDArray[np.bool_]  # [F, 4, K + 1, max(K, T) + 1] what was asked for, see SEEN_*
    seen_tokens: NDArray[np.bool_]  # [2, C + 1] the same of `prefill_layer` and `prefill_expert`
    seen_us: NDArray[np.bool_]  # [2, microseconds waited] without and with CPU experts before


def new_machine(
    layers: int,
    experts: int,
    most: int,
    tokens: int,
    chunk_tokens: int,
    longest_us: int,
    asynchronous: bool,
    formats: int,
) -> Machine:
    """An idle machine for L layers of E experts, K = `most` of them and T = `tokens` in a layer-step, F formats."""
    keys = layers * experts
    at = np.zeros(N_AT, np.int64)
    at[ASYNCHRONOUS] = asynchronous
    return Machine(
        at=at,
        time=np.zeros((3, len(KINDS)), np.int64),
        job=np.zeros((3, 7), np.int64),
        issued=np.zeros(copies.WINDOW, np.int64),
        log=np.zeros(4 * keys + 64, np.int64),
        landed_at=np.zeros(keys, np.int64),
        landed_in=np.full(keys, -1, np.int64),
        launch=np.zeros((4 * keys + 64, 6), np.int64),
        blocked=np.zeros((4 * keys + 64, 2), np.int64),
        counts=np.zeros(experts, np.int32),
        target=np.zeros(experts, np.bool_),
        todo=np.zeros(experts, np.int64),
        ahead=np.zeros(experts, np.int64),
        early=np.zeros(experts, np.int64),
        action=np.zeros((2, most), np.int8),
        done=np.zeros(most, np.bool_),
        coming=np.zeros(most, np.int64),
        seen=np.zeros((formats, 4, most + 1, max(most, tokens) + 1), np.bool_),
        seen_tokens=np.zeros((2, chunk_tokens + 1), np.bool_),
        seen_us=np.zeros((2, longest_us + 1), np.bool_),
    )


# Sharing: at most one copy, one CPU batch and one group of resident experts at a time.


@inlined
def _rate(m: Machine, r: Rates, which: int) -> int:
    if not m.job[CPU, ACTIVE]:
        return SCALE
    cpu = m.job[CPU, EXPERTS]
    if which == LINK:
        m.seen[0, SEEN_CPU_RATE, 0, 0] = True
        return r.copy_rate
    rate = SCALE
    if m.job[GPU, ACTIVE]:
        gpu = m.job[GPU, EXPERTS]
        m.seen[0, SEEN_BOTH, gpu, cpu] = True
        rate = r.both_rate[gpu, cpu]
    if which == CPU and m.job[LINK, ACTIVE]:
        m.seen[0, SEEN_CPU_RATE, cpu, 0] = True
        rate = max(1, rate * r.cpu_rate[cpu] // SCALE)
    return rate


@inlined
def _arm(m: Machine, which: int) -> None:
    m.at[ORDER] += 1
    m.job[which, SCHEDULED] = m.at[ORDER]
    m.job[which, DUE] = m.at[NOW] - (-m.job[which, REMAINING] // m.job[which, RATE])


@inlined
def _replan(m: Machine, r: Rates) -> None:
    now = m.at[NOW]
    for which in range(3):
        if m.job[which, ACTIVE]:
            rate, before = _rate(m, r, which), m.job[which, RATE]
            if rate != before:
                done = before * (now - m.job[which, SINCE])
                m.job[which, REMAINING] = max(0, m.job[which, REMAINING] - done)
                m.job[which, RATE] = rate
                m.job[which, SINCE] = now
                _arm(m, which)


@inlined
def start_job(m: Machine, r: Rates, which: int, work_ns: int, experts: int) -> None:
    """Run `work_ns` (alone) on an idle resource."""
    m.job[which, ACTIVE] = 1
    m.job[which, REMAINING] = work_ns * SCALE
    m.job[which, RATE] = 0
    m.job[which, SINCE] = m.at[NOW]
    m.job[which, EXPERTS] = experts
    if which == CPU or m.job[CPU, ACTIVE]:
        _replan(m, r)
    else:
        m.job[which, RATE] = SCALE
        _arm(m, which)


@inlined
def start_cpu(m: Machine, r: Rates, layer: int, experts: int, tokens: int, read: bool) -> None:
    """Hand experts to the CPU, whose workers may be asleep; `tokens` 0: of a single token's step; `read`: one of the
    experts was to be read ahead.
    """
    m.seen[r.format[layer], SEEN_CPU, experts, tokens] = True
    work_ns = r.cpu_ns[r.format[layer], experts, tokens] * in_turn(r.cpu_varies, m.at[BATCHES], GOLDEN) // SCALE
    m.at[BATCHES] += 1
    if m.at[NOW] - m.at[RESTED_SINCE] > r.rest_ns:
        work_ns += r.asleep_ns
    if read:
        work_ns = max(1, work_ns - less_ns(r.read_ahead, m.at[NOW] - max(m.at[RESTED_SINCE], m.at[TOLD])))
    start_job(m, r, CPU, work_ns, experts)


# The host's clock.


@inlined
def spend(m: Machine, kind: int, duration_ns: int) -> None:
    """Let host time pass on `kind`."""
    m.time[m.at[ROW], kind] += duration_ns
    m.at[HOST] += duration_ns


@inlined
def waited(m: Machine, kind: int) -> None:
    """Account for the time up to the event loop's as `kind`."""
    passed = max(0, m.at[NOW] - m.at[HOST])
    if kind in (WAIT_LINK, WAIT_ISSUE):
        m.at[IDLE] += passed
    spend(m, kind, passed)


@inlined
def wake_host(m: Machine, delay_ns: int) -> None:
    """Schedule the host's wake-up."""
    m.at[ORDER] += 1
    m.at[HOST_WAIT], m.at[HOST_DUE], m.at[HOST_ORDER] = DUE_SOON, m.at[NOW] + delay_ns, m.at[ORDER]


# The link.


@inlined
def has_landed(m: Machine, key: int) -> bool:
    """Whether the copy of `key` has landed since the log began."""
    return bool(m.landed_in[key] == m.at[WATCH])


@inlined
def watch(m: Machine) -> None:
    """Start a new log, beginning with what is in the stream."""
    m.at[WATCH] += 1
    m.at[N_LOG] = m.at[N_ISSUED]
    m.log[0], m.log[1] = m.issued[0], m.issued[1]


@inlined
def _transfer(m: Machine, r: Rates, p: PolicyState, start_ns: int) -> None:
    work_ns = r.copy_ns[m.issued[0] // p.status.shape[1]]
    if m.job[CPU, ACTIVE]:
        work_ns = work_ns * in_turn(r.copy_varies, m.at[BESIDE], SILVER) // SCALE
        m.at[BESIDE] += 1
    start_job(m, r, LINK, work_ns + start_ns, 0)


@inlined
def pump(m: Machine, r: Rates, p: PolicyState) -> int:
    """Issue what the window admits; how many copies that were."""
    issued = 0
    while True:
        key = copies.next_copy(p, m.at[PHASE])
        if key < 0:
            return issued
        m.issued[m.at[N_ISSUED]] = key
        m.at[N_ISSUED] += 1
        if m.at[N_LOG] == len(m.log):
            m.at[FAILED] = 1
            return issued
        m.log[m.at[N_LOG]] = key
        m.at[N_LOG] += 1
        if m.at[N_ISSUED] == 1:
            _transfer(m, r, p, r.copy_start_ns)
        if m.at[HOST_WAIT] == ON_ISSUE:
            wake_host(m, 0)
        issued += 1


@inlined
def _arrived(m: Machine, r: Rates, p: PolicyState) -> None:
    key = m.issued[0]
    m.issued[0] = m.issued[1]
    m.at[N_ISSUED] -= 1
    copies.complete(p, key)
    m.landed_at[key], m.landed_in[key] = m.at[NOW], m.at[WATCH]
    for i in range(m.at[N_LAUNCHED]):  # a log that begins anew does not know of it when the stream comes there
        entry = (m.at[FIRST] + i) % len(m.launch)
        if m.launch[entry, L_KEY] == key and m.launch[entry, L_LANDED] < 0:
            m.launch[entry, L_LANDED] = m.at[NOW]
    if m.at[N_ISSUED]:
        _transfer(m, r, p, 0)
    issued = pump(m, r, p)
    if m.at[NOW] < m.at[HOST]:
        m.at[INTERRUPTIONS] += issued if r.driven else 1
    host = m.at[HOST_WAIT] == ON_LANDING and m.at[HOST_KEY] == key
    stream = m.at[STREAM] == S_LANDING and m.at[STREAM_KEY] == key
    if host and (not stream or m.at[HOST_FIRST]):
        wake_host(m, 0)
    if stream:
        _stream_event(m, S_LANDED, 0)
    if host and stream and not m.at[HOST_FIRST]:
        wake_host(m, 0)


# The GPU stream.


@inlined
def _stream_event(m: Machine, state: int, delay_ns: int) -> None:
    m.at[ORDER] += 1
    m.at[STREAM], m.at[STREAM_DUE], m.at[STREAM_ORDER] = state, m.at[NOW] + delay_ns, m.at[ORDER]


@inlined
def _start_ns(m: Machine, r: Rates, entry: int) -> int:
    """When the stream can begin the launch at `entry`, whose copy (if any) has landed."""
    ready, landed = max(m.at[FREE_AT], m.launch[entry, L_BEGUN] + r.latency_ns), m.launch[entry, L_LANDED]
    if landed <= ready:
        return int(ready)
    if m.at[N_BLOCKED] == len(m.blocked):
        m.at[FAILED] = 1
        return int(ready)
    m.blocked[m.at[N_BLOCKED], 0] = ready
    m.blocked[m.at[N_BLOCKED], 1] = landed + r.wake_ns
    m.at[N_BLOCKED] += 1
    return int(landed + r.wake_ns)


@inlined
def slowed_ns(m: Machine, r: Rates, gpu_ns: int) -> int:
    """What a launch takes from now on: longer while copies run."""
    return int(gpu_ns * SCALE // r.gpu_rate if m.at[N_ISSUED] else gpu_ns)


@inlined
def launch(m: Machine, r: Rates, kind: int, host_ns: int, gpu_ns: int, experts: int, key: int) -> None:
    """Launch work on the stream; `experts` above 0 share memory with CPU experts, `key` is a copy it waits for."""
    begun = m.at[HOST]
    spend(m, kind, host_ns)
    queued(m, r, begun, m.at[HOST], gpu_ns, experts, key)


@inlined
def queued(m: Machine, r: Rates, begun: int, ended: int, gpu_ns: int, experts: int, key: int) -> None:
    """What was launched at `begun` and does not end before `ended` is behind what was launched before."""
    if m.at[N_LAUNCHED] == len(m.launch):
        m.at[FAILED] = 1
        return
    entry = (m.at[FIRST] + m.at[N_LAUNCHED]) % len(m.launch)
    m.launch[entry, L_BEGUN] = begun
    m.launch[entry, L_ENDED] = ended
    m.launch[entry, L_WORK] = gpu_ns
    m.launch[entry, L_EXPERTS] = experts
    m.launch[entry, L_KEY] = key
    m.launch[entry, L_LANDED] = m.landed_at[key] if key >= 0 and has_landed(m, key) else -1
    plain = (key < 0 or m.launch[entry, L_LANDED] >= 0) and not (experts and m.job[CPU, ACTIVE])
    if plain and m.at[N_LAUNCHED] == 0:
        m.at[FREE_AT] = max(_start_ns(m, r, entry) + slowed_ns(m, r, gpu_ns), ended)
        return
    m.at[N_LAUNCHED] += 1
    if m.at[WORK] == W_NONE:
        m.at[ORDER] += 1
        m.at[WORK], m.at[WORK_DUE], m.at[WORK_ORDER] = W_DUE, m.at[NOW], m.at[ORDER]


@inlined
def goes_on(m: Machine, r: Rates, gpu_ns: int) -> int:
    """A stream in which nothing else is left goes on with what was launched last; when that is done."""
    m.at[FREE_AT] += slowed_ns(m, r, gpu_ns)
    return int(m.at[FREE_AT])


@inlined
def _stream(m: Machine, r: Rates) -> None:
    """Go on with the stream where it stopped: launches in order, each behind its copy."""
    at = m.at
    while True:
        while at[N_LAUNCHED]:
            entry, state = at[FIRST], at[STREAM]
            key, experts, work_ns = m.launch[entry, L_KEY], m.launch[entry, L_EXPERTS], m.launch[entry, L_WORK]
            if state == S_IDLE and key >= 0 and m.launch[entry, L_LANDED] < 0:
                at[STREAM] = S_LANDING
                at[STREAM_KEY] = key
                at[HOST_FIRST] = at[HOST_WAIT] == ON_LANDING and at[HOST_KEY] == key
                return
            shared = state == S_STARTING
            if state in (S_IDLE, S_LANDED):
                at[STREAM_START] = _start_ns(m, r, entry)
                shared = experts > 0 and m.job[CPU, ACTIVE] == 1
                if shared and at[NOW] < at[STREAM_START]:
                    _stream_event(m, S_STARTING, at[STREAM_START] - at[NOW])
                    return
            if shared:
                at[STREAM] = S_SHARING
                start_job(m, r, GPU, work_ns, experts)
                return
            end = at[NOW] if state == S_SHARED else at[STREAM_START] + slowed_ns(m, r, work_ns)
            at[FREE_AT] = max(end, m.launch[entry, L_ENDED])
            at[STREAM] = S_IDLE
            at[FIRST] = (entry + 1) % len(m.launch)
            at[N_LAUNCHED] -= 1
        if at[HOST_WAIT] == ON_DRAINED:
            wake_host(m, 0)
        if at[WORK] != W_PAST:
            return
        at[WORK] = W_NONE


# The event loop.


@inlined
def _next_event(m: Machine) -> int:
    """What happens next: a job by its number, 3 the stream's event, 4 work for it, 5 the host's wake-up, -1 nothing."""
    at, what, due, order, late = m.at, -1, np.int64(1) << 62, np.int64(0), True
    for which in range(3):
        if m.job[which, ACTIVE]:
            t, o = m.job[which, DUE], m.job[which, SCHEDULED]
            if t < due or (t == due and o < order):
                what, due, order, late = which, t, o, False
    state = at[STREAM]
    if state == S_STARTING:
        t, o = at[STREAM_DUE], at[STREAM_ORDER]
        if t < due or (t == due and o < order):
            what, due, order, late = 3, t, o, False
    elif state in (S_LANDED, S_SHARED):
        t, o = at[STREAM_DUE], at[STREAM_ORDER]
        if t < due:
            what, due, order, late = 3, t, o, True
    if at[WORK] == W_DUE:
        t, o = at[WORK_DUE], at[WORK_ORDER]
        if t < due or (late and t == due and o < order):
            what, due, order, late = 4, t, o, True
    if at[HOST_WAIT] == DUE_SOON:
        t, o = at[HOST_DUE], at[HOST_ORDER]
        if t < due or (late and t == due and o < order):
            what, due, order, late = 5, t, o, True
    if what >= 0:
        at[NOW] = due
    return what


@inlined
def run_until_host(m: Machine, r: Rates, p: PolicyState) -> None:
    """Let things happen until the host wakes up."""
    while m.at[HOST_WAIT] != RUNNING and not m.at[FAILED]:
        what = _next_event(m)
        if what < 0:
            m.at[FAILED] = 2
            return
        _happen(m, r, p, what)


@inlined
def _happen(m: Machine, r: Rates, p: PolicyState, what: int) -> None:
    at = m.at
    if what <= GPU:
        m.job[what, ACTIVE] = 0
        if what == CPU or m.job[CPU, ACTIVE]:
            _replan(m, r)
        if what == LINK:
            _arrived(m, r, p)
        elif what == CPU:
            at[RESTED_SINCE] = at[NOW]
            if at[HOST_WAIT] == ON_CPU:
                wake_host(m, 0)
        elif at[ASYNCHRONOUS]:
            _stream_event(m, S_SHARED, 0)
        else:
            wake_host(m, 0)
    elif what == 3:
        _stream(m, r)
    elif what == 4:
        at[WORK] = W_NONE if at[STREAM] == S_IDLE else W_PAST
        if at[STREAM] == S_IDLE:
            _stream(m, r)
    else:
        at[HOST_WAIT] = RUNNING
