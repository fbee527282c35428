"""Tuned settings beside a grid that the tuner did not make, for some cache sizes and links: simulated on all cores.

The grid: the largest uniform cache under every eviction order, look-ahead, miss action, admission and draft that the
recording and the profile allow. It is simulated on the beginning of the tuner's tokens first, then its best on all; of
settings that do the same only one is among the best.
"""

from __future__ import annotations

import hashlib
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor
from numpy.typing import NDArray

from benchmarks.workloads import ACCEPTED, Workload
from foreload.machine import cores
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, staging_slots
from foreload.simulator.candidates import NO_PREFETCH, Space
from foreload.simulator.compiled import simulate_requests
from foreload.simulator.costs import CostModel
from foreload.simulator.machines import assume
from foreload.simulator.tune import TuneResult, tune
from foreload.simulator.workload import first_steps, load_requests
from foreload.traces.remodel import with_windows
from foreload.traces.schema import Trace

TOKENS, FIRST = 128, 40
"""Decode steps that the tuner and the grid's best are simulated on, and those that the whole grid is."""
CHUNKS, BEST_OF_CHUNK, BEST = 4, 12, 10
GAMMA = 4


@dataclass(frozen=True)
class Budget:
    """One cache size on one link; `link`: bytes per second, None: as it is."""

    link: int | None
    ratio: float

    @property
    def key(self) -> str:
        """As a name in JSON."""
        return f"{self.ratio:g} at {'the full rate' if self.link is None else f'{self.link / 1e9:g} GB/s'}"


@dataclass(frozen=True)
class Inputs:
    """What is tuned on: the profile, tokens that are not replayed in measurements, and what caches start with."""

    profile: HardwareProfile
    trace: Trace
    start: NDArray[Any]

    @classmethod
    def of(cls, profile: HardwareProfile, workload: Workload, tokens: int = TOKENS) -> Inputs:
        """With made-up windows of n-gram drafts, as they are replayed too, so that drafts may compete."""
        return cls(profile, with_windows(workload.rest(tokens), "ngram", GAMMA, (ACCEPTED,)), workload.start)

    @property
    def key(self) -> str:
        """A hash of it."""
        found = hashlib.sha256(self.profile.model_dump_json().encode())
        found.update(self.trace.experts.tobytes() + self.start.tobytes())
        return found.hexdigest()[:16]

    def costs(self, budget: Budget) -> CostModel:
        """Of the profiled machine with the budget's link."""
        profile = self.profile if budget.link is None else assume(self.profile, budget.link, None, None).profile
        return CostModel(profile, self.trace.meta.model_shape(), profile.meta.dtype, replayed=True)

    def slots(self, budget: Budget) -> int:
        """What the default may use at that cache size, staging included."""
        shape = self.trace.meta.model_shape()
        return round(budget.ratio * shape.all_experts) + staging_slots(Settings(), shape)

    def tune(self, budget: Budget) -> TuneResult:
        """The tuner's answer."""
        costs = self.costs(budget)
        return tune(
            self.trace, costs.profile, costs.shape, costs.profile.meta.dtype, slots=self.slots(budget),
            warm=self.start, replayed=True,
        )  # fmt: skip


def grid(space: Space) -> list[Settings]:
    """Every combination that fits, none twice."""
    evictions = ("lru", "lfu", "lfru", "utility", *(("static",) if space.warm else ()))
    drafts = [{}] if space.draft is None else [{}, space.draft.model_dump()]
    found = {}
    for eviction, ahead, miss, draft in itertools.product(evictions, _aheads(space), _misses(space), drafts):
        settings = space.base.changed(eviction=eviction, **ahead, **miss, draft=draft)
        filled = space.filled(settings.changed(slots_per_layer=None))
        if filled is not None:
            found[filled] = None
    return list(found)


