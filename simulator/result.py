"""What a simulation returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import Counter
from foreload.backend.policy.copied import COPIES, counted_bytes
from foreload.backend.policy.state import WARM
from foreload.settings import Settings
from foreload.simulator.clock import STALLS
from foreload.simulator.timeline import TimelineEvent
from foreload.simulator.workload import Request

WARM_TOKENS = 16
"""Decode tokens that count as cold (of the run) or as after prefill (of a request)."""
COLD, AFTER_PREFILL, STEADY = 0, 1, 2


@dataclass(frozen=True)
class SimResult:
    """One simulated run; N decode tokens, Q requests, L MoE layers. All figures are simulated."""

    settings: Settings
    capacity: tuple[int, ...]
    token_ns: NDArray[np.int64]  # [N]
    token_part: NDArray[np.int8]  # [N] COLD, AFTER_PREFILL or STEADY
    steps: int  # decode steps; a verify step may add several tokens
    ttft_ns: NDArray[np.int64]  # [Q] prompt until the first token is known; 0 without a recorded prompt
    time_ns: Mapping[str, int]  # decode, by kind of work or wait; sums to total_ns exactly
    prefill_time_ns: Mapping[str, int]  # the same of all prompts; sums to ttft_ns
    counters: NDArray[np.int64]  # [3 phases, L, Counter], in experts
    layer_bytes: tuple[int, ...]  # [L] of one expert
    copy_ns: tuple[int, ...]  # [L] of one expert's copy, alone
    warm_ns: int  # loading residents before the first request; 0 without a warm start
    sources: Mapping[str, str]  # probe -> where its figures come from, the worst
    timeline: tuple[TimelineEvent, ...] = ()

    @property
    def tokens(self) -> int:
        """Decode tokens."""
        return len(self.token_ns)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a decode step adds; 0 without any."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def total_ns(self) -> int:
        """Decode time of all tokens."""
        return int(self.token_ns.sum())

    @property
    def tpot_ns(self) -> float:
        """Mean time per decode token; 0 without any."""
        return float(self.token_ns.mean()) if self.tokens else 0.0

    def part_ns(self, part: int) -> float | None:
        """Mean time per token of COLD, AFTER_PREFILL or STEADY; None if there are none."""
        chosen = self.token_ns[self.token_part == part]
        return float(chosen.mean()) if len(chosen) else None

    @property
    def stall_ns(self) -> dict[str, int]:
        """Decode time in which neither host nor GPU works, by cause."""
        return {kind: self.time_ns.get(kind, 0) for kind in STALLS}

    def count(self, counter: Counter, phase: int = 0) -> int:
        """A counter over all layers."""
        return int(self.counters[phase, :, counter].sum())

    @cached_property
    def demanded(self) -> int:
        """Experts demanded in decode."""
        return self.count(Counter.HITS) + self.count(Counter.LATE) + self.count(Counter.MISSES)

    @property
    def warm_experts(self) -> int:
        """Experts loaded before the first request."""
        return self.count(Counter.FETCHED, WARM)

    @property
    def hit_rate(self) -> float:
        """Experts resident when demanded, of all demanded in decode; 0 without any."""
        return self.count(Counter.HITS) / self.demanded if self.demanded else 0.0

    def bytes_per_token(self, *counters: Counter) -> float:
        """Bytes of the experts in `counters` per decode token: by default all that the link carried."""
        chosen = counters or COPIES
        return self._bytes(*chosen) / self.tokens if self.tokens else 0.0

    def _bytes(self, *counters: Counter, phase: int = 0) -> int:
        return counted_bytes(self.counters[phase], self.layer_bytes, counters)

    @property
    def link_ns(self) -> float:
        """Time per decode token that copies keep the link busy, nothing beside them; 0 without tokens."""
        return counted_bytes(self.counters[0], self.copy_ns, COPIES) / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The figures as JSON values, times in milliseconds."""
        parts = {"cold": COLD, "after_prefill": AFTER_PREFILL, "steady": STEADY}
        means = {name: self.part_ns(part) for name, part in parts.items()}
        tokens = max(1, self.tokens)
        return {
            "tokens": self.tokens,
            "tokens_per_step": self.tokens_per_step,
            "tpot_ms": self.tpot_ns / 1e6,
            "tpot_parts_ms": {name: None if ns is None else ns / 1e6 for name, ns in means.items()},
            "ttft_ms": [ns / 1e6 for ns in self.ttft_ns.tolist()],
            "warm_start": {"bytes": self._bytes(Counter.FETCHED, phase=WARM), "ms": self.warm_ns / 1e6},
            "hit_rate": self.hit_rate,
            "bytes_per_token": self.bytes_per_token(),
            "link_busy_ms_per_token": self.link_ns / 1e6,
            "bytes_wasted_per_token": self.bytes_per_token(Counter.WASTED),
            "time_per_token_ms": {kind: ns / tokens / 1e6 for kind, ns in sorted(self.time_ns.items())},
            "stall_per_token_ms": {kind: ns / tokens / 1e6 for kind, ns in self.stall_ns.items()},
            "counters": {c.name.lower(): self.counters[0, :, c].tolist() for c in Counter},
            "sources": dict(self.sources),
        }


def joined(results: Sequence[SimResult]) -> SimResult:
    """One result of several runs of the same settings, each from a cold start: times and counts together."""
    first = results[0]
    if len(results) == 1:
        return first
    kinds = {kind for result in results for kind in (*result.time_ns, *result.prefill_time_ns)}
    severity = ("measured", "interpolated", "extrapolated", "assumed")
    sources: dict[str, str] = {}
    for probe, source in (pair for result in results for pair in result.sources.items()):
        sources[probe] = max(source, sources.get(probe, severity[0]), key=severity.index)
    return replace(
        first,
        token_ns=np.concatenate([result.token_ns for result in results]),
        token_part=np.concatenate([result.token_part for result in results]),
        ttft_ns=np.concatenate([result.ttft_ns for result in results]),
        steps=sum(result.steps for result in results),
        time_ns={kind: sum(result.time_ns.get(kind, 0) for result in results) for kind in sorted(kinds)},
        prefill_time_ns={kind: sum(r.prefill_time_ns.get(kind, 0) for r in results) for kind in sorted(kinds)},
        counters=np.sum([result.counters for result in results], axis=0),
        warm_ns=sum(result.warm_ns for result in results),
        sources=dict(sorted(sources.items())),
        timeline=(),
    )


def token_parts(request_of_token: NDArray[np.int64]) -> NDArray[np.int8]:
    """COLD, AFTER_PREFILL or STEADY for each decode token, given its request's place in the run; [N]."""
    parts = np.full(len(request_of_token), STEADY, np.int8)
    for request in np.unique(request_of_token):
        parts[np.flatnonzero(request_of_token == request)[:WARM_TOKENS]] = AFTER_PREFILL
    parts[:WARM_TOKENS] = COLD
    return parts


def owned(requests: Sequence[Request]) -> NDArray[np.int64]:
    """The place in the run of each decode token's request, [N]."""
    return np.repeat(np.arange(len(requests)), [request.tokens for request in requests])


def shared_ns(step_ns: Sequence[int], emitted: Sequence[int]) -> list[int]:
    """The time of each token: its step's, shared by the tokens that the step added; a remainder is the first ones'."""
    shared = []
    for time_ns, tokens in zip(step_ns, emitted, strict=True):
        each, left = divmod(time_ns, tokens)
        shared += [each + (n < left) for n in range(tokens)]
    return shared
