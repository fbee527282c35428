"""Utility s per expert, 0..K, from the tokens its layer-steps route to it (MoE-SpAc; design: section 5).

The verify pass of speculative decoding counts f = 0..gamma+1 tokens per expert and layer-step, plain decode 0 or 1. The
change is f_t - f_{t-1} (signal delta) or f_t - s (level). s moves by one where the change reaches the expert's
boundary, and the boundary then follows the change.
"""

from __future__ import annotations

import math

from foreload.backend.policy.rules import ADAPT_FLOORED, ADAPT_OFF, LEVEL, Rules
from foreload.backend.policy.state import STEP, PolicyState
from foreload.compiled import uncounted


def start_boundary(gamma: int) -> float:
    """Where both boundaries start with drafts of `gamma` tokens (0: none)."""
    return max(0.5, gamma / 2)


@uncounted
def adapted(theta: float, change: int, rules: Rules) -> float:
    """The boundary after a change of `change` > 0 in its direction; floored as published, or real-valued."""
    if rules.adapt == ADAPT_OFF:
        return theta
    value = (1.0 - rules.rate) * theta + rules.rate * change
    return float(math.floor(value)) if rules.adapt == ADAPT_FLOORED else value


@uncounted
def update_utility(state: PolicyState, rules: Rules, layer: int) -> None:
    """Take in the demand of the layer-step that is ending."""
    now = state.scalars[STEP]
    for expert in range(state.status.shape[1]):
        tokens = state.last_tokens[layer, expert] if state.last_step[layer, expert] == now else 0
        score = state.score[layer, expert]
        change = tokens - (score if rules.signal == LEVEL else state.before[layer, expert])
        state.before[layer, expert] = tokens
        if change > 0:
            theta = state.theta_up[layer, expert]
            if change >= theta and score < rules.levels:
                state.score[layer, expert] = score + 1
            state.theta_up[layer, expert] = adapted(theta, change, rules)
        elif change < 0:
            theta = state.theta_down[layer, expert]
            if -change >= theta and score > 0:
                state.score[layer, expert] = score - 1
            state.theta_down[layer, expert] = adapted(theta, -change, rules)
