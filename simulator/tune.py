"""`tune`: integer programs propose, the simulator decides, the default stays unless something clearly beats it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.budget import slot_budget
from foreload.errors import MismatchError, UsageError
from foreload.profiler.schema import HardwareProfile
from foreload.quality import QualityReport
from foreload.settings import Settings, check_slots, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.bounds import Bounds, bounds
from foreload.simulator.candidates import NO_PREFETCH, Candidate, Space, Speculation, family
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel
from foreload.simulator.replay import Outcomes
from foreload.simulator.solver import Outcome, Problem, solve
from foreload.simulator.tables import layer_costs, replay_grid
from foreload.simulator.workload import Request, load_requests, request_numbers
from foreload.traces.schema import PREFILL, Trace

PLAIN: dict[str, Any] = {"draft": {}}
"""Integer programs plan steps of one token; what they plan also competes with the recorded draft."""
KEEP_BELOW = 0.01
"""A gain of at most this share is no reason to leave the default."""
SHORT_LIST, PER_FAMILY, REFINED = 16, 2, 3
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a tune; every figure in it is simulated."""

    best: Candidate  # `default` itself if nothing beats it
    default: Candidate
    candidates: tuple[Candidate, ...]  # simulated, best first
    bounds: Bounds  # on the requests that choose
    slots: int  # budget, staging included
    fit: tuple[int, ...]  # requests the programs saw
    select: tuple[int, ...]  # requests that chose
    held_out: tuple[int, ...]  # requests that did neither; empty in a short trace
    quality_loss_pct: float = 0.0  # of the best: measured rise in perplexity; 0 where the text stays as it is

    @property
    def kept_default(self) -> bool:
        """Whether the advice is to change nothing."""
        return self.best is self.default

    @property
    def speedup(self) -> float:
        """Default over best, simulated; on held-out requests where there are any."""
        if self.default.report is not None and self.best.report is not None:
            return self.default.report.tpot_ns / self.best.report.tpot_ns
        return self.default.tpot_ns / self.best.tpot_ns

    def families(self) -> tuple[Candidate, ...]:
        """The best candidate of each family, best first."""
        return tuple({c.family: c for c in reversed(self.candidates)}[name] for name in _names(self.candidates))

    def as_dict(self) -> dict[str, Any]:
        """JSON values, times in milliseconds."""
        return {
            "kept_default": self.kept_default,
            "speedup": self.speedup,
            "slots": self.slots,
            "requests": {"fit": self.fit, "select": self.select, "held_out": self.held_out},
            "default": _shown(self.default),
            "best": _shown(self.best),
            "families": [_shown(candidate) for candidate in self.families()],
            "bounds": self.bounds.as_dict(),
            "quality_loss_pct": self.quality_loss_pct,
        }


def _names(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(candidate.family for candidate in candidates))


def _shown(candidate: Candidate) -> dict[str, Any]:
    result = candidate.report or candidate.result
    return {
        "name": candidate.name,
        "family": candidate.family,
        "settings": candidate.settings.model_dump(mode="json", exclude_defaults=True),
        "planned_ms": None if candidate.planned_ns is None else candidate.planned_ns / 1e6,
        "predicted": None if result is None else result.as_dict(),
    }


