"""What the decoding thread does, compiled: blocks, resident experts, copies, tokens (see `engine_model`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import copies, step
from foreload.backend.policy.rules import Rules
from foreload.backend.policy.split import SplitCosts
from foreload.backend.policy.state import N_QUEUED, PolicyState
from foreload.compiled import inlined, uncounted
from foreload.simulator.compiled import machine as mach
from foreload.simulator.compiled.machine import (
    ASYNCHRONOUS,
    ATTENTION,
    COLD,
    CPU,
    DRAFT,
    EMBED,
    EXPERTS_GPU,
    FINISH,
    FREE_AT,
    GPU,
    HEAD,
    HOST,
    HOST_KEY,
    HOST_WAIT,
    IDLE,
    INTERRUPT,
    INTERRUPTIONS,
    N_BLOCKED,
    N_COMING,
    N_ISSUED,
    N_LAUNCHED,
    N_LOG,
    NOW,
    ON_CPU,
    ON_DRAINED,
    ON_GPU,
    ON_ISSUE,
    ON_LANDING,
    PLAN,
    PREDICT,
    ROUTE,
    SAMPLE,
    WAIT_CPU,
    WAIT_GPU,
    WAIT_ISSUE,
    WAIT_LINK,
    WAKE,
    Machine,
    run_until_host,
    spend,
    start_job,
    waited,
)
from foreload.simulator.compiled.rates import Rates


class Blocks(NamedTuple):
    """Nanoseconds of blocks as (host, GPU) pairs.

    F = most tokens of a step, K, T and formats as for `Rates`, D = depth of prediction, C = tokens of a prompt's chunk.
    """

    embed: NDArray[np.int64]  # [F + 1, 2]
    route: NDArray[np.int64]  # [F + 1, 2]
    speculated: NDArray[np.int64]  # [F + 1, 2] in place of `route` where predictions are executed
    predict: NDArray[np.int64]  # [F + 1, D + 1, 2]
    plan: NDArray[np.int64]  # [F + 1, 2]
    finish: NDArray[np.int64]  # [F + 1, 2]
    head: NDArray[np.int64]  # [F + 1, 2]
    draft: NDArray[np.int64]  # [F + 1, 2]
    sample: NDArray[np.int64]  # [F + 1, 2] by tokens that a step adds; zeros without draws
    experts: NDArray[np.int64]  # [formats, K + 1, T + 1, 2] by tokens; 0: of a single token's step
    late: NDArray[np.int64]  # [formats, T + 1, 2] one expert behind its copy
    prefill_layer: NDArray[np.int64]  # [C + 1, 2]
    prefill_expert: NDArray[np.int64]  # [C + 1, 2]
    cold: NDArray[np.int64]  # [2, microseconds waited], without and with CPU experts before
    executes: NDArray[np.bool_]  # [L] whether a layer executes predictions
    queueing_ns: int
    interrupt_ns: int
    drafting: bool
    shares: bool  # whether resident experts and CPU experts slow each other
    grouped: bool  # whether a prompt's experts run together


class Steps(NamedTuple):
    """The decode steps of a request: see `workload.Request`."""

    demand: NDArray[np.int32]  # [S, L, K]
    counts: NDArray[np.int32]  # [S, L, K]
    predicted: NDArray[np.int32]  # [D, S, L, width]
    fed: NDArray[np.int64]  # [S]
    emitted: NDArray[np.int64]  # [S]
    attention: NDArray[np.int64]  # [S, 2]
    whole: NDArray[np.int64]  # [S] of one launch, if every expert may be resident; else 0


# Waiting.


@inlined
def wait(m: Machine, r: Rates, p: PolicyState, what: int) -> None:
    """Let the others act until what the host waits for has happened."""
    m.at[HOST_WAIT] = what
    run_until_host(m, r, p)


@inlined
def catch_up(m: Machine, r: Rates, p: PolicyState) -> None:
    """Let the others reach the host's time."""
    if m.at[NOW] < m.at[HOST]:
        mach.wake_host(m, m.at[HOST] - m.at[NOW])
        run_until_host(m, r, p)


