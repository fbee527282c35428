"""Settings worth trying: fixed candidates, one family of options per integer program, and small changes of a winner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.budget import predictor_bytes
from foreload.errors import BudgetError
from foreload.settings import (
    GATE_SIDE,
    MAX_PREFETCH_DEPTH,
    NEXT_STEP,
    Draft,
    Settings,
    check_slots,
    staging_slots,
)
from foreload.shape import ModelShape
from foreload.simulator.costs import CostModel, predict_probe
from foreload.simulator.result import SimResult
from foreload.simulator.workload import recorded_draft
from foreload.traces.schema import PREFILL, Trace

NO_PREFETCH: dict[str, Any] = {
    "predictor": "none",
    "prefetch_depth": 0,
    "prefetch_width": None,
    "prefetch_rolled": False,
    "speculate_layers": (),
}
RECALL_ROWS = 512
"""Decode rows by which predictors are compared."""


@dataclass(frozen=True)
class Speculation:
    """Layers that may execute predictions, at a loss that was measured."""

    predictor: str
    layers: tuple[int, ...]
    loss_pct: float  # of perplexity


@dataclass(frozen=True)
class Candidate:
    """One setting with what is predicted for it."""

    name: str
    family: str
    settings: Settings
    planned_ns: float | None = None  # the program's estimate per token
    result: SimResult | None = field(default=None, repr=False)  # simulated on the requests that choose
    report: SimResult | None = field(default=None, repr=False)  # simulated on requests that chose nothing

    @property
    def tpot_ns(self) -> float:
        """Simulated time per token on the requests that choose; infinite before it was simulated."""
        return self.result.tpot_ns if self.result is not None else float("inf")


def family(settings: Settings) -> str:
    """The kind of plan: miss action, admission beyond demand, prefetch depth, draft, cache or none."""
    parts: list[str] = [settings.miss_action]
    if settings.admission != "demand":
        parts.append(settings.admission)
    if settings.pool != "layer":
        parts.append("shared pool")
    if settings.predictor in NEXT_STEP:
        parts.append("next step")
    if settings.prefetch_depth:
        parts.append(f"depth {settings.prefetch_depth}")
    if settings.draft.kind != "none":
        parts.append(f"{settings.draft.kind} draft")
    if settings.speculate_layers:
        parts.append(f"speculated by {settings.predictor}")
    if settings.slots_per_layer is not None and not any(settings.slots_per_layer):
        parts.append("cache off")
    return ", ".join(parts)


@dataclass(frozen=True)
class Space:
    """What may be varied on this machine, with this trace, within this many slots."""

    shape: ModelShape
    base: Settings
    slots: int
    threads: tuple[int, ...]
    looks: Mapping[int, tuple[tuple[str, bool], ...]]  # depth -> (predictor, rolled), most recall first
    widths: tuple[int, ...]
    draft: Draft | None = None  # whose windows the trace holds, if the profile can cost them
    speculations: tuple[Speculation, ...] = ()
    dtype: str = "float32"
    warm: bool = False  # whether there are counts of a recording to start from
    draft_slots: int = 0  # slots that a draft model takes from the others, if it is not on the device anyway
    expert_bytes: int = 1

    @classmethod
    def of(
        cls,
        trace: Trace,
        costs: CostModel,
        base: Settings,
        slots: int,
        allowed: Sequence[Speculation] = (),
        warm: bool = False,
        draft_bytes: int | None = None,
    ) -> Space:
        """Threads the profile measured; predictors, depths, widths and draft that the trace holds and it can cost.

        Of the speculations `allowed`, those the trace has predictions for. `draft_bytes` of the model that drafted the
        recording; None: unknown, so such drafts are left out.
        """
        shape = costs.shape
        looks = _looks(trace, costs)
        tables = [
            trace.predictions[_key(name, rolled, at), at]
            for depth, found in looks.items()
            for name, rolled in found
            for at in range(1, depth + 1)
        ]
        widest = min((table.shape[2] for table in tables), default=0)
        widths = {w for w in (max(1, shape.top_k // 2), shape.top_k, widest) if 0 < w <= widest}
        draft, taken = _recorded(trace, costs), 0
        if draft is not None and draft.model_name not in (None, base.draft.model_name):
            draft, taken = (None, 0) if draft_bytes is None else (draft, -(-draft_bytes // costs.expert_bytes))
        ready = {name for name, _ in looks.get(1, ())} if costs.measured("speculated") else set()
        usable = tuple(s for s in allowed if s.predictor in ready and shape.top_k in widths)
        dtype = costs.profile.meta.dtype
        every = tuple(sorted(widths))
        size = costs.expert_bytes
        return cls(shape, base, slots, costs.cpu_threads, looks, every, draft, usable, dtype, warm, taken, size)

    def budget(self, settings: Settings) -> int:
        """Slots, persistent and staging, beside the calibration and the draft model that `settings` add to the base."""
        more = predictor_bytes(self.shape, self.dtype, settings) - predictor_bytes(self.shape, self.dtype, self.base)
        model = self.draft_slots if settings.draft == self.draft else 0
        return self.slots - -(-more // self.expert_bytes) - model

    def uniform(self, **changes: Any) -> Settings | None:
        """`base` with `changes` and the largest uniform slot count; None if its staging does not fit."""
        settings = self.base.changed(slots_per_layer=None, cache_ratio=None, **changes)
        try:
            counts = check_slots(settings, self.shape, self.budget(settings), 1)
        except BudgetError:
            return None
        return settings.changed(slots_per_layer=counts)

    def prefetches(self) -> Iterator[dict[str, Any]]:
        """Prefetch options, off first."""
        yield NO_PREFETCH
        for depth, ((name, rolled), *_) in self.looks.items():
            for width in self.widths:
                yield {**_look(name, rolled), "prefetch_depth": depth, "prefetch_width": width}
        for found in self.speculations:
            next_layer = {"prefetch_depth": 1, "prefetch_width": self.shape.top_k}
            yield {**_look(found.predictor, False), **next_layer, "speculate_layers": found.layers}

    def loss_pct(self, settings: Settings) -> float:
        """What `settings` lose, as measured: 0 where they change no text."""
        layers = settings.speculated(self.shape)
        known = {(s.predictor, s.layers): s.loss_pct for s in self.speculations}
        return known[settings.predictor, layers] if layers else 0.0

    def misses(self) -> Iterator[dict[str, Any]]:
        """Miss actions with thread count and admission."""
        yield {"miss_action": "fetch", "admission": "demand"}
        for action in ("cpu", "split"):
            for threads in self.threads:
                for admission in ("demand", "background"):
                    yield {"miss_action": action, "cpu_threads": threads, "admission": admission}

    def pooled(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """One pool for all layers, by utility; with CPU threads also absent experts split, and fetched ahead, by it."""
        shared = {"pool": "shared", "eviction": "utility"}
        shared = {**shared, **NO_PREFETCH, "admission": "demand"}
        yield "shared pool, utility", {**shared, "miss_action": "fetch"}
        if self.threads:
            split = {"miss_action": "split", "split_rule": "tau", "cpu_threads": self.threads[-1]}
            yield "shared pool, split by utility", {**shared, **split, "objective": "makespan", "predictor": "utility"}

    def fixed(self) -> Iterator[Candidate]:
        """Candidates that always compete, the default first."""
        uniform = [("default", self.uniform())]
        off = self.base.changed(slots_per_layer=(0,) * self.shape.n_moe_layers, cache_ratio=None)
        uniform.append(("cache off", off if staging_slots(off, self.shape) <= self.slots else None))
        for prefetch in self.prefetches():
            if prefetch["prefetch_depth"]:
                name = "uniform, {predictor}, depth {prefetch_depth}, width {prefetch_width}".format(**prefetch)
                name += ", speculated" if prefetch["speculate_layers"] else ""
                uniform.append((name, self.uniform(**prefetch)))
        for miss in self.misses():
            if miss["miss_action"] != "fetch":
                name = f"uniform, {miss['miss_action']} on {miss['cpu_threads']}, {miss['admission']}"
                uniform.append((name, self.uniform(**miss)))
        uniform += [(name, self.uniform(**fields)) for name, fields in self.pooled()]
        if self.draft is not None:
            uniform += [(f"{name}, drafts", self._drafted(settings)) for name, settings in uniform]
        for name, settings in uniform:
            if settings is not None:
                yield Candidate(name, family(settings), settings)

    def _drafted(self, settings: Settings | None) -> Settings | None:
        """`settings` with the recorded draft, for whose staging the largest layers give slots up; None: no room."""
        if settings is None or self.draft is None or settings.draft == self.draft:
            return None
        drafted = settings.changed(draft=self.draft.model_dump())
        counts = list(drafted.slots_per_layer or ())
        over = sum(counts) + staging_slots(drafted, self.shape) - self.budget(drafted)
        if over > sum(counts):
            return None
        for _ in range(max(0, over)):
            counts[counts.index(max(counts))] -= 1
        return drafted.changed(slots_per_layer=tuple(counts))

    def neighbours(self, settings: Settings) -> Iterator[Settings]:
        """One change at a time of what the programs do not vary."""
        orders = ("lru", "lfu", "lfru", "utility", *(("static",) if self.warm else ()))
        changes: list[dict[str, Any]] = [{"eviction": name} for name in orders]
        if settings.admission == "background":
            changes += [{"admit_per_step": n} for n in (1, 2, 4)]
        if settings.miss_action == "split":
            changes += [{"split_rule": rule, "objective": "makespan"} for rule in ("makespan", "tau", "bandwidth")]
        if settings.predictor == "none" and settings.miss_action != "fetch" and settings.admission != "none":
            changes += [{"predictor": name} for name in NEXT_STEP]
        if settings.prefetch_depth:
            changes += [{"prefetch_width": width} for width in self.widths]
        drafted = self._drafted(settings)
        if drafted is not None:
            yield drafted
        if settings.prefetch_depth and not settings.speculate_layers:
            changes += [_look(name, rolled) for name, rolled in self.looks.get(settings.prefetch_depth, ())]
        for change in changes:
            other = settings.changed(**change)
            held = sum(other.slots_per_layer or ()) + staging_slots(other, self.shape)
            if other != settings and held <= self.budget(other):
                yield other


def _look(name: str, rolled: bool) -> dict[str, Any]:
    return {"predictor": name, "prefetch_rolled": rolled, "speculate_layers": ()}


def _key(name: str, rolled: bool, depth: int) -> str:
    look = {"predictor": name, "prefetch_depth": max(2, depth) if rolled else depth, "prefetch_rolled": rolled}
    return Settings.parse(look).prediction(depth)


def _looks(trace: Trace, costs: CostModel) -> dict[int, tuple[tuple[str, bool], ...]]:
    """Per depth the predictors (and whether rolled) whose predictions are all there and costed, most recall first."""
    found: dict[int, tuple[tuple[str, bool], ...]] = {}
    for depth in range(1, MAX_PREFETCH_DEPTH + 1):
        known = [
            (name, rolled)
            for name in GATE_SIDE
            for rolled in ((False, True) if depth > 1 else (False,))
            if all((_key(name, rolled, at), at) in trace.predictions for at in range(1, depth + 1))
            and costs.measured(predict_probe(_key(name, rolled, depth)))
        ]
        if known:
            recall = {look: _recall(trace, trace.predictions[_key(*look, depth), depth], depth) for look in known}
            found[depth] = tuple(sorted(known, key=lambda look: -recall[look]))
    return found


def _recall(trace: Trace, predicted: NDArray[np.int16], depth: int) -> float:
    """Share of the experts of the first decode rows that are among the first k predicted."""
    rows = np.flatnonzero(trace.phase != PREFILL)[:RECALL_ROWS]
    experts, guesses = trace.experts[rows, depth:], predicted[rows, depth:, : trace.meta.top_k]
    return float((experts[..., None] == guesses[:, :, None]).any(-1).mean()) if len(rows) else 0.0


def _recorded(trace: Trace, costs: CostModel) -> Draft | None:
    """The draft whose windows a trace holds, if the profile can cost it."""
    recorded = recorded_draft(trace)
    if recorded is None or not costs.has_windows(recorded[0]):
        return None
    draft = Draft.model_validate({"kind": recorded[0], "gamma": recorded[1]})
    model = trace.meta.sampling.get("draft_model") or draft.model_name
    if draft.kind != "model":
        return draft
    return draft.model_copy(update={"model": model}) if model == costs.profile.meta.draft_model else None
