"""The search of `tune`: programs plan, a part of the requests shortens the list, whole simulations decide.

Every candidate that may matter is simulated whole: the default, all presets, and what is within `NEAR` of the best on
the part. Then small changes of the best ones are tried until none helps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from foreload.settings import Settings
from foreload.simulator.candidates import NO_PREFETCH, Candidate, Space, family
from foreload.simulator.result import SimResult, joined
from foreload.simulator.tuner.jobs import PROFILED, Chosen, Plan, PlanJob, Robust, SimJob, sharing
from foreload.simulator.tuner.moves import neighbours
from foreload.simulator.tuner.pool import Pool
from foreload.simulator.tuner.rows import Limits
from foreload.simulator.whatif import Machine
from foreload.traces.schema import PREFILL

PLAN_STEPS, WHOLE_STEPS, SCREEN_STEPS = 256, 1024, 192
"""Decode steps of a recording by which options are planned, then the best of them, and candidates compared first."""
SHORT_LIST, PER_FAMILY = 16, 2
PLANNED_WHOLE, PLANS_EACH, PLANS_APART = 3, 3, 4
"""Options planned again of the best simulated and of the cheapest, plans of each, layers in which two plans differ."""
NEAR, NEARER, AT_LEAST = 1.15, 1.03, 8
"""Candidates to simulate whole: within this factor of the best on the part, later this one; at first so many at least.
"""
MIXED_KINDS = 2
"""Kinds of settings that are planned with a format for each layer."""
ROUNDS, EXPANDED = 4, 3
"""Rounds of small changes, and the candidates that are changed in each."""


@dataclass
class Found:
    """What a search has simulated, and the plans behind it."""

    default: Candidate
    whole: dict[Settings, Candidate] = field(default_factory=dict)  # simulated on all requests that choose
    part: dict[Settings, float] = field(default_factory=dict)  # nanoseconds per token on a part of them
    names: dict[Settings, Candidate] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)  # the lowest bound first

    def ranked(self) -> list[Candidate]:
        """Candidates that were simulated whole and keep their budgets, best first."""
        return sorted((c for c in self.whole.values() if not c.over_ns), key=lambda c: c.tpot_ns)


class Search:
    """One search: `fit` requests plan, `select` requests choose."""

    def __init__(self, pool: Pool, space: Space, fit: Chosen, select: Chosen, robust: Robust = "mean") -> None:
        self._pool, self.space = pool, space
        self._fit, self._select, self._robust = fit, select, robust
        self.plan_steps = self._part(fit, PLAN_STEPS)
        self.screen_steps = self._part(select, SCREEN_STEPS)
        self.whole_steps = self._part(fit, WHOLE_STEPS)
        """Steps of each request that options are planned on, then the best of them, and candidates compared first."""

    def _part(self, chosen: Chosen, steps: int) -> int | None:
        """Steps of each request that make a part of about `steps`; None: all, where that is hardly more."""
        most = max((len(numbers) for numbers in chosen), default=1)
        return None if self.steps_of(chosen, None) <= 2 * steps * len(chosen) else -(-steps // most)

    def steps_of(self, chosen: Chosen, steps: int | None) -> int:
        """Decode rows of all recordings together, up to so many of each request."""
        total = 0
        for trace, numbers in zip(self._pool.context.traces, chosen, strict=True):
            for number in numbers:
                rows = int(((trace.request == number) & (trace.phase != PREFILL)).sum())
                total += rows if steps is None else min(rows, steps)
        return total

    def run(self) -> Found:
        """Plan, shorten, simulate, change, until nothing helps."""
        fixed = list(self.space.fixed())
        found = Found(fixed[0])
        found.plans = self._plans()
        presets = list(self.space.presets())
        first = [fixed[0], *presets]
        self._try(found, [*first, *fixed[1:], *_short_list(found.plans)], {c.settings for c in first})
        self._try(found, self._best_plans(found))
        self._try(found, self._mixed_plans(found))
        self._try(found, self._smaller_plans(found))
        expanded: set[Settings] = set()
        for _ in range(ROUNDS):
            starts = [c for c in found.ranked()[:EXPANDED] if c.settings not in expanded]
            if not starts:
                break
            expanded |= {c.settings for c in starts}
            self._try(found, [change for start in starts for change in self._changes(start)])
        found.default = found.whole[fixed[0].settings]
        return found

    # Planning

    def options(self) -> list[Settings]:
        """Settings whose slots are planned: every way to serve a miss with every way to look ahead."""
        prefetches = list(self.space.prefetches())
        base = self.space.base.changed(draft={}, pool="layer", slots_per_layer=None, cache_ratio=None)
        found = [base.changed(**miss, **prefetch) for miss in self.space.misses() for prefetch in prefetches]
        return [option for option in found if self.space.loss_pct(option) is not None]

    def _plans(self) -> list[Plan]:
        """One program per option, all with the eviction order that plans best without prefetch or CPU."""
        like = self.rough_plan()
        plain = self.options()[0].changed(miss_action="fetch", admission="demand", **NO_PREFETCH)
        orders = [plain.changed(**fields) for fields in self.space.evictions()]
        tried = self._planned(orders, like, "plan evictions")
        best = min(tried, key=lambda plan: plan.bound_ns).settings if tried else plain
        order = {"eviction": best.eviction, "half_life": best.half_life}
        plans = self._planned([option.changed(**order) for option in self.options()], like, "plan")
        return sorted(plans, key=lambda plan: plan.bound_ns)

    def _planned(self, options: Sequence[Settings], like: PlanJob, what: str) -> list[Plan]:
        asks = [(option, self.space.budget(option)) for option in options]
        return self.plans(sharing(asks, self.space.shape, like), what)

    def rough_plan(self, machine: Machine = PROFILED) -> PlanJob:
        """How options are planned first: on a part, by sorting."""
        return PlanJob((), self._fit, self.plan_steps, self._robust, rough=True, machine=machine, limits=self._link)

    @property
    def _link(self) -> Limits:
        """What any plan keeps to."""
        return Limits(link_ns=self.space.limits.link_ns)

    def plans(self, jobs: Sequence[PlanJob], what: str) -> list[Plan]:
        """All plans of the jobs."""
        return [plan for done in self._pool.map(jobs, what) for plan in done if isinstance(plan, Plan)]

    def _best_plans(self, found: Found) -> list[Candidate]:
        """More than one plan of what was simulated best and of what is planned best, on all requests that plan."""
        best = [*self._plannable(found)[:PLANNED_WHOLE], *(plan.settings for plan in found.plans[:PLANNED_WHOLE])]
        return self._planned_whole(best, PLANS_EACH, "plan on all")

    def _smaller_plans(self, found: Found) -> list[Candidate]:
        """Plans of the best with experts that hold the same numbers in fewer bytes, where there is such a format."""
        if self.space.smaller is None:
            return []
        best = [s for s in self._plannable(found) if not s.speculate_layers and self.space.same_numbers(s)]
        packed = [settings.changed(expert_format=self.space.smaller) for settings in best[:PLANNED_WHOLE]]
        return self._planned_whole(packed, 1, "plan in fewer bytes")

    def _planned_whole(self, chosen: Sequence[Settings], each: int, what: str) -> list[Candidate]:
        """So many plans of each, whatever their slots, on all requests that plan."""
        like = PlanJob((), self._fit, self.whole_steps, self._robust, each, PLANS_APART, limits=self._link)
        kinds = dict.fromkeys(settings.changed(slots_per_layer=None) for settings in chosen)
        return [_candidate(plan) for plan in self._planned(list(kinds), like, what)]

    def _plannable(self, found: Found) -> list[Settings]:
        """What was simulated and programs plan slots of, the best first."""
        return [c.settings for c in found.ranked() if c.settings.pool == "layer" and c.settings.draft.kind == "none"]

    def _mixed_plans(self, found: Found) -> list[Candidate]:
        """Plans that choose a format for each layer, too, of the kinds that were simulated best in one format."""
        base = self.space.base.expert_format
        best = [s for s in self._plannable(found) if not s.speculate_layers]
        kinds = [settings.changed(slots_per_layer=None, expert_format=base) for settings in best]
        jobs = []
        for kind in list(dict.fromkeys(kinds))[:MIXED_KINDS]:
            for formats in self.space.mixes():
                sized = kind.changed(expert_format=formats[0][0])
                ask = (sized, self.space.budget(sized))
                more = {"formats": formats, "limits": self.space.limits}
                jobs.append(PlanJob((ask,), self._fit, self.whole_steps, self._robust, **more))  # type: ignore[arg-type]
        filled = [self.space.fitted(plan.settings) for plan in self.plans(jobs, "plan formats")]
        return [
            Candidate("program, formats by layer", family(settings), settings)
            for settings in filled
            if settings is not None and self.space.loss_pct(settings) is not None
        ]

    # Simulating

    def _changes(self, start: Candidate) -> list[Candidate]:
        return [
            Candidate(f"{start.name}, {what}" if len(start.name) < 60 else start.name, family(other), other)
            for what, other in neighbours(self.space, start.settings)
        ]

    def _try(self, found: Found, candidates: Sequence[Candidate], always: Collection[Settings] = ()) -> None:
        """Simulate what is new: on a part first, then whole what is near the best on it, and `always` in any case."""
        new: dict[Settings, Candidate] = {}
        for candidate in candidates:
            if candidate.settings not in found.names:
                new.setdefault(candidate.settings, candidate)
        found.names.update(new)
        wanted = list(new)
        if self.screen_steps is not None and wanted:
            parts = self._simulated(wanted, self.screen_steps, "simulate a part")
            found.part.update(dict(zip(wanted, (self._tpot(results) for results in parts), strict=True)))
            limit = (NEAR if always else NEARER) * min(found.part.values())
            order = sorted(wanted, key=lambda settings: found.part[settings])
            near = {s for at, s in enumerate(order) if found.part[s] <= limit or (always and at < AT_LEAST)}
            wanted = [s for s in wanted if s in near or s in always]
        for settings, results in zip(wanted, self._simulated(wanted, None, "simulate"), strict=True):
            found.whole[settings] = self._known(new[settings], results)

    def _simulated(self, wanted: Sequence[Settings], steps: int | None, what: str) -> list[tuple[SimResult, ...]]:
        return self.simulated([SimJob(settings, self._select, steps) for settings in wanted], what)

    def simulated(self, jobs: Sequence[SimJob], what: str) -> list[tuple[SimResult, ...]]:
        """Results per job and recording."""
        done = self._pool.map(jobs, what)
        return [tuple(one for one in results if isinstance(one, SimResult)) for results in done]

    def part_job(self, settings: Settings, machine: Machine) -> SimJob:
        """To simulate on the part that candidates are compared on first."""
        return SimJob(settings, self._select, self.screen_steps, machine)

    def times(self, jobs: Sequence[SimJob], what: str) -> list[float]:
        """Nanoseconds per token of each job, as recordings are judged."""
        return [self._tpot(results) for results in self.simulated(jobs, what)]

    def _over_ns(self, results: Sequence[SimResult]) -> float:
        """By how much the link is busy beyond its budget."""
        limit = self.space.limits.link_ns
        return 0.0 if limit is None else max(0.0, joined(results).link_ns - limit)

    def _tpot(self, results: Sequence[SimResult]) -> float:
        if self._over_ns(results):
            return float("inf")
        return max(r.tpot_ns for r in results) if self._robust == "worst" else joined(results).tpot_ns

    def _known(self, candidate: Candidate, results: Sequence[SimResult]) -> Candidate:
        worst = max(r.tpot_ns for r in results) if self._robust == "worst" else None
        tpots = tuple(r.tpot_ns for r in results)
        over = self._over_ns(results)
        return replace(candidate, result=joined(results), worst_ns=worst, tpots_ns=tpots, over_ns=over)


def _candidate(plan: Plan) -> Candidate:
    return Candidate("program", family(plan.settings), plan.settings, plan.planned_ns)


def _short_list(plans: Sequence[Plan]) -> list[Candidate]:
    """The cheapest plans, few of each family, and at least the cheapest of every family."""
    taken: dict[str, int] = {}
    firsts, others = [], []
    for plan in map(_candidate, plans):
        taken[plan.family] = taken.get(plan.family, 0) + 1
        if taken[plan.family] == 1:
            firsts.append(plan)
        elif taken[plan.family] <= PER_FAMILY:
            others.append(plan)
    return firsts + others[: max(0, SHORT_LIST - len(firsts))]