@inlined
def settle(m: Machine, r: Rates, p: PolicyState) -> None:
    """The same, if any is at work."""
    if m.at[N_ISSUED] or m.job[CPU, mach.ACTIVE]:
        catch_up(m, r, p)


@inlined
def pump(m: Machine, r: Rates, p: PolicyState) -> None:
    """Wake the copy thread, if anything is queued."""
    if p.scalars[N_QUEUED]:
        catch_up(m, r, p)
        mach.pump(m, r, p)


@inlined
def landed(m: Machine, r: Rates, p: PolicyState, key: int) -> None:
    """The host waits until the copy of `key` has arrived."""
    m.at[HOST_KEY] = key
    wait(m, r, p, ON_LANDING)
    waited(m, WAIT_LINK)
    spend(m, WAKE, r.wake_ns)


@uncounted
def drain_link(m: Machine, r: Rates, p: PolicyState) -> None:
    """Between two requests: wait until nothing is in the stream of copies."""
    while m.at[N_ISSUED] and not m.at[mach.FAILED]:
        m.at[HOST_KEY] = m.issued[m.at[N_ISSUED] - 1]
        wait(m, r, p, ON_LANDING)
        waited(m, WAIT_LINK)


# Running.


@inlined
def block(m: Machine, r: Rates, kind: int, cost: NDArray[np.int64]) -> None:
    """Run or launch a block that nothing slows down."""
    if m.at[ASYNCHRONOUS]:
        mach.launch(m, r, kind, cost[0], cost[1], 0, -1)
    else:
        spend(m, kind, cost[0])


@inlined
def experts_gpu(m: Machine, r: Rates, b: Blocks, p: PolicyState, layer: int, count: int, tokens: int) -> None:
    """Run or launch resident experts, slower beside CPU experts."""
    format = r.format[layer]
    m.seen[format, mach.SEEN_GPU, count, tokens] = True
    host_ns, gpu_ns = b.experts[format, count, tokens, 0], b.experts[format, count, tokens, 1]
    if m.at[ASYNCHRONOUS]:
        mach.launch(m, r, EXPERTS_GPU, host_ns, gpu_ns, count if b.shares else 0, -1)
        return
    work_ns = max(host_ns, gpu_ns)
    if m.job[CPU, mach.ACTIVE]:
        catch_up(m, r, p)
        start_job(m, r, GPU, work_ns, count)
        wait(m, r, p, ON_GPU)
        work_ns = m.at[NOW] - m.at[HOST]
    spend(m, EXPERTS_GPU, work_ns)


@inlined
def sync(m: Machine, r: Rates, p: PolicyState) -> None:
    """Wait for the GPU; time in which it waited for a copy is the link's."""
    if not m.at[ASYNCHRONOUS]:
        return
    if m.at[N_LAUNCHED]:
        wait(m, r, p, ON_DRAINED)
    end, link_ns = max(m.at[HOST], m.at[FREE_AT]), 0
    for i in range(m.at[N_BLOCKED]):
        link_ns += max(0, min(end, m.blocked[i, 1]) - max(m.at[HOST], m.blocked[i, 0]))
    m.at[N_BLOCKED] = 0
    spend(m, WAIT_GPU, end - m.at[HOST] - link_ns)
    spend(m, WAIT_LINK, link_ns)


@inlined
def copied(
    m: Machine,
    r: Rates,
    b: Blocks,
    p: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    window: bool,
    action: NDArray[np.int8],
) -> None:
    """Run the experts that come over the link, in its order."""
    total, left, at, brought = p.status.shape[1], 0, 0, 0
    for i in range(len(experts)):
        m.done[i] = action[i] == step.ACT_CPU or action[i] == step.ACT_HIT
        left += not m.done[i]
    while left and not m.at[mach.FAILED]:
        settle(m, r, p)
        if at == m.at[N_LOG]:
            wait(m, r, p, ON_ISSUE)
            waited(m, WAIT_ISSUE if m.at[ASYNCHRONOUS] else WAIT_LINK)
            if m.at[ASYNCHRONOUS]:
                spend(m, WAKE, r.host_wake_ns)
            continue
        key = m.log[at]
        at += 1
        for i in range(len(experts)):
            if not m.done[i] and key == layer * total + experts[i]:
                m.done[i] = True
                left -= 1
                if at > brought:
                    brought = m.at[N_LOG]
                    spend(m, EXPERTS_GPU, r.bring_ns)
                _came(m, r, b, p, key, counts[i] if window else 0)


