"""Measuring settings on a live engine: the requests of a recording, run again, settings interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from random import Random
from statistics import median

import numpy as np
from numpy.typing import NDArray

from foreload.backend.engine import Engine
from foreload.backend.policy import Counter
from foreload.backend.policy.copied import copied_bytes
from foreload.backend.policy.state import DECODE
from foreload.backend.sampling import Sampling
from foreload.errors import MismatchError
from foreload.settings import Settings
from foreload.traces import schema
from foreload.traces.schema import Trace


@dataclass(frozen=True)
class Request:
    """One recorded request: its prompt and the tokens that followed it, the last of which was not fed in."""

    prompt_ids: list[int]
    followed: list[int]


@dataclass
class Measured:
    """One setting on one engine; times in nanoseconds, one entry per repetition."""

    settings: Settings
    capacity: tuple[int, ...]
    tpot_ns: list[float] = field(default_factory=list)
    ttft_ns: list[float] = field(default_factory=list)
    tokens: int = 0  # tokens that decode steps added, per repetition
    diverged: int = 0  # requests whose text was not the recorded one
    counters: NDArray[np.int64] = field(default_factory=lambda: np.zeros((3, 1, len(Counter)), np.int64))

    def count(self, counter: Counter) -> int:
        """A decode counter over all layers, of the last repetition."""
        return int(self.counters[DECODE, :, counter].sum())

    @property
    def tpot_ms(self) -> float:
        """Median over the repetitions of the mean time per decode token."""
        return median(self.tpot_ns) / 1e6

    @property
    def ttft_ms(self) -> float:
        """Median over the repetitions of the mean time to the first token."""
        return median(self.ttft_ns) / 1e6

    @property
    def hit_rate(self) -> float:
        """Experts resident when demanded, of all demanded in decode."""
        demanded = self.count(Counter.HITS) + self.count(Counter.LATE) + self.count(Counter.MISSES)
        return self.count(Counter.HITS) / demanded if demanded else 0.0

    def bytes_per_token(self, layer_bytes: Sequence[int]) -> float:
        """Bytes copied to the device per decode token; layer_bytes [MoE layers] of one expert each."""
        return copied_bytes(self.counters[DECODE], layer_bytes) / self.tokens


def recorded_requests(trace: Trace, engine: Engine, numbers: Sequence[int]) -> list[Request]:
    """The requests of a recording as they can be run again.

    Of verify steps those tokens followed that were accepted. Raises MismatchError if the recording is of other weights,
    or holds a request without prompt or decode steps.
    """
    if trace.meta.weights_hash != engine.checkpoint.weights_hash:
        raise MismatchError(
            f"trace: recorded from weights {trace.meta.weights_hash}, this model has {engine.checkpoint.weights_hash}"
        )
    found = []
    for number in numbers:
        rows = trace.request == number
        prompt = trace.token_id[rows & (trace.phase == schema.PREFILL)].tolist()
        followed = trace.token_id[rows & (trace.phase != schema.PREFILL) & trace.accepted].tolist()
        if not prompt or not followed:
            raise MismatchError(f"trace: request {number} has no prompt or no decode steps: it cannot be run again")
        found.append(Request(prompt, followed))
    return found


def recorded_sampling(trace: Trace) -> Sampling:
    """How the tokens of a recording were chosen; what it says of drafts is left out."""
    return Sampling(**{f.name: trace.meta.sampling[f.name] for f in fields(Sampling) if f.name in trace.meta.sampling})


def measure(
    engine: Engine,
    trace: Trace,
    numbers: Sequence[int],
    settings: Sequence[Settings],
    repeats: int,
    progress: Callable[[int, int], None] | None = None,
    seed: int | None = None,
) -> list[Measured]:
    """Run the recorded requests `numbers` under each of `settings`, `repeats` times, settings taking turns.

    With a `seed` each round of turns has an order of its own, drawn by it. Each turn starts with an empty cache, like a
    simulation. The engine keeps the last settings it was given before.
    """
    requests = recorded_requests(trace, engine, numbers)
    sampling = recorded_sampling(trace)
    before = engine.settings
    found = [Measured(one, ()) for one in settings]
    rng, order = Random(seed), list(range(len(settings)))
    try:
        for turn in range(repeats * len(settings)):
            if seed is not None and turn % len(settings) == 0:
                rng.shuffle(order)
            into = found[order[turn % len(settings)]]
            engine.apply(into.settings)
            engine.reset_cache()
            into.capacity = engine.capacity
            _turn(engine, requests, sampling, into)
            if progress is not None:
                progress(turn + 1, repeats * len(settings))
    finally:
        engine.apply(before)
    return found


def _turn(engine: Engine, requests: Sequence[Request], sampling: Sampling, into: Measured) -> None:
    start = engine.brain.counters.copy()
    time_ns, tokens = 0, 0
    firsts: list[int] = []
    into.diverged = 0
    for request in requests:
        done = engine.generate(request.prompt_ids, len(request.followed) + 1, sampling, stop=False)
        time_ns, tokens = time_ns + done.decode_ns, tokens + done.decode_tokens
        firsts.append(done.ttft_ns)
        into.diverged += done.token_ids[:-1] != request.followed
    into.tokens = tokens
    into.tpot_ns.append(time_ns / tokens)
    into.ttft_ns.append(sum(firsts) / len(firsts))
    into.counters = engine.brain.counters - start
