"""A warm start and prompts, compiled (see `simulator/prefill.py`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import prompt
from foreload.backend.policy.rules import Rules
from foreload.backend.policy.state import ABSENT, KEPT, LANDED, PolicyState
from foreload.compiled import uncounted
from foreload.simulator.compiled import machine as mach
from foreload.simulator.compiled.host import Blocks, block, landed, pump, settle, sync
from foreload.simulator.compiled.machine import (
    EMBED,
    HEAD,
    IDLE,
    INTERRUPTIONS,
    PREFILL_EXPERT,
    PREFILL_LAYER,
    Machine,
)
from foreload.simulator.compiled.rates import Rates


@uncounted
def warm_start(
    m: Machine, r: Rates, p: PolicyState, rules: Rules, layers: NDArray[np.int64], experts: NDArray[np.int64]
) -> None:
    """Load `experts` of `layers` into persistent slots."""
    m.target[:] = True
    asked, total = 0, p.status.shape[1]
    for served in range(len(layers)):
        while asked < len(layers) and prompt.prefill_fetch(p, layers[asked], experts[asked]):
            asked += 1
        pump(m, r, p)
        if asked == served:
            m.at[mach.FAILED] = 3
            return
        if p.status[layers[served], experts[served]] != LANDED:
            landed(m, r, p, layers[served] * total + experts[served])
        settle(m, r, p)
        prompt.prefill_done(p, rules, layers[served], experts[served], m.target)
    m.at[IDLE] = 0
    m.at[INTERRUPTIONS] = 0


@uncounted
def prefill(
    m: Machine, r: Rates, b: Blocks, p: PolicyState, rules: Rules, chunk_tokens: int, tokens: NDArray[np.int32]
) -> None:
    """A prompt's experts, tokens [P, L, k], in chunks; the last one fills the cache."""
    early = 0
    for start in range(0, len(tokens), chunk_tokens):
        chunk = tokens[start : start + chunk_tokens]
        block(m, r, EMBED, b.embed[1])
        for layer in range(tokens.shape[1]):
            m.counts[:] = 0
            for token in range(len(chunk)):
                for rank in range(chunk.shape[2]):
                    m.counts[chunk[token, layer, rank]] += 1
            m.seen_tokens[0, len(chunk)] = True
            block(m, r, PREFILL_LAYER, b.prefill_layer[len(chunk)])
            sync(m, r, p)
            early = _layer(m, r, b, p, rules, layer, start + chunk_tokens >= len(tokens), early)
        block(m, r, HEAD, b.head[1])
        sync(m, r, p)


@uncounted
def _layer(
    m: Machine,
    r: Rates,
    b: Blocks,
    p: PolicyState,
    rules: Rules,
    layer: int,
    last: bool,
    early: int,
) -> int:
    """One layer on a chunk. `early`: how many of `m.early` were copied for it early; returns the same of the next."""
    counts, following = m.counts, (layer + 1) % p.status.shape[0]
    m.target[:] = False
    prompt.look_up(p, layer, counts)
    if last:
        prompt.prefill_targets(p, rules, layer, counts, m.target)
    n = sent = _to_copy(m, p, layer, early)
    for expert in range(len(counts)):
        if counts[expert] and p.status[layer, expert] == ABSENT:
            m.todo[n] = expert
            n += 1
    ahead = routed = 0
    for tokens in counts:
        routed += tokens
    if following > layer or (following < layer and not last):
        ahead = prompt.prefill_ahead(p, following, routed, m.ahead)
    mach.watch(m)
    sent, soon = _queue(m, r, p, layer, sent, n, following, 0, ahead)
    _residents(m, r, b, p, layer)
    served = 0
    while served < n:
        if sent == served:
            m.at[mach.FAILED] = 3
            return 0
        served = _serve(m, r, b, p, rules, layer, served, sent)
        sent, soon = _queue(m, r, p, layer, sent, n, following, soon, ahead)
    for at in range(soon):
        m.early[at] = m.ahead[at]
    return soon


@uncounted
def _to_copy(m: Machine, p: PolicyState, layer: int, early: int) -> int:
    """What was copied for the layer early, and is still there, is served first; returns how many that are."""
    n = 0
    for at in range(early):
        if p.status[layer, m.early[at]] not in (ABSENT, KEPT):
            m.todo[n] = m.early[at]
            n += 1
    return n


@uncounted
def _queue(
    m: Machine, r: Rates, p: PolicyState, layer: int, sent: int, n: int, following: int, soon: int, ahead: int
) -> tuple[int, int]:
    """Queue what staging has room for; returns how many of `m.todo` and of `m.ahead` have been queued."""
    while sent < n and prompt.prefill_fetch(p, layer, m.todo[sent], False):
        sent += 1
    while sent == n and soon < ahead and prompt.prefill_fetch(p, following, m.ahead[soon], True):
        soon += 1
    pump(m, r, p)
    return sent, soon


@uncounted
def _serve(m: Machine, r: Rates, b: Blocks, p: PolicyState, rules: Rules, layer: int, first: int, sent: int) -> int:
    """Wait for the first copied expert; run what has arrived, keep it or give its slot back. Returns who is next."""
    settle(m, r, p)
    if p.status[layer, m.todo[first]] != LANDED:
        landed(m, r, p, layer * len(m.counts) + m.todo[first])
        settle(m, r, p)
    upto, host_ns, work_ns = first, -1, 0
    while upto < sent and p.status[layer, m.todo[upto]] == LANDED:
        host_ns, work_ns = _expert(m, r, b, m.counts[m.todo[upto]], host_ns, work_ns)
        upto += 1
    _launch(m, r, b, host_ns, work_ns)
    settle(m, r, p)
    for at in range(first, upto):
        prompt.prefill_done(p, rules, layer, m.todo[at], m.target)
    return upto


@uncounted
def _residents(m: Machine, r: Rates, b: Blocks, p: PolicyState, layer: int) -> None:
    """Run the demanded experts that are resident."""
    host_ns, work_ns = -1, 0
    for expert in range(len(m.counts)):
        if p.status[layer, expert] == KEPT:
            host_ns, work_ns = _expert(m, r, b, m.counts[expert], host_ns, work_ns)
    _launch(m, r, b, host_ns, work_ns)


@uncounted
def _expert(m: Machine, r: Rates, b: Blocks, tokens: int, host_ns: int, work_ns: int) -> tuple[int, int]:
    """Run an expert that tokens have, or add it to a launch, whose time on host (-1: none yet) and GPU is returned."""
    if tokens == 0:
        return host_ns, work_ns
    m.seen_tokens[1, tokens] = True
    cost = b.prefill_expert[tokens]
    if not b.grouped:
        block(m, r, PREFILL_EXPERT, cost)
        return host_ns, work_ns
    return max(host_ns, cost[0]), work_ns + cost[1]


@uncounted
def _launch(m: Machine, r: Rates, b: Blocks, host_ns: int, work_ns: int) -> None:
    if host_ns >= 0:
        mach.launch(m, r, PREFILL_EXPERT, host_ns, work_ns, 0, -1)