@inlined
def _came(m: Machine, r: Rates, b: Blocks, p: PolicyState, key: int, tokens: int) -> None:
    """Wait for a copy in the link, as far as the host must, and run or launch its expert."""
    layer = key // p.status.shape[1]
    if m.at[ASYNCHRONOUS]:
        late = b.late[r.format[layer], tokens]
        m.seen[r.format[layer], mach.SEEN_GPU, 1, tokens] = True
        mach.launch(m, r, EXPERTS_GPU, late[0], late[1], 1 if b.shares else 0, key)
        return
    if not mach.has_landed(m, key):
        landed(m, r, p, key)
    experts_gpu(m, r, b, p, layer, 1, tokens)


@uncounted
def decode(
    m: Machine,
    r: Rates,
    b: Blocks,
    p: PolicyState,
    rules: Rules,
    split: SplitCosts,
    steps: Steps,
    depth: int,
    step_ns: NDArray[np.int64],
) -> None:
    """A request's decode steps; writes step_ns [S]."""
    layers = steps.demand.shape[1]
    after_cpu = False  # whether the last layer-step waited for the CPU
    for at in range(len(steps.fed)):
        begun, fed, opened = m.at[HOST], steps.fed[at], -1
        if b.drafting:
            block(m, r, DRAFT, b.draft[max(1, fed - 1)])
            sync(m, r, p)
        block(m, r, EMBED, b.embed[fed])
        for layer in range(layers):
            slowed(m, b, after_cpu)
            _routed(m, r, b, p, layer, fed, steps.attention[at], min(depth, layers - 1 - layer))
            settle(m, r, p)
            _close(m, r, p, rules, split, steps, at, opened)
            distinct = demanded(steps, at, layer)
            experts, counts = steps.demand[at, layer, :distinct], steps.counts[at, layer, :distinct]
            action = m.action[layer & 1, :distinct]
            mach.watch(m)
            if not step.demand(p, rules, layer, experts, counts, split, action):
                m.at[mach.FAILED] = 3
                return
            for ahead in range(min(depth, layers - 1 - layer)):
                step.prefetch(p, rules, layer + 1 + ahead, steps.predicted[ahead, at, layer + 1 + ahead])
            after_cpu = _layer_experts(m, r, b, p, layer, experts, counts, fed > 1, action)
            block(m, r, FINISH, b.finish[fed])
            opened = layer
            if not m.at[ASYNCHRONOUS]:
                _finish(m, r, p, rules, split, steps, at, opened)
                opened = -1
        block(m, r, HEAD, b.head[fed])
        sync(m, r, p)
        if b.drafting and b.sample[steps.emitted[at], 0]:
            block(m, r, SAMPLE, b.sample[steps.emitted[at]])
        _finish(m, r, p, rules, split, steps, at, opened)
        step.end_step(p)
        step_ns[at] = m.at[HOST] - begun


@inlined
def demanded(steps: Steps, at: int, layer: int) -> int:
    """How many experts a layer-step demands."""
    distinct = 0
    while distinct < steps.counts.shape[2] and steps.counts[at, layer, distinct] > 0:
        distinct += 1
    return distinct


