"""Hit rate against slots: every policy and Belady's MIN with bypass, each at every slot count in one pass.

All keep, after a layer-step, the first C of residents and demanded in a total order that does not depend on C. So what
C slots hold is part of what C + 1 hold (by induction: at most C others precede an expert), and one stack per layer
holds the residents of every C: its first C. The replay, which asks the brain's functions, agrees at every slot count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from foreload.backend.policy.rules import AGED, BELADY, LFRU, LFU, LRU, RANDOM
from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.simulator.stacks import count_demand, layer_hits
from foreload.traces.schema import PREFILL, Trace, TraceMeta

ORDERS = {"lru": LRU, "lfu": LFU, "lfru": LFRU, "aged": AGED, "random": RANDOM, "belady": BELADY}
POLICIES = ("belady", "lru", "lfu", "lfru", "aged", "static", "random")
MAX_TOKENS = 50_000
"""Decode rows that `curve_steps` keeps: longer recordings are judged by their beginning."""


@dataclass(frozen=True)
class Steps:
    """Demand in order: R rows in S steps. A request's prompt is one step, whose loads are not counted."""

    meta: TraceMeta
    experts: NDArray[np.int16]  # [R, L, k]
    starts: NDArray[np.int64]  # [S + 1] first row of each step
    chunk: NDArray[np.int64]  # [S] first row that decides what a prompt leaves in the cache: its last chunk
    counted: NDArray[np.bool_]  # [S] False for prompts
    fresh: NDArray[np.bool_]  # [S] whether a request begins
    whole: bool = True  # False if the recording goes on after these steps


@dataclass(frozen=True)
class Curves:
    """Hits per policy, [L, E + 1]: at every number of slots per layer. `demanded` [L] is what could be hit."""

    meta: TraceMeta
    steps: int  # counted ones
    whole: bool
    demanded: NDArray[np.int64]
    hits: dict[str, NDArray[np.int64]]

    def rate(self, policy: str) -> NDArray[np.float64]:
        """Hit rate of all layers together with 0..E slots each, [E + 1]."""
        shares: NDArray[np.float64] = self.hits[policy].sum(axis=0) / max(1, int(self.demanded.sum()))
        return shares

    def layer_rates(self, policy: str) -> NDArray[np.float64]:
        """Hit rate of each layer, [L, E + 1]."""
        shares: NDArray[np.float64] = self.hits[policy] / np.maximum(self.demanded, 1)[:, None]
        return shares

    def table(self, slots: Sequence[int]) -> pd.DataFrame:
        """One row per entry of `slots`: `slots` per layer, `share` of all experts, and a hit rate per policy."""
        rates = {policy: self.rate(policy)[list(slots)] for policy in self.hits}
        return pd.DataFrame({"slots": list(slots), "share": np.asarray(slots) / self.meta.experts, **rates})


def slot_points(experts: int) -> list[int]:
    """About a dozen slot counts from none to all."""
    shares = (0, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 0.4, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)
    return sorted({round(share * experts) for share in shares})


def curve_steps(groups: Iterable[Trace], meta: TraceMeta, max_tokens: int = MAX_TOKENS) -> Steps:
    """The steps of a recording read group by group, up to `max_tokens` rows that are not prompts."""
    keeper = StepKeeper(meta, max_tokens)
    for group in groups:
        keeper.add(group)
    return keeper.steps()


class StepKeeper:
    """Keeps what curves need of a recording that is read group by group: the ids, as int16."""

    def __init__(self, meta: TraceMeta, max_tokens: int = MAX_TOKENS) -> None:
        self.meta = meta
        self._room = max_tokens
        self._whole = True
        self._parts: list[tuple[NDArray[Any], ...]] = [
            (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int8), np.zeros((0, *self._width), np.int16))
        ]

    @property
    def _width(self) -> tuple[int, int]:
        return self.meta.moe_layers, self.meta.top_k

    def add(self, group: Trace) -> None:
        """The next rows."""
        if not self._room:
            self._whole = self._whole and not (group.phase != PREFILL).any()
            return
        decode = np.flatnonzero(group.phase != PREFILL)
        end = group.rows if len(decode) <= self._room else int(decode[self._room])
        self._whole = end == group.rows
        self._room -= min(self._room, len(decode))
        self._parts.append((group.request[:end], group.step[:end], group.phase[:end], group.experts[:end]))

    def steps(self) -> Steps:
        """What was kept."""
        request, step, phase, experts = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        prompt = phase == PREFILL
        change = (request[1:] != request[:-1]) | (prompt[1:] != prompt[:-1])
        change |= (step[1:] != step[:-1]) & ~prompt[1:]
        starts = np.concatenate([[0] if len(step) else [], np.flatnonzero(change) + 1, [len(step)]]).astype(np.int64)
        first, rows, length = starts[:-1], np.diff(starts), Settings().prefill_chunk_tokens
        fresh = np.ones(len(first), np.bool_)
        fresh[1:] = request[first[1:]] != request[first[:-1]]
        return Steps(
            self.meta, experts, starts, first + (rows - 1) // length * length, ~prompt[first], fresh, self._whole
        )


def curves(steps: Steps, policies: Sequence[str] = POLICIES, seed: int = 0) -> Curves:
    """Hits of `policies` at every slot count, layer by layer. UsageError names a policy that is unknown.

    All begin with an empty cache. `static` keeps each layer's most demanded experts of these very steps and no others,
    from their first demand or prompt on. `aged` has the half-life that settings have by default.
    """
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        raise UsageError(f"policy {unknown[0]!r} is unknown: there are {', '.join(POLICIES)}")
    meta = steps.meta
    hits = {policy: np.zeros((meta.moe_layers, meta.experts + 1), np.int64) for policy in policies}
    demanded = np.zeros(meta.moe_layers, np.int64)
    for layer, ids in enumerate(_layers(steps)):
        uses, cold = np.zeros((2, meta.experts), np.int64)
        count_demand(ids, steps.starts, steps.chunk, steps.counted, uses, cold)
        demanded[layer] = uses.sum()
        for policy in policies:
            if policy == "static":
                hits[policy][layer, 1:] = np.cumsum((uses - cold)[np.argsort(-uses, kind="stable")])
                continue
            where = (steps.starts, steps.chunk, steps.counted, steps.fresh)
            salt = (layer, Settings().half_life if policy == "aged" else seed)
            hits[policy][layer] = layer_hits(ids, where, ORDERS[policy], salt, meta.experts)
    return Curves(meta, int(steps.counted.sum()), steps.whole, demanded, hits)


def _layers(steps: Steps) -> Iterator[NDArray[np.int16]]:
    """Ids of one layer after the other, [R, k]."""
    for layer in range(steps.meta.moe_layers):
        yield np.ascontiguousarray(steps.experts[:, layer])
