"""Warm start: residents are loaded before the first request, by how often a recording demanded them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreload.backend.experts.transfer import Copies
from foreload.backend.policy.state import WARM


@dataclass(frozen=True)
class WarmStart:
    """What a warm start has copied to the device, and how long that took."""

    experts: int
    bytes: int
    ns: int


def warm_start(copies: Copies, layer_bytes: Sequence[int]) -> WarmStart:
    """Load what the brain wants before the first request, in waves through staging; bytes of an expert per layer."""
    brain, begun = copies.brain, time.perf_counter_ns()
    with copies.lock:
        todo = deque((int(layer), int(expert)) for layer, expert in np.argwhere(brain.warm_targets()))
        phase, copies.phase = copies.phase, WARM
    loaded, size = len(todo), sum(layer_bytes[layer] for layer, _ in todo)
    every = np.ones(brain.shape.experts, np.bool_)
    waiting: deque[tuple[int, int]] = deque()
    try:
        while todo or waiting:
            with copies.lock:
                while todo and brain.prefill_fetch(*todo[0]):
                    waiting.append(todo.popleft())
                copies.kick()
            layer, expert = waiting.popleft()
            copies.wait_landed([layer * brain.shape.experts + expert])
            with copies.lock:
                brain.prefill_done(layer, expert, every)
    finally:
        copies.phase = phase
    return WarmStart(loaded, size, time.perf_counter_ns() - begun)