@inlined
def slowed(m: Machine, b: Blocks, after_cpu: bool) -> None:
    """The host's blocks take longer for what it waited and for the copies that landed since."""
    us = min(b.cold.shape[1] - 1, m.at[IDLE] // 1000)
    m.seen_us[int(after_cpu), us] = True
    spend(m, COLD, b.cold[int(after_cpu), us])
    spend(m, INTERRUPT, m.at[INTERRUPTIONS] * b.interrupt_ns)
    m.at[IDLE] = 0
    m.at[INTERRUPTIONS] = 0


@uncounted
def _routed(
    m: Machine,
    r: Rates,
    b: Blocks,
    p: PolicyState,
    layer: int,
    fed: int,
    attention: NDArray[np.int64],
    depth: int,
) -> None:
    """A layer's blocks until its experts are planned."""
    block(m, r, ATTENTION, attention)
    if b.executes[layer]:
        block(m, r, ROUTE, b.speculated[fed])
    else:
        block(m, r, ROUTE, b.route[fed])
        sync(m, r, p)
    if depth:
        block(m, r, PREDICT, b.predict[fed, depth])
        sync(m, r, p)
    block(m, r, PLAN, b.plan[fed])


@inlined
def _finish(
    m: Machine, r: Rates, p: PolicyState, rules: Rules, split: SplitCosts, steps: Steps, at: int, opened: int
) -> None:
    """End the open layer-step, if any, and queue what that allows."""
    settle(m, r, p)
    _close(m, r, p, rules, split, steps, at, opened)
    pump(m, r, p)


@inlined
def _close(
    m: Machine, r: Rates, p: PolicyState, rules: Rules, split: SplitCosts, steps: Steps, at: int, opened: int
) -> None:
    """The layer-step `opened` (-1: none) of step `at` is done, once its copies have landed."""
    if opened < 0:
        return
    if await_landings(m, r, p):
        spend(m, WAKE, r.wake_ns)
        settle(m, r, p)
    distinct = demanded(steps, at, opened)
    step.finish(p, rules, opened, steps.demand[at, opened, :distinct], m.action[opened & 1, :distinct], split)


@inlined
def await_landings(m: Machine, r: Rates, p: PolicyState) -> bool:
    """Wait for what is coming to the open layer-step; whether there was anything to wait for."""
    late = False
    for i in range(m.at[N_COMING]):
        if not mach.has_landed(m, m.coming[i]):
            late = True
            m.at[HOST_KEY] = m.coming[i]
            wait(m, r, p, ON_LANDING)
            waited(m, WAIT_LINK)
    return late


@inlined
def sort_out(
    m: Machine,
    p: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    window: bool,
    action: NDArray[np.int8],
) -> tuple[int, int, int, int]:
    """Note what is coming over the link; experts of the CPU and their tokens, residents and theirs."""
    on_cpu, hits, cpu_tokens, hit_tokens = 0, 0, 0, 0
    m.at[N_COMING] = 0
    for i in range(len(experts)):
        tokens = counts[i] if window else 0
        if action[i] == step.ACT_CPU:
            on_cpu += 1
            cpu_tokens += tokens
        elif action[i] == step.ACT_HIT:
            hits += 1
            hit_tokens += tokens
        else:
            m.coming[m.at[N_COMING]] = layer * p.status.shape[1] + experts[i]
            m.at[N_COMING] += 1
    return on_cpu, cpu_tokens, hits, hit_tokens


@inlined
def await_cpu(m: Machine, r: Rates, p: PolicyState) -> None:
    """Wait for the CPU's experts, if it still has any."""
    if m.job[CPU, mach.ACTIVE]:
        wait(m, r, p, ON_CPU)
        waited(m, WAIT_CPU)


@inlined
def _layer_experts(
    m: Machine,
    r: Rates,
    b: Blocks,
    p: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    window: bool,
    action: NDArray[np.int8],
) -> bool:
    """CPU experts, hits, copies, CPU results; whether the CPU had any."""
    on_cpu, cpu_tokens, hits, hit_tokens = sort_out(m, p, layer, experts, counts, window, action)
    if on_cpu:
        catch_up(m, r, p)
        mach.start_cpu(m, r, layer, on_cpu, cpu_tokens, False)
    if copies.can_issue(p):
        pump(m, r, p)
        spend(m, PLAN, b.queueing_ns)
    if hits:
        experts_gpu(m, r, b, p, layer, hits, hit_tokens)
    if hits + on_cpu < len(experts):
        copied(m, r, b, p, layer, experts, counts, window, action)
    if on_cpu:
        settle(m, r, p)
        await_cpu(m, r, p)
    return on_cpu > 0
