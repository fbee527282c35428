"""Eviction orders (design: section 3). Each is total: of two experts exactly one is preferred.

lru: (last step used, tokens in that step). lfu: (uses in this request, last step). lfru: (uses / (steps since last
use + 1), last step). aged: (uses that fade, last step). static: count in the warm-start recording. utility: (s, last
step). random: a hash of step, layer and id. belady: the step of the next use, known to an oracle alone. The smaller
goes first; then, in a shared pool, what is needed latest: the largest (layer - computing layer) mod L; then the larger
id.

In a shared pool "last step" counts a layer's own layer-steps: what the layer used in its last one is as recent for a
layer that this step has not reached as for one that it has passed. In a pool of one layer that changes nothing.
"""

from __future__ import annotations

from foreload.backend.policy.rules import (
    AGED,
    BELADY,
    LFRU,
    LFU,
    LRU,
    POOL_SHARED,
    RANDOM,
    STATIC,
    UTILITY,
    Rules,
)
from foreload.backend.policy.state import KEPT, LAYER, N_UNFILLED, NEVER, STEP, WORST_UNKNOWN, PolicyState
from foreload.compiled import inlined

_HASH_BITS = 0xFFFFFFFF
ONE_USE = 1 << 20
"""What a use weighs when it happens, for `aged` (LRFU: Lee et al., IEEE Transactions on Computers 50(12), 2001)."""


@inlined
def _mix(value: int) -> int:
    """A bijective hash of 32 bits whose products stay below 2**63, so that compiled and plain code agree."""
    value = ((value ^ (value >> 16)) * 0x45D9F3B) & _HASH_BITS
    value = ((value ^ (value >> 16)) * 0x45D9F3B) & _HASH_BITS
    return int(value ^ (value >> 16))


@inlined
def random_rank(step: int, layer: int, expert: int, seed: int = 0) -> int:
    """The expert's place in this step's random order, 32 bits."""
    value = _mix(((seed & 0x7FFFFFFF) * 0x9E3779B1 + expert) & _HASH_BITS)
    value = _mix(value ^ (step & _HASH_BITS))
    return _mix(value ^ (layer & _HASH_BITS))


@inlined
def age(state: PolicyState, layer: int, expert: int) -> int:
    """Layer-steps of its layer since the expert was demanded; 0: in the last one."""
    last = state.last_step[layer, expert]
    return int(state.begun[layer] - last) if last >= 0 else NEVER


@inlined
def faded(weight: int, steps: int, half_life: int) -> int:
    """weight / 2 ** (steps / half_life) in whole numbers, so that compiled and plain code agree; within 2e-4 of it.

    The fraction of a half-life goes by the series of 2 ** -x, its last term such that a whole one leaves exactly half.
    """
    x = ((steps % half_life) << 20) // half_life
    left = (1 << 20) - ((x * (726817 - ((x * (251896 - ((x * (58200 - ((x * 8833) >> 20))) >> 20))) >> 20))) >> 20)
    return int(((weight * left) >> 20) >> min(steps // half_life, 62))


@inlined
def aged(state: PolicyState, rules: Rules, layer: int, expert: int) -> int:
    """The fading uses of an expert at its layer's last layer-step; those of a warm start fade from the beginning."""
    steps = state.begun[layer] - state.last_step[layer, expert]
    return faded(state.weight[layer, expert], steps, rules.half_life)


@inlined
def _utility(state: PolicyState, rules: Rules, layer: int, expert: int) -> int:
    done = state.begun[layer] == state.scalars[STEP] and layer != state.scalars[LAYER]
    return 0 if rules.reset_done and done else int(state.score[layer, expert])


@inlined
def _merit(state: PolicyState, rules: Rules, layer: int, expert: int) -> int:
    """What the order looks at first, except for `lfru`: the larger stays."""
    order = rules.eviction
    if order == LRU:
        return -age(state, layer, expert)
    if order == LFU:
        return int(state.uses[layer, expert])
    if order == AGED:
        return aged(state, rules, layer, expert)
    if order == STATIC:
        return int(state.warm[layer, expert])
    if order == UTILITY:
        return _utility(state, rules, layer, expert)
    if order == RANDOM:
        return random_rank(state.begun[layer], layer, expert)
    return int(-(state.next_use[layer, expert] * state.status.shape[0] + layer))


@inlined
def compare(state: PolicyState, rules: Rules, layer_a: int, a: int, layer_b: int, b: int) -> int:
    """Above 0 if expert `a` stays rather than `b`, below 0 if `b` does, 0 if the order's own key is the same."""
    order = rules.eviction
    age_a, age_b = age(state, layer_a, a), age(state, layer_b, b)
    if order == LFRU:
        first = state.uses[layer_a, a] * (age_b + 1) - state.uses[layer_b, b] * (age_a + 1)
    else:
        first = _merit(state, rules, layer_a, a) - _merit(state, rules, layer_b, b)
    if first != 0 or order in (STATIC, RANDOM, BELADY):
        return int(first)
    if order == LRU:
        return int(state.last_tokens[layer_a, a] - state.last_tokens[layer_b, b])
    return int(age_b - age_a)


@inlined
def distance(state: PolicyState, layer: int) -> int:
    """Layer-steps until `layer` computes; 0: it does now."""
    return int((layer - state.scalars[LAYER]) % state.status.shape[0])


@inlined
def prefers(state: PolicyState, rules: Rules, layer_a: int, a: int, layer_b: int, b: int) -> bool:
    """Whether expert `a` of `layer_a` stays rather than `b` of `layer_b`."""
    first = compare(state, rules, layer_a, a, layer_b, b)
    if first != 0:
        return bool(first > 0)
    if layer_a != layer_b:
        return distance(state, layer_a) < distance(state, layer_b)
    return a < b


@inlined
def worst_of_layer(state: PolicyState, rules: Rules, layer: int) -> int:
    """The resident of `layer` that goes first, or -1. Found again only after something in the layer has changed."""
    if state.worst[layer] == WORST_UNKNOWN:
        worst = -1
        for expert in range(state.status.shape[1]):
            if state.status[layer, expert] == KEPT and (
                worst < 0 or prefers(state, rules, layer, worst, layer, expert)
            ):
                worst = expert
        state.worst[layer] = worst
    return int(state.worst[layer])


@inlined
def worst_kept(state: PolicyState, rules: Rules, layer: int, frozen: int = -1) -> int:
    """Key of the resident that makes room for an expert of `layer`, or -1; none of layer `frozen` does."""
    experts = state.status.shape[1]
    if rules.pool != POOL_SHARED:
        worst = worst_of_layer(state, rules, layer) if layer != frozen else -1
        return layer * experts + worst if worst >= 0 else -1
    found = -1
    for other in range(state.status.shape[0]):
        worst = worst_of_layer(state, rules, other) if other != frozen else -1
        if worst >= 0 and (found < 0 or prefers(state, rules, found // experts, found % experts, other, worst)):
            found = other * experts + worst
    return found


@inlined
def has_room(state: PolicyState, rules: Rules, layer: int) -> bool:
    """Whether an expert of `layer` finds a persistent slot that nobody holds."""
    if rules.pool == POOL_SHARED:
        return bool(state.scalars[N_UNFILLED] > 0)
    return bool(state.kept[layer] < state.capacity[layer])
