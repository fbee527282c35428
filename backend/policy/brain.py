"""`Brain`: the policy state and its compiled decisions behind one small object that engine and simulator drive.

A body calls, per MoE layer of a decode step: `begin` (what to do with each demanded expert), `prefetch` (per predicted
layer), `next_copy` / `complete` as its link works, `finish`; and `end_step` per token. It owns no thread and no lock.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import copies, state, step
from foreload.backend.policy.order import EVICTIONS, worst_kept
from foreload.backend.policy.split import CPU, FETCH, SPLIT_BANDWIDTH, SPLIT_MAKESPAN, SplitCosts
from foreload.errors import InternalError, SettingsError
from foreload.settings import Settings, staging_slots, step_experts
from foreload.shape import ModelShape

_ADMISSIONS = {"none": step.ADMIT_NONE, "demand": step.ADMIT_DEMAND, "background": step.ADMIT_BACKGROUND}
_NO_COSTS = SplitCosts(0, np.zeros(1, np.int64), np.zeros(1, np.int64))


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


def miss_rule(settings: Settings) -> int:
    """The compiled functions' number for `miss_action` and `split_rule`."""
    if settings.miss_action == "split":
        return SPLIT_MAKESPAN if settings.split_rule == "makespan" else SPLIT_BANDWIDTH
    return FETCH if settings.miss_action == "fetch" else CPU


