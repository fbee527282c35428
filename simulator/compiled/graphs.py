"""Decode steps of an engine that launches graphs, compiled (see `graph_steps`)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import copies, step
from foreload.backend.policy.rules import Rules
from foreload.backend.policy.split import SplitCosts, is_read
from foreload.backend.policy.state import KEPT, PolicyState
from foreload.compiled import inlined, uncounted
from foreload.simulator.compiled import host
from foreload.simulator.compiled import machine as mach
from foreload.simulator.compiled.host import Blocks, Steps
from foreload.simulator.compiled.machine import (
    ATTENTION,
    DRAFT,
    EMBED,
    FINISH,
    HEAD,
    HOST,
    N_COMING,
    PLAN,
    SAMPLE,
    WAIT_GPU,
    Machine,
    spend,
)
from foreload.simulator.compiled.rates import Rates


class Graphs(NamedTuple):
    """Nanoseconds of what graphs add to `Blocks`; F, D as there."""

    extra: NDArray[np.int64]  # [2] entering a layer beyond attention; [1]: of one executing predictions
    foresee: NDArray[np.int64]  # [F + 1, D + 1, 2] looking ahead, on the host and on the device
    issue_ns: int
    submit_ns: int
    ahead_ns: int  # as in `graph_costs.GraphCosts`


@uncounted
def decode(
    m: Machine,
    r: Rates,
    b: Blocks,
    g: Graphs,
    p: PolicyState,
    rules: Rules,
    split: SplitCosts,
    steps: Steps,
    depth: int,
    step_ns: NDArray[np.int64],
) -> None:
    """A request's decode steps; writes step_ns [S]."""
    layers, after_cpu = steps.demand.shape[1], False
    for at in range(len(steps.fed)):
        begun, fed = m.at[HOST], steps.fed[at]
        if b.drafting:
            host.block(m, r, DRAFT, b.draft[max(1, fed - 1)])
            host.sync(m, r, p)
        if steps.whole[at] and _all_kept(p):
            if not _tell(p, rules, split, steps, at, m.action):
                m.at[mach.FAILED] = 3
                return
            spend(m, HEAD, steps.whole[at])
        else:
            spend(m, EMBED, b.embed[fed, 0])
            host.settle(m, r, p)
            _enter(m, r, b, g, steps, at, 0, -1)
            for layer in range(layers):
                host.sync(m, r, p)
                host.slowed(m, b, after_cpu)
                after_cpu = _layer(m, r, b, g, p, rules, split, steps, at, layer, depth)
                if m.at[mach.FAILED]:
                    return
            spend(m, HEAD, b.head[fed, 0])
            host.sync(m, r, p)
        if b.drafting and b.sample[steps.emitted[at], 0]:
            host.block(m, r, SAMPLE, b.sample[steps.emitted[at]])
        step.end_step(p)
        step_ns[at] = m.at[HOST] - begun


@uncounted
def _all_kept(p: PolicyState) -> bool:
    for layer in range(p.status.shape[0]):
        for expert in range(p.status.shape[1]):
            if p.status[layer, expert] != KEPT:
                return False
    return True


@uncounted
def _tell(p: PolicyState, rules: Rules, split: SplitCosts, steps: Steps, at: int, actions: NDArray[np.int8]) -> bool:
    """The brain hears of the demand of a step of one launch; False if it has no slot left."""
    for layer in range(steps.demand.shape[1]):
        distinct = host.demanded(steps, at, layer)
        experts, counts = steps.demand[at, layer, :distinct], steps.counts[at, layer, :distinct]
        if not step.demand(p, rules, layer, experts, counts, split, actions[0, :distinct]):
            return False
        step.finish(p, rules, layer, experts, actions[0, :distinct], split)
    return True


@inlined
def _enter(m: Machine, r: Rates, b: Blocks, g: Graphs, steps: Steps, at: int, layer: int, launched: int) -> None:
    """Launch what enters a layer or, behind the last one, ends the step.

    `launched`: it was then, and what it waited for of CPU experts is there now; -1: it was not.
    """
    layers, fed = steps.demand.shape[1], steps.fed[at]
    gpu_ns = b.head[fed, 1]
    if layer < layers:
        gpu_ns = max(1, steps.attention[at, 1] + g.extra[int(b.executes[layer])])
    if launched < 0:
        mach.launch(m, r, ATTENTION, steps.attention[at, 0], gpu_ns, 0, -1)
    else:
        rest_ns = mach.slowed_ns(m, r, max(1, gpu_ns - g.ahead_ns))
        mach.queued(m, r, launched, m.at[HOST] + rest_ns, gpu_ns, 0, -1)


