"""The work of a tune as jobs: values that say what to simulate or plan, and one function that does it anywhere.

A job gives the same result in this process, in another one, and on another machine: nothing is looked up but the
`Context` it comes with. Its key names it on disk (`journal`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from foreload import simulator
from foreload.backend import policy
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.compiled import simulate_requests
from foreload.simulator.costs import CostModel
from foreload.simulator.replay import Outcomes
from foreload.simulator.result import SimResult
from foreload.simulator.solver import Problem, Solution, best_plans, by_sorting, solve
from foreload.simulator.tables import grid_around, layer_costs, link_times, replay_grid, slot_grid
from foreload.simulator.tuner.rows import NO_LIMITS, InFormat, Limits, planned, program
from foreload.simulator.whatif import Machine, on_machine
from foreload.simulator.workload import Request, first_steps, load_requests
from foreload.traces.schema import Trace

Robust = Literal["mean", "worst"]
Chosen: TypeAlias = tuple[tuple[int, ...], ...]
"""Requests of each recording."""
ROUGH_POINTS = 7
PROFILED = Machine()
GAP = 0.002
"""How far a plan under several budgets may be from the best one, a share of its time."""
HELD = 12
"""Sets of loaded requests a process keeps."""


@dataclass(frozen=True, eq=False)
class Context:
    """What every job of a tune looks at; `key` is a hash of all of it."""

    traces: tuple[Trace, ...] = field(repr=False)
    profile: HardwareProfile = field(repr=False)
    shape: ModelShape = field(repr=False)
    dtype: str
    warm: NDArray[np.int64] | None = field(repr=False)
    replayed: bool  # whether routing is replayed, see `CostModel`
    key: str

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        profile: HardwareProfile,
        shape: ModelShape,
        dtype: str,
        warm: NDArray[np.int64] | None = None,
        replayed: bool = False,
    ) -> Context:
        """With its key."""
        found = hashlib.sha256()
        for trace in traces:
            found.update(trace.meta.model_dump_json().encode())
            columns = [trace.request, trace.step, trace.phase, trace.position, trace.accepted, trace.experts]
            for column in (*columns, *(trace.predictions[key] for key in sorted(trace.predictions))):
                found.update(np.ascontiguousarray(column).tobytes())
        found.update(profile.model_dump_json().encode() + _code())
        found.update(f"{shape.hash} {dtype} {replayed}".encode())
        found.update(b"" if warm is None else np.ascontiguousarray(warm, np.int64).tobytes())
        return cls(tuple(traces), profile, shape, dtype, warm, replayed, found.hexdigest())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@cache
def _code() -> bytes:
    """A hash of what decides and simulates, so that nothing is taken over from another version of it."""
    found = hashlib.sha256()
    for package in (policy, simulator):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            found.update(path.read_bytes())
    return found.digest()


@dataclass(frozen=True)
class SimJob:
    """Simulate `settings` on `requests` of each recording, up to `steps` decode steps of each request."""

    settings: Settings
    requests: Chosen
    steps: int | None = None
    machine: Machine = PROFILED


@dataclass(frozen=True)
class PlanJob:
    """Plan slots per layer for settings that share their replays, each within a number of slots.

    `count` plans each, two of which differ in at least `distance` layers.
    """

    asks: tuple[tuple[Settings, int], ...]  # and how many slots there are, staging included
    requests: Chosen
    steps: int | None = None
    robust: Robust = "mean"
    count: int = 1
    distance: int = 1
    rough: bool = False  # by sorting, from fewer slot counts; else those about the first ask's mean
    relax: bool = False  # whether the linear program's bound is wanted
    formats: tuple[tuple[str, float], ...] = ()  # expert formats that layers may be in, with their losses in per cent
    limits: Limits = NO_LIMITS
    machine: Machine = PROFILED


@dataclass(frozen=True)
class Plan:
    """Slots per layer for one of the settings that were asked about; times per token as the tables have them."""

    settings: Settings
    slots: int  # there were, staging included
    planned_ns: float
    bound_ns: float  # no division of the slots is planned to take less
    relaxed_ns: float | None  # the linear program's bound; None: not asked for
    outcome: str
    solver: str

    @property
    def gap(self) -> float:
        """How far the plan may be from the best one, a share of its time."""
        return (self.planned_ns - self.bound_ns) / self.planned_ns if self.planned_ns else 0.0


Job: TypeAlias = SimJob | PlanJob
Done: TypeAlias = tuple[SimResult, ...] | tuple[Plan, ...]


def job_key(context: Context, job: Job) -> str:
    """A name for the job that no other has."""
    values = asdict(job)
    for name in ("settings", "asks"):
        if name in values:
            values[name] = _plain(getattr(job, name))
    text = json.dumps([type(job).__name__, values], sort_keys=True)
    return hashlib.sha256(f"{context.key} {text}".encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.model_dump(mode="json")
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


def perform(context: Context, job: Job) -> Done:
    """Do a job."""
    bench = _bench(context)
    return bench.simulate(job) if isinstance(job, SimJob) else bench.plan(job)


@lru_cache(maxsize=2)
def _bench(context: Context) -> Bench:
    return Bench(context)


class Bench:
    """Loaded requests and cost models of a context."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._costs: dict[Machine, CostModel] = {}
        self._loaded: dict[tuple[Any, ...], list[Request]] = {}

    def costs(self, machine: Machine) -> CostModel:
        """The cost model of the profiled machine, changed as asked."""
        if machine not in self._costs:
            context = self._context
            profile = on_machine(context.profile, machine)
            self._costs[machine] = CostModel(profile, context.shape, context.dtype, replayed=context.replayed)
        return self._costs[machine]

    def requests(self, settings: Settings, chosen: Chosen, steps: int | None) -> list[list[Request]]:
        """Loaded requests of each recording, with the predictions that `settings` read."""
        looks = (settings.predictor, settings.prefetch_rolled, settings.prefetch_depth, settings.width(self._shape))
        reads = (*looks, settings.speculate_layers, settings.draft.kind, settings.draft.gamma)
        return [self._of(at, settings, numbers, steps, reads) for at, numbers in enumerate(chosen)]

    @property
    def _shape(self) -> ModelShape:
        return self._context.shape

    def _of(
        self, at: int, settings: Settings, numbers: tuple[int, ...], steps: int | None, reads: tuple[Any, ...]
    ) -> list[Request]:
        key = (at, numbers, steps, *reads)
        if key not in self._loaded:
            loaded = load_requests(self._context.traces[at], self._shape, settings, numbers)
            while len(self._loaded) >= HELD:
                del self._loaded[next(iter(self._loaded))]
            self._loaded[key] = loaded if steps is None else [first_steps(request, steps) for request in loaded]
        return self._loaded[key]

    def simulate(self, job: SimJob) -> tuple[SimResult, ...]:
        """One result per recording."""
        capacity, costs = job.settings.slots_per_layer or (), self.costs(job.machine)
        loaded = self.requests(job.settings, job.requests, job.steps)
        traces, warm = self._context.traces, self._context.warm
        return tuple(
            simulate_requests(requests, costs, job.settings, capacity, warm, trace.meta.sampled)
            for trace, requests in zip(traces, loaded, strict=True)
        )

    def plan(self, job: PlanJob) -> tuple[Plan, ...]:
        """The plans of every ask in turn; none of one whose staging does not fit."""
        first = job.asks[0][0]
        costs = self.costs(job.machine).for_settings(first)
        loaded = self.requests(first, job.requests, job.steps)
        room = max(0, job.asks[0][1] - staging_slots(first, self._shape))
        points = slot_grid(self._shape, ROUGH_POINTS)
        if not job.rough:
            points = grid_around(self._shape, -(-room // self._shape.n_moe_layers))
        grids = [replay_grid(requests, costs, first, points, self._context.warm) for requests in loaded]
        context = int(median(c for requests in loaded for request in requests for c in request.context))
        found: list[Plan] = []
        for settings, slots in job.asks:
            room = slots - staging_slots(settings, self._shape)
            if room >= 0:
                tables = self._tables(job, settings, grids, context, points)
                for one in _solutions(job, program(tables, room, job.limits)):
                    chosen = planned(settings, one.choice, tables, self._shape)
                    found.append(_plan_of(chosen, slots, one, job.relax))
        return tuple(found)

    def _tables(
        self,
        job: PlanJob,
        settings: Settings,
        grids: Sequence[Sequence[Outcomes]],
        context: int,
        points: Sequence[int],
    ) -> list[InFormat]:
        """Of all recordings together, in every format that layers may be in, or in the settings' own."""
        found, weights = [], [max(1, grid[0].tokens) for grid in grids]
        for name, loss_pct in job.formats or (("", 0.0),):
            chosen = settings.changed(expert_format=name) if name else settings
            costs = self.costs(job.machine).for_settings(chosen)
            if job.limits.pinned_bytes is not None:
                costs = costs.all_pinned()
            times = _joined([layer_costs(grid, costs, chosen, context, points) for grid in grids], weights, job.robust)
            link = _joined([link_times(grid, costs, points) for grid in grids], weights, job.robust)
            found.append(InFormat(times, link, costs.layer_bytes, name, loss_pct))
        return found


def _solutions(job: PlanJob, problem: Problem) -> list[Solution]:
    gap = GAP if len(problem.limit) > 1 else 0.0
    if job.count > 1:
        solutions = best_plans(problem, job.count, job.distance, gap=gap)
    elif job.rough and not gap:
        solutions = [by_sorting(problem)]
    else:
        solutions = [solve(problem, gap=gap, relax=job.relax)]
    return [solution for solution in solutions if solution.found]


def _plan_of(settings: Settings, slots: int, solution: Solution, relax: bool) -> Plan:
    relaxed = solution.relaxed if relax else None
    return Plan(settings, slots, solution.objective, solution.bound, relaxed, solution.outcome.value, solution.solver)


def _joined(tables: Sequence[NDArray[np.float64]], weights: Sequence[int], robust: Robust) -> NDArray[np.float64]:
    """One table of all recordings: the mean over their tokens, or, of each entry, the dearest."""
    stacked = np.stack(tables)
    found: NDArray[np.float64] = (
        stacked.max(axis=0) if robust == "worst" else np.average(stacked, axis=0, weights=weights)
    )
    return found


def replays_alike(settings: Settings, shape: ModelShape) -> tuple[Any, ...]:
    """What decides the replays behind a plan: settings with the same are planned in one job."""
    weighs = (settings.cpu_threads, settings.split_rule, settings.objective) if settings.miss_action == "split" else ()
    own = settings.model_dump(exclude={"slots_per_layer", "cache_ratio", "cpu_threads", "split_rule", "objective"})
    return (*weighs, json.dumps(own, sort_keys=True, default=str), shape.hash)


def sharing(asks: Sequence[tuple[Settings, int]], shape: ModelShape, like: PlanJob) -> list[PlanJob]:
    """Jobs for `asks`, those with the same replays together; all else as in `like`."""
    groups: dict[tuple[Any, ...], list[tuple[Settings, int]]] = {}
    for settings, slots in asks:
        groups.setdefault(replays_alike(settings, shape), []).append((settings, slots))
    return [replace(like, asks=tuple(group)) for group in groups.values()]