class Brain:
    """Decisions for one engine or one simulated run."""

    def __init__(
        self, shape: ModelShape, settings: Settings, capacity: tuple[int, ...], costs: SplitCosts | None = None
    ) -> None:
        """`capacity` [MoE layers] persistent slots; `costs` are needed by miss_action `split` alone."""
        self.shape = shape
        slots = self.slots_for(shape, settings, capacity)
        self.state = state.new_state(np.asarray(capacity, np.int32), shape.experts, slots)
        self._use(settings, costs)
        self._experts = np.zeros(0, np.int32)
        self._action = np.zeros(0, np.int8)

    @staticmethod
    def slots_for(shape: ModelShape, settings: Settings, capacity: tuple[int, ...]) -> int:
        """Slots, persistent and staging, that a brain with these settings uses."""
        return sum(capacity) + staging_slots(settings, shape)

    @staticmethod
    def check(settings: Settings, costs: SplitCosts | None) -> None:
        """Raise SettingsError if the settings need costs that are not there."""
        if settings.miss_action == "split" and costs is None:
            raise SettingsError("miss_action 'split' needs measured costs: give a profile (foreload profile)")

    def _use(self, settings: Settings, costs: SplitCosts | None) -> None:
        self.check(settings, costs)
        self.settings = settings
        self._costs = costs or _NO_COSTS
        self._eviction = EVICTIONS.index(settings.eviction)
        self._rule = miss_rule(settings)
        self._admission = _ADMISSIONS[settings.admission]
        self._reserve = step_experts(settings, self.shape)

    @property
    def slots(self) -> int:
        """Slots of the device pool, persistent and staging."""
        return len(self.state.free)

    @property
    def counters(self) -> NDArray[np.int64]:
        """Experts counted since the start, [2 phases (decode, prefill), MoE layers, len(Counter)]."""
        return self.state.counters

    def start_request(self) -> None:
        """A new request: leftover copies are taken back (`quiesce`); `lfu` and `lfru` count uses within one request."""
        self.quiesce()
        self.state.uses[:] = 0

    def begin(self, layer: int, experts: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int8]:
        """Decide on a layer-step's whole demand: experts [n] distinct, counts [n] tokens. Returns `Action` [n]."""
        action = np.empty(len(experts), np.int8)
        done = step.demand(self.state, layer, experts, counts, self._eviction, self._rule, self._costs, action)
        if not done:
            raise InternalError(f"no staging slot left for the demand of MoE layer {layer}")
        self._experts, self._action = experts, action
        return action

    def prefetch(self, layer: int, predicted: NDArray[np.int32]) -> None:
        """Experts predicted for a later MoE `layer` of this step, best first, -1 for none; [width]."""
        step.prefetch(self.state, layer, predicted, self._reserve)

    def next_copy(self, phase: int = state.DECODE) -> int:
        """Key (layer * experts + expert) of the copy to issue now, or -1; it then counts as in flight."""
        return int(copies.next_copy(self.state, phase))

    def complete(self, key: int) -> None:
        """The copy of `key` has arrived."""
        copies.complete(self.state, key)

    def finish(self, layer: int) -> None:
        """The layer-step begun last is done: every expert it waited for has been used."""
        step.finish(
            self.state,
            layer,
            self._experts,
            self._action,
            self._eviction,
            self._admission,
            self.settings.admit_per_step,
            self._reserve,
        )

    def end_step(self) -> None:
        """All layers of a decode step are done."""
        self.state.scalars[state.STEP] += 1

    def in_flight(self) -> int:
        """Copies issued and not yet complete."""
        return int(self.state.scalars[state.N_IN_FLIGHT])

    def can_issue(self) -> bool:
        """Whether `next_copy` would return a copy."""
        scalars = self.state.scalars
        return bool(scalars[state.N_QUEUED] and scalars[state.N_IN_FLIGHT] < copies.WINDOW)

    def status(self, layer: int, expert: int) -> int:
        """One of `policy.state` ABSENT, QUEUED, IN_FLIGHT, LANDED, KEPT."""
        return int(self.state.status[layer, expert])

    def slot(self, layer: int, expert: int) -> int:
        """The expert's device slot, or -1."""
        return int(self.state.slot[layer, expert])

    def prefill_targets(self, layer: int, counts: NDArray[np.int32], last_chunk: bool) -> NDArray[np.bool_]:
        """Experts to keep from this prompt chunk, [E]; only the last chunk changes the cache. Counts its demand."""
        demanded = counts > 0
        resident = self.state.status[layer] == state.KEPT
        row = self.state.counters[state.PREFILL, layer]
        row[state.HITS] += int((demanded & resident).sum())
        row[state.MISSES] += int((demanded & ~resident).sum())
        target = np.zeros(len(counts), np.bool_)
        if last_chunk and self._admission != step.ADMIT_NONE:
            step.prefill_targets(self.state, layer, counts, target)
        return target

    def prefill_fetch(self, layer: int, expert: int) -> bool:
        """Queue a prompt chunk's copy (or adopt one in flight); False if no staging slot is free: the wave is full."""
        if self.state.status[layer, expert] == state.IN_FLIGHT:
            self.state.purpose[layer, expert] = state.DEMAND
            return True
        spare = self.state.scalars[state.N_FREE] - self.state.scalars[state.N_UNFILLED]
        return bool(spare > 0 and copies.enqueue(self.state, layer, expert, state.DEMAND))

    def prefill_done(self, layer: int, expert: int, target: NDArray[np.bool_]) -> None:
        """A fetched expert has served its chunk."""
        step.prefill_done(self.state, layer, expert, target, self._eviction)

    def quiesce(self) -> None:
        """Take back what is queued, drop what has landed unkept, discard what is in flight when it arrives."""
        self.state.scalars[state.N_DEMAND_HELD] = 0
        for layer, expert in np.argwhere(self.state.status != state.ABSENT):
            status = self.state.status[layer, expert]
            if status == state.QUEUED:
                copies.cancel(self.state, layer, expert)
            elif status == state.LANDED:
                copies.release(self.state, layer, expert)
            elif status == state.IN_FLIGHT:
                self.state.purpose[layer, expert] = state.DISCARD

    def drop_cache(self) -> None:
        """Forget all residents and all history; nothing may be queued or in flight."""
        fresh = state.new_state(self.state.capacity, self.shape.experts, self.slots)
        self.state = fresh._replace(counters=self.state.counters)

    def reconfigure(
        self, settings: Settings, capacity: tuple[int, ...], costs: SplitCosts | None = None
    ) -> list[tuple[int, int]]:
        """Take new settings between two steps; residents stay as far as the new capacity allows.

        Nothing may be queued or in flight (`quiesce`). Returns (from, to) slot moves the body must carry out, in order,
        before slots at or above the new `slots` are given up. Raises SettingsError and changes nothing if `costs` lack.
        """
        self._use(settings, costs)
        for layer, size in enumerate(capacity):
            while self.state.kept[layer] > size:
                copies.release(self.state, layer, worst_kept(self.state, layer, self._eviction))
                self.state.kept[layer] -= 1
        slots = self.slots_for(self.shape, settings, capacity)
        fresh = state.new_state(np.asarray(capacity, np.int32), self.shape.experts, slots)
        kept = self.state.status == state.KEPT
        held = set(self.state.slot[kept].tolist())
        spare = iter([slot for slot in range(slots) if slot not in held])
        moves = []
        for layer, expert in np.argwhere(kept):
            slot = int(self.state.slot[layer, expert])
            target = slot if slot < slots else next(spare)
            if target != slot:
                moves.append((slot, target))
            fresh.slot[layer, expert] = target
        used = set(fresh.slot[kept].tolist())
        free = [slot for slot in range(slots - 1, -1, -1) if slot not in used]
        fresh.free[: len(free)] = free
        fresh.status[kept] = state.KEPT
        fresh.kept[:] = self.state.kept
        fresh.scalars[state.N_FREE] = len(free)
        fresh.scalars[state.N_UNFILLED] = int(fresh.capacity.sum() - fresh.kept.sum())
        fresh.scalars[state.STEP] = self.state.scalars[state.STEP]
        old = self.state
        self.state = fresh._replace(
            last_step=old.last_step, last_tokens=old.last_tokens, uses=old.uses, counters=old.counters
        )
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
        kept = (s.status == state.KEPT).sum(axis=1)
        if (kept != s.kept).any() or (kept > s.capacity).any():
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
    brain.quiesce()
    brain.reconfigure(settings, (0, 1), costs)
