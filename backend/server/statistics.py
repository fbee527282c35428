"""What the engine has done for its clients: totals since the start, and the latest tokens."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreload.backend.engine import Engine
from foreload.backend.generation import Generation
from foreload.backend.observe import Marks
from foreload.backend.policy.state import DECODE

RECENT_TOKENS = 256
SNAPSHOT_TOKENS = 32
STALLS = {"wait": "copy", "wait_cpu": "cpu"}
"""Spans of the decoding thread in which it does nothing but wait, and what for."""


class KindTimes(Marks):
    """Adds up the decoding thread's spans by kind instead of keeping them."""

    def __init__(self) -> None:
        super().__init__()
        self.totals_ns: dict[str, int] = {}

    def mark(self, kind: str, layer: int = -1, expert: int = -1) -> None:
        """Add the span since the last mark."""
        now = time.perf_counter_ns()
        self.totals_ns[kind] = self.totals_ns.get(kind, 0) + now - self.since_ns
        self.since_ns = now


@dataclass(frozen=True)
class Snapshot:
    """Counts up to some token."""

    tokens: int  # decode steps' tokens
    counters: NDArray[np.int64]  # [MoE layers, counters] of decode
    times_ns: dict[str, int]


class Statistics:
    """Written by the decoding thread (`refused` and `cancelled` by the desk too); others read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.started = time.monotonic()
        self.finished = self.cancelled = self.failed = self.refused = 0
        self.prompt_tokens = self.generated_tokens = 0
        self.decode_tokens, self.decode_ns = 0, 0  # tokens after the first of their request, and the time between
        self.steps = self.drafted = self.accepted = 0  # of requests that are over
        self.gaps_ns: deque[int] = deque(maxlen=RECENT_TOKENS)
        self.ttfts_ns: deque[int] = deque(maxlen=RECENT_TOKENS)
        self.times = KindTimes()
        self._last_ns: int | None = None
        self._seconds: deque[float] = deque(maxlen=32)
        self.start = self.now()
        self._snapshots = deque([self.start], maxlen=1 + RECENT_TOKENS // SNAPSHOT_TOKENS)
        engine.forward.marks = self.times

    def begin_request(self) -> None:
        """A prompt is fed next."""
        self._last_ns = None

    def token(self) -> None:
        """A token has been chosen."""
        now = time.perf_counter_ns()
        self.generated_tokens += 1
        if self._last_ns is not None:
            self.gaps_ns.append(now - self._last_ns)
            self.decode_ns += now - self._last_ns
            self.decode_tokens += 1
            if self.decode_tokens % SNAPSHOT_TOKENS == 0:
                self._snapshots.append(self.now())
        self._last_ns = now

    def end_request(self, generation: Generation) -> None:
        """A prompt has been answered."""
        self.prompt_tokens += generation.prompt_tokens
        if generation.token_ids:
            self.ttfts_ns.append(generation.ttft_ns)
        for step in generation.steps:
            self.steps += 1
            self.drafted += step.drafted
            self.accepted += step.emitted - 1

    def took(self, seconds: float) -> None:
        """A request was over so long after its arrival."""
        self._seconds.append(seconds)

    def expected_seconds(self, position: int) -> int:
        """When to ask again with `position` requests ahead: from 1 to 60 seconds, by the latest requests."""
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return int(min(60, max(1, round(mean * max(1, position) / 2))))

    def now(self) -> Snapshot:
        """The counts so far."""
        return Snapshot(self.decode_tokens, self._engine.brain.counters[DECODE].copy(), dict(self.times.totals_ns))

    def recent(self) -> tuple[Snapshot, Snapshot]:
        """The latest counts and those about `RECENT_TOKENS` tokens before."""
        return self._snapshots[0], self.now()
