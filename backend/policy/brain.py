"""`Brain`: the policy state and its compiled decisions behind one small object that engine and simulator drive.

A body calls, per MoE layer of a decode step: `begin` (what to do with each demanded expert), `prefetch` (per predicted
layer), `next_copy` / `complete` as its link works, `finish`; and `end_step` per step. It owns no thread and no lock.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import copies, prompt, state, step
from foreload.backend.policy.resize import resized, shed
from foreload.backend.policy.rules import POOL_SHARED, Rules, rules_of
from foreload.backend.policy.split import NO_COSTS, SplitCosts
from foreload.backend.policy.utility import start_boundary
from foreload.backend.policy.warm import steady_weight, warm_targets
from foreload.errors import InternalError, SettingsError
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape


class Action(IntEnum):
    """What happens to a demanded expert: run now, wait for its copy, fetch it, compute it on the CPU."""

    HIT = step.ACT_HIT
    LATE = step.ACT_LATE
    FETCH = step.ACT_FETCH
    CPU = step.ACT_CPU


class Counter(IntEnum):
    """Columns of `Brain.counters`, all in experts (see `policy.state`)."""

    HITS = state.HITS
    LATE = state.LATE
    MISSES = state.MISSES
    FETCHED = state.FETCHED
    ON_CPU = state.ON_CPU
    PREFETCHED = state.PREFETCHED
    WASTED = state.WASTED
    CANCELLED = state.CANCELLED
    UPLOADED = state.UPLOADED


class Brain:
    """Decisions for one engine or one simulated run."""

    def __init__(
        self,
        shape: ModelShape,
        settings: Settings,
        capacity: tuple[int, ...],
        costs: SplitCosts | None = None,
        warm: NDArray[np.int64] | None = None,
        oracle: bool = False,
    ) -> None:
        """`capacity` [MoE layers] persistent slots (a shared pool has their sum); `costs` are needed by some settings.

        `warm` [MoE layers, experts]: how often a warm-start recording demanded each expert. With `oracle` the body
        says what is demanded next (`foresee`), and eviction goes by that: a bound, for the simulator alone.
        """
        self.shape = shape
        self._warm, self._oracle = warm, oracle
        self._use(settings, costs)
        self.state = self._fresh(np.asarray(capacity, np.int32), self.slots_for(shape, settings, capacity))
        self._experts = np.zeros(0, np.int32)
        self._action = np.zeros(0, np.int8)

    def _fresh(self, capacity: NDArray[np.int32], slots: int) -> state.PolicyState:
        utility = self.settings.utility
        start = start_boundary(self.settings.draft.gamma)
        up, down = (start if theta is None else theta for theta in (utility.theta_up, utility.theta_down))
        fresh = state.new_state(capacity, self.shape.experts, slots, up, down)
        if self._warm is not None:
            fresh.warm[:] = self._warm
            fresh.weight[:] = steady_weight(self._warm, self.shape.top_k, self.settings.half_life)
        return fresh

    @staticmethod
    def slots_for(shape: ModelShape, settings: Settings, capacity: tuple[int, ...]) -> int:
        """Slots, persistent and staging, that a brain with these settings uses."""
        return sum(capacity) + staging_slots(settings, shape)

    @staticmethod
    def check(settings: Settings, costs: SplitCosts | None, warm: bool = False) -> None:
        """Raise SettingsError if the settings need costs, or counts of a warm start, that are not there."""
        if costs is None and settings.needs_costs is not None:
            raise SettingsError(f"{settings.needs_costs} needs measured costs: give a profile (foreload profile)")
        if settings.eviction == "static" and not warm:
            raise SettingsError("eviction 'static' needs counts of a recording: give one to start from (--warm-start)")

    def _use(self, settings: Settings, costs: SplitCosts | None) -> None:
        self.check(settings, costs, self._warm is not None)
        self.settings = settings
        self.rules: Rules = rules_of(settings, self.shape, self._oracle)
        self._costs = costs or NO_COSTS

    def warm_by(self, counts: NDArray[np.int64] | None) -> None:
        """Counts of a warm start (see `__init__`), from the next `drop_cache` on; None: there are none."""
        self._warm = counts

    @property
    def slots(self) -> int:
        """Slots of the device pool, persistent and staging."""
        return len(self.state.free)

    @property
    def counters(self) -> NDArray[np.int64]:
        """Experts counted since the start, [3 phases (decode, prefill, warm start), MoE layers, len(Counter)]."""
        return self.state.counters

    def start_request(self) -> None:
        """A new request: leftover copies are taken back (`quiesce`); `lfu` and `lfru` count uses within one request."""
        self.quiesce()
        self.state.uses[:] = 0
        self.state.prompt[:] = -1
        self.state.asked[:] = 0
        self.state.worst[:] = state.WORST_UNKNOWN

    def begin(self, layer: int, experts: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int8]:
        """Decide on a layer-step's whole demand: experts [n] distinct, counts [n] tokens. Returns `Action` [n]."""
        action = np.empty(len(experts), np.int8)
        done = step.demand(self.state, self.rules, layer, experts, counts, self._costs, action)
        if not done:
            raise InternalError(f"no staging slot left for the demand of MoE layer {layer}")
        self._experts, self._action = experts, action
        return action

    @property
    def costs(self) -> SplitCosts:
        """What splits weigh."""
        return self._costs

    def took(self, experts: NDArray[np.int32], action: NDArray[np.int8]) -> None:
        """A layer-step was begun by `step.demand` itself: its experts [n] and what was decided for each [n]."""
        self._experts, self._action = experts, action

    def read(self, layer: int) -> int:
        """The expert of a layer that the CPU reads ahead, -1 if it is none of its."""
        of_layer, expert = divmod(int(self.state.scalars[state.READ]), self.state.status.shape[1])
        return expert if of_layer == layer else -1

    def prefetch(self, layer: int, predicted: NDArray[np.int32]) -> None:
        """Experts predicted for a later MoE `layer` of this step, best first, -1 for none; [width]."""
        step.prefetch(self.state, self.rules, layer, predicted)

    def next_copy(self, phase: int = state.DECODE) -> int:
        """Key (layer * experts + expert) of the copy to issue now, or -1; it then counts as in flight."""
        return int(copies.next_copy(self.state, phase))

    def complete(self, key: int) -> None:
        """The copy of `key` has arrived."""
        copies.complete(self.state, key)

    def finish(self, layer: int) -> None:
        """The layer-step begun last is done: every expert it waited for has been used."""
        step.finish(self.state, self.rules, layer, self._experts, self._action, self._costs)

    def end_step(self) -> None:
        """All layers of a decode step are done."""
        step.end_step(self.state)

    def foresee(self, layer: int, experts: NDArray[np.integer], following: NDArray[np.integer]) -> None:
        """Tell an oracle in which step (`state.NEVER`: none) each of `experts` of `layer` is demanded next."""
        self.state.next_use[layer, experts] = following
        self.state.worst[layer] = state.WORST_UNKNOWN

    def in_flight(self) -> int:
        """Copies issued and not yet complete."""
        return int(self.state.scalars[state.N_IN_FLIGHT])

    def can_issue(self) -> bool:
        """Whether `next_copy` would return a copy."""
        return bool(copies.can_issue(self.state))

    def status(self, layer: int, expert: int) -> int:
        """One of `policy.state` ABSENT, QUEUED, IN_FLIGHT, LANDED, KEPT."""
        return int(self.state.status[layer, expert])

    def slot(self, layer: int, expert: int) -> int:
        """The expert's device slot, or -1."""
        return int(self.state.slot[layer, expert])

    def prefill_targets(self, layer: int, counts: NDArray[np.int32], last_chunk: bool) -> NDArray[np.bool_]:
        """Experts to keep from this prompt chunk, [E]; only the last chunk changes the cache. Counts its demand."""
        prompt.look_up(self.state, layer, counts)
        target = np.zeros(len(counts), np.bool_)
        if last_chunk:
            prompt.prefill_targets(self.state, self.rules, layer, counts, target)
        return target

    def prefill_ahead(self, layer: int, routed: int) -> NDArray[np.int64]:
        """Absent experts of `layer` to copy before a chunk of `routed` = tokens times k is routed there, best first."""
        chosen = np.empty(self.shape.experts, np.int64)
        return chosen[: prompt.prefill_ahead(self.state, layer, routed, chosen)]

    def prefill_fetch(self, layer: int, expert: int, early: bool = False) -> bool:
        """Queue the copy of an absent expert for a prompt chunk; False if no staging slot is free: the wave is full.

        `early`: before the chunk is routed there.
        """
        return bool(prompt.prefill_fetch(self.state, layer, expert, early))

    def prefill_done(self, layer: int, expert: int, target: NDArray[np.bool_]) -> None:
        """A fetched expert has served its chunk, or was copied early for nothing."""
        prompt.prefill_done(self.state, self.rules, layer, expert, target)

    def warm_targets(self) -> NDArray[np.bool_]:
        """Absent experts [MoE layers, E] a warm start loads into persistent slots nobody holds.

        Load each with `prefill_fetch` and `prefill_done`, with copies counted as WARM, before the first request.
        """
        return warm_targets(self.state, self.rules, self._warm is not None)

    def quiesce(self) -> None:
        """Take back what is queued, drop what has landed unkept, discard what is in flight when it arrives."""
        self.state.scalars[[state.N_DEMAND_HELD, state.N_AHEAD, state.N_UPLOADS, state.N_SERVED]] = 0
        for layer, expert in np.argwhere((self.state.status != state.ABSENT) & (self.state.status != state.KEPT)):
            copies.take_back(self.state, layer, expert)

    def drop_cache(self) -> None:
        """Forget all residents and all history; nothing may be queued or in flight."""
        fresh = self._fresh(self.state.capacity, self.slots)
        self.state = fresh._replace(counters=self.state.counters)

    def reconfigure(
        self, settings: Settings, capacity: tuple[int, ...], costs: SplitCosts | None = None
    ) -> list[tuple[int, int]]:
        """Take new settings between two steps; residents stay as far as the new capacity allows.

        Nothing may be queued or in flight (`quiesce`). Returns (from, to) slot moves the body must carry out, in order,
        before slots at or above the new `slots` are given up. Raises SettingsError and changes nothing if costs or
        counts lack.
        """
        self._use(settings, costs)
        wanted = np.asarray(capacity, np.int32)
        shed(self.state, self.rules, wanted)
        slots = self.slots_for(self.shape, settings, capacity)
        self.state, moves = resized(self.state, self.rules, wanted, slots)
        return moves

    def check_integrity(self) -> None:
        """Every slot is free or held by exactly one expert, and the counts agree. Raises InternalError."""
        s = self.state
        held = s.slot[s.slot >= 0].tolist()
        free = s.free[: s.scalars[state.N_FREE]].tolist()
        if sorted(held + free) != list(range(self.slots)):
            raise InternalError("slots are lost or held twice")
        if ((s.slot >= 0) != (s.status != state.ABSENT)).any():
            raise InternalError("an expert's status does not go with its slot")
        ahead = (s.purpose == state.AHEAD) & np.isin(s.status, (state.QUEUED, state.IN_FLIGHT, state.LANDED))
        kept = ((s.status == state.KEPT) | ahead).sum(axis=1)
        over = kept.sum() > s.capacity.sum() if self.rules.pool == POOL_SHARED else (kept > s.capacity).any()
        if (kept != s.kept).any() or over:
            raise InternalError("kept counts are wrong or exceed the capacity")
        if s.scalars[state.N_UNFILLED] != s.capacity.sum() - kept.sum():
            raise InternalError("the count of unfilled slots is wrong")


