"""Warm start: residents are loaded before the first request, by how often a recording demanded them."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreload.backend.experts.transfer import Copies
from foreload.backend.policy.state import WARM
from foreload.errors import MismatchError
from foreload.shape import ModelShape


@dataclass(frozen=True)
class WarmStart:
    """What a warm start has copied to the device, and how long that took."""

    experts: int
    bytes: int
    ns: int


def warm_counts(path: Path, shape: ModelShape) -> NDArray[np.int64]:
    """Uses of each expert [MoE layers, experts] in a recording or histogram; MismatchError if of another shape."""
    from foreload.traces.histogram import read_histogram

    found = read_histogram(path)
    if found.meta.shape_hash != shape.hash:
        raise MismatchError(
            f"{path}: recorded from model shape {found.meta.shape_hash}, this model is {shape.hash}: "
            "a warm start needs a recording of the same model"
        )
    return found.counts


def warm_start(copies: Copies, expert_bytes: int) -> WarmStart:
    """Load what the brain wants before the first request, in waves through staging."""
    brain, begun = copies.brain, time.perf_counter_ns()
    with copies.lock:
        todo = deque((int(layer), int(expert)) for layer, expert in np.argwhere(brain.warm_targets()))
        phase, copies.phase = copies.phase, WARM
    loaded, every = len(todo), np.ones(brain.shape.experts, np.bool_)
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
    return WarmStart(loaded, loaded * expert_bytes, time.perf_counter_ns() - begun)