def split_requests(numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Requests to fit on, to select by and to report on: halves and quarters; none is held out of fewer than three."""
    chosen = tuple(numbers)
    if len(chosen) < 2:
        return chosen, chosen, ()
    fit = len(chosen) // 2
    select = fit + (len(chosen) - fit + 1) // 2
    return chosen[:fit], chosen[fit:select], chosen[select:]


def tune(
    trace: Trace,
    profile: HardwareProfile,
    shape: ModelShape,
    dtype: str,
    *,
    vram_bytes: int | None = None,
    context_tokens: int | None = None,
    slots: int | None = None,
    base: Settings | None = None,
    quality: QualityReport | None = None,
    max_quality_loss_pct: float | None = None,
    warm: NDArray[np.int64] | None = None,
    draft_bytes: int | None = None,
    progress: Progress | None = None,
) -> TuneResult:
    """The best settings for a memory budget: `vram_bytes` (with `context_tokens` of keys and values, default the
    trace's longest) or `slots`, persistent and staging. What is not tuned is taken from `base`, the default to beat.
    `warm` [MoE layers, experts]: uses in a recording that every run starts from.
    `draft_bytes` of the model that drafted the recording let its windows compete; without, only look-up's do.
    Settings that change the text compete only if `quality` measured them to lose at most `max_quality_loss_pct`.

    Deterministic. Raises BudgetError if the budget cannot hold staging, MismatchError if trace, profile and shape do
    not belong together or the trace has no decode steps.
    """
    chosen = base or Settings()
    if (vram_bytes is None) == (slots is None):
        raise UsageError("tune needs one of vram_bytes and slots")
    if not (trace.phase != PREFILL).any():
        raise MismatchError("trace: holds no decode steps to tune on")
    if slots is None:
        longest = int(trace.position.max()) + 1
        beside = (draft_bytes or 0) if chosen.draft.model_name is not None else 0
        slots = slot_budget(shape, dtype, vram_bytes or 0, context_tokens or longest, chosen, beside)
    costs = CostModel(profile, shape, dtype).for_settings(chosen)
    start = chosen.changed(slots_per_layer=None, cache_ratio=None)
    check_slots(start, shape, slots, costs.expert_bytes)
    allowed = _allowed(trace, start, quality, max_quality_loss_pct)
    known = {(found.predictor, found.layers) for found in allowed}
    if start.speculate_layers and (start.predictor, start.speculated(shape)) not in known:
        raise UsageError(
            "the settings to beat speculate, which changes the text: give their measured loss (foreload quality) and "
            "a budget for it that holds them"
        )
    space = Space.of(trace, costs, start, slots, allowed, warm is not None, draft_bytes)
    return _Tuner(trace, costs, space, progress, warm).run()


def _allowed(
    trace: Trace, base: Settings, quality: QualityReport | None, budget_pct: float | None
) -> list[Speculation]:
    """What was measured to lose at most `budget_pct`, of this model alone."""
    if (quality is None) != (budget_pct is None):
        raise UsageError("a quality budget and measured losses (foreload quality) go together: give both or none")
    if quality is None or budget_pct is None:
        return []
    if quality.weights_hash != trace.meta.weights_hash:
        raise MismatchError(
            f"quality report: of {quality.model!r} with weights {quality.weights_hash}, the recording is of "
            f"{trace.meta.model!r} with weights {trace.meta.weights_hash}"
        )
    usable = [v for v in quality.variants if v.layers and not v.in_prompts and v.expert_format == base.expert_format]
    measured = [(v, quality.loss_pct(v)) for v in usable]
    return [Speculation(v.predictor, v.layers, loss) for v, loss in measured if loss <= budget_pct]


class _Tuner:
    def __init__(
        self,
        trace: Trace,
        costs: CostModel,
        space: Space,
        progress: Progress | None,
        warm: NDArray[np.int64] | None = None,
    ) -> None:
        self._warm = warm
        self.trace, self.costs, self.space = trace, costs, space
        self.fit, self.select, self.held_out = split_requests(request_numbers(trace))
        self._progress = progress or (lambda done, total, what: None)
        self._simulated: dict[Settings, Candidate] = {}
        self._replays: dict[tuple[Any, ...], list[Outcomes]] = {}
        self._loaded: dict[tuple[Any, ...], list[Request]] = {}

    def run(self) -> TuneResult:
        """Plan, shorten, simulate, refine, choose."""
        plans = self._plans()
        fixed = list(self.space.fixed())
        for_simulation = [*fixed, *_short_list(plans)]
        for at, candidate in enumerate(for_simulation):
            self._progress(at, len(for_simulation), "simulate")
            self._simulate(candidate)
        for winner in self._ranked()[:REFINED]:
            for settings in self.space.neighbours(winner.settings):
                self._simulate(Candidate(f"{winner.name}, refined", family(settings), settings, winner.planned_ns))
        self._progress(len(for_simulation), len(for_simulation), "simulate")
        return self._result(fixed[0].settings)

    def _requests(self, settings: Settings) -> list[Request]:
        depth, key = settings.prefetch_depth, _looked(settings)
        if key not in self._loaded:
            wide = settings.changed(prefetch_width=max(self.space.widths)) if depth else settings
            self._loaded[key] = load_requests(self.trace, self.space.shape, wide, self.fit)
        loaded = self._loaded[key]
        width = settings.width(self.space.shape)
        return [replace(r, predicted=tuple(np.ascontiguousarray(p[:, :, :width]) for p in r.predicted)) for r in loaded]

    def _plans(self) -> list[Candidate]:
        """One program per family of options; those whose staging does not fit are left out."""
        prefetches = list(self.space.prefetches())
        options = [{**miss, **prefetch, **PLAIN} for miss in self.space.misses() for prefetch in prefetches]
        context = int(median(c for r in self._requests(self.space.base.changed(**PLAIN)) for c in r.context))
        eviction = self._eviction(context)
        plans = []
        for at, option in enumerate(options):
            self._progress(at, len(options), "plan")
            plan = self._plan(self.space.base.changed(**option, eviction=eviction, pool="layer"), context)
            if plan is not None:
                plans.append(plan)
        self._progress(len(options), len(options), "plan")
        return sorted(plans, key=lambda c: c.planned_ns or 0.0)

    def _eviction(self, context: int) -> str:
        """The eviction order whose plan without prefetch or CPU is cheapest; winners are tried with the others too."""
        base = self.space.base
        plain = base.changed(miss_action="fetch", admission="demand", pool="layer", **NO_PREFETCH, **PLAIN)
        orders = ("lru", "lfu", "lfru", "utility", *(("static",) if self._warm is not None else ()))
        plans = [self._plan(plain.changed(eviction=name), context) for name in orders]
        found = [plan for plan in plans if plan is not None]
        return min(found, key=lambda plan: plan.planned_ns or 0.0).settings.eviction if found else base.eviction

    def _plan(self, settings: Settings, context: int) -> Candidate | None:
        shape, room = self.space.shape, self.space.budget(settings) - staging_slots(settings, self.space.shape)
        if room < 0:
            return None
        table = layer_costs(self._grid(settings), self.costs, settings, context)
        counts = np.tile(np.arange(shape.experts + 1), (shape.n_moe_layers, 1))
        solution = solve(Problem(table, {"vram": counts}, {"vram": room}))
        if solution.outcome not in (Outcome.PROVEN, Outcome.FEASIBLE_LIMIT):
            return None
        plan = settings.changed(slots_per_layer=solution.choice)
        return Candidate("program", family(plan), plan, solution.objective)

    def _grid(self, settings: Settings) -> list[Outcomes]:
        threads = settings.cpu_threads if settings.miss_action == "split" else 0
        key = (
            settings.miss_action,
            threads,
            settings.admission,
            settings.eviction,
            settings.prefetch_width,
            *_looked(settings),
        )
        if key not in self._replays:
            self._replays[key] = replay_grid(self._requests(settings), self.costs, settings, warm=self._warm)
        return self._replays[key]

    def _simulate(self, candidate: Candidate) -> None:
        if candidate.settings not in self._simulated:
            result = self._run(candidate.settings, self.select)
            self._simulated[candidate.settings] = replace(candidate, result=result)

    def _run(self, settings: Settings, requests: tuple[int, ...]) -> Any:
        capacity = settings.slots_per_layer or ()
        return simulate(self.trace, self.costs, self.space.shape, settings, capacity, requests, warm=self._warm)

    def _ranked(self) -> list[Candidate]:
        return sorted(self._simulated.values(), key=lambda c: c.tpot_ns)

    def _result(self, default_settings: Settings) -> TuneResult:
        default = self._reported(self._simulated[default_settings])
        ranked = self._ranked()
        best = default
        if ranked[0].tpot_ns < default.tpot_ns * (1 - KEEP_BELOW):
            winner = self._reported(ranked[0])
            if winner.report is None or default.report is None or winner.report.tpot_ns < default.report.tpot_ns:
                best = winner
        known = {default.settings: default, best.settings: best}
        return TuneResult(
            best=best,
            default=default,
            candidates=tuple(known.get(c.settings, c) for c in ranked),
            bounds=self._bounds(),
            slots=self.space.slots,
            fit=self.fit,
            select=self.select,
            held_out=self.held_out,
            quality_loss_pct=self.space.loss_pct(best.settings),
        )

    def _bounds(self) -> Bounds:
        """The lower of the floors: of steps of one token and, where there are any, of the recorded windows."""
        drafts = [PLAIN] if self.space.draft is None else [PLAIN, {"draft": self.space.draft.model_dump()}]
        found = []
        for draft in drafts:
            steps = load_requests(self.trace, self.space.shape, Settings.parse(draft), self.select)
            found.append(bounds(steps, self.costs, self.space.slots))
        return min(found, key=lambda one: one.floor_ns)

    def _reported(self, candidate: Candidate) -> Candidate:
        if not self.held_out or candidate.report is not None:
            return candidate
        return replace(candidate, report=self._run(candidate.settings, self.held_out))


def _looked(settings: Settings) -> tuple[Any, ...]:
    """What decides which predictions are read, and which are executed."""
    return settings.predictor, settings.prefetch_rolled, settings.prefetch_depth, settings.speculate_layers


def _short_list(plans: Sequence[Candidate]) -> list[Candidate]:
    """The cheapest plans, few of each family, and at least the cheapest of every family."""
    taken: dict[str, int] = {}
    firsts, others = [], []
    for plan in plans:
        taken[plan.family] = taken.get(plan.family, 0) + 1
        if taken[plan.family] == 1:
            firsts.append(plan)
        elif taken[plan.family] <= PER_FAMILY:
            others.append(plan)
    return firsts + others[: max(0, SHORT_LIST - len(firsts))]