def compile_policies() -> None:
    """Compile (or load from numba's cache) every policy function, so that nothing compiles while decoding."""
    shape = ModelShape(
        family="", layers=2, moe_layers=(0, 1), hidden=1, heads=1, kv_heads=1, head_dim=1, vocab=1, experts=4, top_k=2,
        expert_width=1, scoring="softmax_topk", normalise_weights=True, rope_theta=1.0, norm_eps=0.0, max_positions=1,
        tied_embeddings=True,
    )  # fmt: skip
    settings = Settings(
        cache_ratio=0.25, miss_action="split", admission="background", predictor="gate", prefetch_depth=1
    )
    costs = SplitCosts(2, np.arange(3, dtype=np.int64), np.arange(3, dtype=np.int64))
    brain = Brain(shape, settings, (1, 1), costs)
    brain.prefill_ahead(1, 1)
    brain.prefill_fetch(0, 0)
    brain.complete(brain.next_copy(state.PREFILL))
    brain.prefill_done(0, 0, brain.prefill_targets(0, np.ones(4, np.int32), True))
    ones = np.ones(2, np.int32)
    for experts in ([0, 1], [1, 2], [2, 3]):
        for layer in range(2):
            brain.begin(layer, np.asarray(experts, np.int32), ones)
            if layer == 0:
                brain.prefetch(1, np.asarray(experts[::-1], np.int32))
            while (key := brain.next_copy()) >= 0:
                brain.complete(key)
            brain.finish(layer)
        brain.end_step()
    brain.prefetch(1, np.asarray([3], np.int32))
    brain.quiesce()
    brain.reconfigure(settings, (0, 0), costs)
