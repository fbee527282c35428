"""Settings worth trying: fixed candidates, one family of options per integer program, and small changes of a winner."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from foreload.errors import BudgetError
from foreload.settings import Draft, Settings, check_slots, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.costs import CostModel
from foreload.simulator.result import SimResult
from foreload.simulator.workload import recorded_draft
from foreload.traces.schema import Trace


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
    if settings.prefetch_depth:
        parts.append(f"depth {settings.prefetch_depth}")
    if settings.draft.kind != "none":
        parts.append(f"{settings.draft.kind} draft")
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
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    draft: Draft | None = None  # whose windows the trace holds, if the profile can cost them

    @classmethod
    def of(cls, trace: Trace, costs: CostModel, base: Settings, slots: int) -> Space:
        """Thread counts the profile measured; depths, widths and draft the trace holds (and the profile can cost)."""
        shape = costs.shape
        tables = {depth: table for (name, depth), table in trace.predictions.items() if name == "gate"}
        costed = any(m.probe == "predict" for m in costs.profile.measurements)
        depths = tuple(d for d in (1, 2) if costed and all(at in tables for at in range(1, d + 1)))
        widest = min((table.shape[2] for table in tables.values()), default=0)
        widths = {w for w in (max(1, shape.top_k // 2), shape.top_k, widest) if 0 < w <= widest}
        recorded = recorded_draft(trace)
        draft = None
        if recorded is not None and costs.has_windows(recorded[0]):
            draft = Draft.model_validate({"kind": recorded[0], "gamma": recorded[1]})
        return cls(shape, base, slots, costs.cpu_threads, depths, tuple(sorted(widths)), draft)

    def uniform(self, **changes: Any) -> Settings | None:
        """`base` with `changes` and the largest uniform slot count; None if its staging does not fit."""
        settings = self.base.changed(slots_per_layer=None, cache_ratio=None, **changes)
        try:
            counts = check_slots(settings, self.shape, self.slots, 1)
        except BudgetError:
            return None
        return settings.changed(slots_per_layer=counts)

    def prefetches(self) -> Iterator[dict[str, Any]]:
        """Prefetch options, off first."""
        yield {"predictor": "none", "prefetch_depth": 0, "prefetch_width": None}
        for depth in self.depths:
            for width in self.widths:
                yield {"predictor": "gate", "prefetch_depth": depth, "prefetch_width": width}

    def misses(self) -> Iterator[dict[str, Any]]:
        """Miss actions with thread count and admission."""
        yield {"miss_action": "fetch", "admission": "demand"}
        for action in ("cpu", "split"):
            for threads in self.threads:
                for admission in ("demand", "background"):
                    yield {"miss_action": action, "cpu_threads": threads, "admission": admission}

    def fixed(self) -> Iterator[Candidate]:
        """Candidates that always compete, the default first."""
        uniform = [("default", self.uniform())]
        off = self.base.changed(slots_per_layer=(0,) * self.shape.n_moe_layers, cache_ratio=None)
        uniform.append(("cache off", off if staging_slots(off, self.shape) <= self.slots else None))
        for prefetch in self.prefetches():
            if prefetch["prefetch_depth"]:
                depth, width = prefetch["prefetch_depth"], prefetch["prefetch_width"]
                uniform.append((f"uniform, depth {depth}, width {width}", self.uniform(**prefetch)))
        for miss in self.misses():
            if miss["miss_action"] != "fetch":
                name = f"uniform, {miss['miss_action']} on {miss['cpu_threads']}, {miss['admission']}"
                uniform.append((name, self.uniform(**miss)))
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
        over = sum(counts) + staging_slots(drafted, self.shape) - self.slots
        if over > sum(counts):
            return None
        for _ in range(max(0, over)):
            counts[counts.index(max(counts))] -= 1
        return drafted.changed(slots_per_layer=tuple(counts))

    def neighbours(self, settings: Settings) -> Iterator[Settings]:
        """One change at a time of what the programs do not vary."""
        changes: list[dict[str, Any]] = [{"eviction": name} for name in ("lru", "lfu", "lfru")]
        if settings.admission == "background":
            changes += [{"admit_per_step": n} for n in (1, 2, 4)]
        if settings.miss_action == "split":
            changes += [{"split_rule": rule} for rule in ("makespan", "bandwidth")]
        if settings.prefetch_depth:
            changes += [{"prefetch_width": width} for width in self.widths]
        drafted = self._drafted(settings)
        if drafted is not None:
            yield drafted
        for change in changes:
            other = settings.changed(**change)
            if other != settings and sum(other.slots_per_layer or ()) + staging_slots(other, self.shape) <= self.slots:
                yield other