@inlined
def _issue(m: Machine, r: Rates, g: Graphs, p: PolicyState) -> None:
    """Issue what the window admits, on the host's time."""
    if copies.can_issue(p):
        host.catch_up(m, r, p)
        spend(m, PLAN, mach.pump(m, r, p) * g.issue_ns)


@inlined
def _layer(
    m: Machine,
    r: Rates,
    b: Blocks,
    g: Graphs,
    p: PolicyState,
    rules: Rules,
    split: SplitCosts,
    steps: Steps,
    at: int,
    layer: int,
    depth: int,
) -> bool:
    """A layer-step from its routing to its end; whether the CPU had any of its experts."""
    fed, depth = steps.fed[at], min(depth, steps.demand.shape[1] - 1 - layer)
    seen_ns = mach.goes_on(m, r, g.foresee[fed, depth, 1]) if depth else 0
    spend(m, PLAN, b.plan[fed, 0])
    host.settle(m, r, p)
    mach.watch(m)
    distinct = host.demanded(steps, at, layer)
    experts, counts = steps.demand[at, layer, :distinct], steps.counts[at, layer, :distinct]
    action = m.action[0, :distinct]
    if not step.demand(p, rules, layer, experts, counts, split, action):
        m.at[mach.FAILED] = 3
        return False
    on_cpu = _begin(m, r, b, g, p, layer, experts, counts, fed > 1, action)
    if depth:
        _foresee(m, r, g, p, rules, steps, at, layer, depth, seen_ns)
    _issue(m, r, g, p)
    if m.at[N_COMING]:
        host.copied(m, r, b, p, layer, experts, counts, fed > 1, action)
    host.settle(m, r, p)
    launched = _await_cpu(m, r, p, steps.attention[at, 0]) if on_cpu else -1
    _enter(m, r, b, g, steps, at, layer + 1, launched)
    host.settle(m, r, p)
    host.await_landings(m, r, p)
    spend(m, FINISH, b.finish[fed, 0])
    host.settle(m, r, p)
    step.finish(p, rules, layer, experts, action, split)
    _issue(m, r, g, p)
    return launched >= 0


@inlined
def _begin(
    m: Machine,
    r: Rates,
    b: Blocks,
    g: Graphs,
    p: PolicyState,
    layer: int,
    experts: NDArray[np.int32],
    counts: NDArray[np.int32],
    window: bool,
    action: NDArray[np.int8],
) -> int:
    """Begin a layer-step's residents and CPU experts; how many the CPU has."""
    on_cpu, cpu_tokens, hits, hit_tokens = host.sort_out(m, p, layer, experts, counts, window, action)
    if hits:
        host.experts_gpu(m, r, b, p, layer, hits, hit_tokens)
    if on_cpu:
        host.catch_up(m, r, p)
        read = False
        for i in range(len(experts)):
            read = read or (action[i] == step.ACT_CPU and is_read(p, layer, experts[i]))
        mach.start_cpu(m, r, layer, on_cpu, cpu_tokens, read)
        spend(m, PLAN, g.submit_ns)
        host.settle(m, r, p)
    return int(on_cpu)


@inlined
def _foresee(
    m: Machine,
    r: Rates,
    g: Graphs,
    p: PolicyState,
    rules: Rules,
    steps: Steps,
    at: int,
    layer: int,
    depth: int,
    seen_ns: int,
) -> None:
    """Tell the brain of predictions once the device has made them."""
    _issue(m, r, g, p)
    spend(m, WAIT_GPU, max(0, seen_ns - m.at[HOST]))
    spend(m, PLAN, g.foresee[steps.fed[at], depth, 0])
    host.settle(m, r, p)
    for ahead in range(depth):
        step.prefetch(p, rules, layer + 1 + ahead, steps.predicted[ahead, at, layer + 1 + ahead])
    m.at[mach.TOLD] = m.at[mach.NOW]


@inlined
def _await_cpu(m: Machine, r: Rates, p: PolicyState, launch_ns: int) -> int:
    """Launch what follows, in `launch_ns`, to wait for the results of CPU experts; when it was, once they are there."""
    launched = m.at[HOST]
    spend(m, ATTENTION, launch_ns)
    host.settle(m, r, p)
    host.await_cpu(m, r, p)
    host.settle(m, r, p)
    return int(launched)