def _aheads(space: Space) -> Iterator[dict[str, Any]]:
    yield NO_PREFETCH
    k = space.shape.top_k
    widths = (k, 2 * k) if 2 * k in space.widths else (max(1, k // 2), k)
    for depth in (1, 2):
        for (name, rolled), width in itertools.product(space.looks.get(depth, ())[:1], widths):
            if width in space.widths:
                yield {"predictor": name, "prefetch_rolled": rolled, "prefetch_depth": depth, "prefetch_width": width}


def _misses(space: Space) -> Iterator[dict[str, Any]]:
    for admission in ("demand", "none"):
        yield {"miss_action": "fetch", "admission": admission}
    if not space.threads:
        return
    for admission in ("demand", "background", "none"):
        fields = {"cpu_threads": space.threads[-1], "admission": admission}
        yield {"miss_action": "cpu", **fields}
        for rule in ("makespan", "bandwidth", "tau"):
            yield {"miss_action": "split", "split_rule": rule, **fields}


def _space(inputs: Inputs, budget: Budget, costs: CostModel) -> Space:
    return Space.of([inputs.trace], costs, Settings(), inputs.slots(budget), warm=True)


def _simulated(inputs: Inputs, costs: CostModel, settings: Settings, steps: int | None) -> float:
    requests = load_requests(inputs.trace, costs.shape, settings)
    if steps is not None:
        requests = [first_steps(request, steps) for request in requests]
    capacity = settings.slots_per_layer or ()
    return simulate_requests(requests, costs, settings, capacity, inputs.start).tpot_ns / 1e6


def _tuned(inputs: Inputs, budget: Budget) -> dict[str, Any]:
    """The tuner's answer, the default and all presets, with their simulated milliseconds per token."""
    costs, begun = inputs.costs(budget), time.perf_counter()
    result = inputs.tune(budget)
    seconds = time.perf_counter() - begun
    named = {"tuned": result.best, "default": result.default, **{c.name: c for c in result.presets()}}
    return {
        "seconds": seconds,
        "named": {name: [_plain(c.settings), _simulated(inputs, costs, c.settings, None)] for name, c in named.items()},
        "candidates": len(result.candidates),
    }


def _chunk(inputs: Inputs, budget: Budget, chunk: int, steps: int) -> dict[str, Any]:
    """The best of every CHUNKS-th setting of the grid, one of those that do the same, and how many there were."""
    costs = inputs.costs(budget)
    every = grid(_space(inputs, budget, costs))
    mine = every[chunk::CHUNKS]
    first = _fastest({settings: _simulated(inputs, costs, settings, steps) for settings in mine}, BEST_OF_CHUNK)
    best = [[_plain(settings), _simulated(inputs, costs, settings, None)] for settings in first]
    return {"settings": len(mine), "best": best}


def _fastest(ms: Mapping[Settings, float], most: int) -> list[Settings]:
    """The fastest, one for each time: where caches never change, eviction orders do the same to the nanosecond."""
    distinct: dict[float, Settings] = {}
    for settings, time_ms in ms.items():
        distinct.setdefault(time_ms, settings)
    return [distinct[time_ms] for time_ms in sorted(distinct)[:most]]


def _plain(settings: Settings) -> dict[str, Any]:
    return settings.model_dump(mode="json", exclude_defaults=True)


def _work(inputs: Inputs, budget: Budget, chunk: int | None, steps: int) -> tuple[Budget, int | None, dict[str, Any]]:
    found = _tuned(inputs, budget) if chunk is None else _chunk(inputs, budget, chunk, steps)
    return budget, chunk, found


def prepare(inputs: Inputs, budgets: Sequence[Budget], seconds: float, first: int = FIRST) -> dict[str, Any]:
    """Per budget what was tuned and the grid's ten best, as far as about so many seconds allow, for JSON.

    A budget that was not finished is left out; with one core there is no limit.
    """
    jobs = [delayed(_work)(inputs, budget, chunk, first) for budget in budgets for chunk in (None, *range(CHUNKS))]
    workers = max(1, min(cores(), len(jobs)))
    limit = seconds if workers > 1 else None
    done: dict[Budget, dict[int | None, dict[str, Any]]] = {budget: {} for budget in budgets}
    begun = time.perf_counter()
    try:
        with suppress(multiprocessing.TimeoutError):
            for budget, chunk, found in Parallel(workers, return_as="generator_unordered", timeout=limit)(jobs):
                done[budget][chunk] = found
                if limit is not None and time.perf_counter() - begun > limit:
                    break
    finally:
        if workers > 1:
            get_reusable_executor().shutdown(wait=False, kill_workers=True)
    whole = {budget.key: _joined(budget, inputs, of) for budget, of in done.items() if len(of) == 1 + CHUNKS}
    return {
        "key": inputs.key,
        "seconds": time.perf_counter() - begun,
        "workers": workers,
        "left_out": [budget.key for budget in budgets if budget.key not in whole],
        "budgets": whole,
    }


def _joined(budget: Budget, inputs: Inputs, parts: Mapping[int | None, dict[str, Any]]) -> dict[str, Any]:
    tuned, chunks = parts[None], [parts[chunk] for chunk in range(CHUNKS)]
    each = {entry[1]: entry for chunk in chunks for entry in chunk["best"]}
    best = [each[time_ms] for time_ms in sorted(each)[:BEST]]
    ms = {name: of[1] for name, of in tuned["named"].items()}
    presets = [of for name, of in ms.items() if name.startswith("preset ")]
    return {
        "link_bytes_per_s": budget.link,
        "cache_ratio": budget.ratio,
        "slots": inputs.slots(budget),
        "tune_seconds": tuned["seconds"],
        "candidates": tuned["candidates"],
        "grid_settings": sum(chunk["settings"] for chunk in chunks),
        "named": tuned["named"],
        "grid": best,
        "simulated_regret_pct": 100 * (ms["tuned"] / best[0][1] - 1),
        "simulated_behind_best_preset_pct": 100 * (ms["tuned"] / min(presets) - 1) if presets else None,
        "simulated_speedup": ms["default"] / ms["tuned"],
    }
