"""Settings measured on an engine that replays a recording, and beside it what the simulator says of the same steps.

A cell starts from caches that hold what the rest of its recording uses most, runs some steps that are not timed, and
then those that are. Simulations need no engine: `simulate_rows` adds or renews them in rows that were measured before.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.decode_rows import measure_rates
from benchmarks.replayed import BEHAVIOURS, by_name, decide_by, simulate_after
from benchmarks.workloads import Case, Engines, Way, Workload
from foreload.backend.cuda.forward import FastForward
from foreload.backend.engine import Engine
from foreload.backend.generation import Generation
from foreload.backend.policy.state import DECODE
from foreload.backend.replay import Replay
from foreload.errors import ForeloadError
from foreload.machine import cpu_name, machine_name, software
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.compiled import host
from foreload.simulator.costs import CostModel

PROFILE = "profile-h200-qwen3-30b-a3b.json"
FIRST_S = 4.0
"""What a cell is taken to need before any has run."""


@dataclass
class Cell:
    """One setting on one workload at one context, and its repeats; `refused` says why there are none. `steps`: no more
    than so many of the workload's are timed.
    """

    name: str
    workload: str
    settings: Settings
    context: int
    ratio: float | None = None
    steps: int | None = None
    case: Case | None = None
    capacity: tuple[int, ...] = ()
    runs: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0  # repeats for which there was no time
    refused: str = ""

    @property
    def tpot_ms(self) -> float:
        """The median of its repeats."""
        return median(run["tpot_ms"] for run in self.runs)


def find_costs(engine: Engine, out: Path) -> CostModel | None:
    """The cost model of the profile in `out`, by which the engine then decides.

    None if there is no profile: the engine then decides by rates measured now.
    """
    path = out / PROFILE
    if not path.exists():
        rates = measure_rates(engine).costs(engine)
        engine.use_costs(lambda _: rates)
        return None
    costs = CostModel(HardwareProfile.load(path), engine.shape, engine.dtype_name, replayed=True)
    decide_by(engine, costs)
    return costs


class Beside:
    """Measures cells on one engine until a time on the monotonic clock."""

    def __init__(
        self, engine: Engine, workloads: Sequence[Workload], until: float, link_bytes_per_s: int | None = None
    ) -> None:
        """`link_bytes_per_s`: a slower link for the steps, not for what caches start with."""
        self.engine, self.until, self._link = engine, until, link_bytes_per_s
        self._workloads = {one.name: one for one in workloads}
        self._recorded: dict[tuple[str, Way, str], Replay] = {}
        self._starts = {one.name: one.start for one in workloads}
        self._seconds: list[float] = []
        self._round = -1
        if isinstance(engine.forward, FastForward):
            engine.forward.behaviours = BEHAVIOURS

    def round(self, cells: Iterable[Cell]) -> None:
        """Each cell once, as far as there is time."""
        self._round += 1
        for cell in cells:
            others = 2 * median(self._seconds) if self._seconds else FIRST_S
            needed = 1.2 * cell.runs[-1]["seconds"] if len(cell.runs) > 1 else others
            if cell.refused:
                continue
            if time.monotonic() + needed > self.until:
                cell.left_out += 1
                continue
            try:
                self._run(cell)
            except ForeloadError as error:
                cell.refused = str(error)
            finally:
                self.engine.warm_by(None)  # whoever uses this engine next starts from nothing

    def _run(self, cell: Cell) -> None:
        engine, begun = self.engine, time.monotonic()
        workload = self._workloads[cell.workload]
        if cell.case is None:
            case = workload.case(cell.settings, Engines(engine.calibrated, engine.drafts.name))
            cell.case = case if cell.steps is None else replace(case, steps=min(case.steps, cell.steps))
        case = cell.case
        key = (cell.workload, case.way, case.settings.draft.kind)
        if key not in self._recorded:
            trace = workload.drafted(case.way, case.settings)
            self._recorded[key] = Replay(trace, engine.shape, engine.device)
        recorded = self._recorded[key]
        with engine.replaying(recorded):
            engine.warm_by(self._starts[cell.workload])
            engine.apply(case.settings)
            engine.reset_cache()
            done = self._steps(recorded, case, cell.context)
        cell.capacity = engine.capacity
        seconds = time.monotonic() - begun
        self._seconds.append(seconds)
        cell.runs.append(
            {
                "round": self._round,
                "tpot_ms": done.tpot_ms,
                "step_us": [step.duration_ns // 1000 for step in done.steps],
                "emitted": [step.emitted for step in done.steps],
                "counters": by_name(done.counters[DECODE]),
                "seconds": seconds,
            }
        )

    def _steps(self, recorded: Replay, case: Case, context: int) -> Generation:
        """The steps that are not timed, then those that are."""
        engine, request = self.engine, recorded.requests()[0]
        own = engine.link_bytes_per_s
        if self._link is not None:
            engine.throttle(self._link)
        try:
            before = engine.replay(recorded, request, case.warm, context)
            return engine.replay(recorded, request, case.steps, context + before.decode_tokens, case.warm)
        finally:
            if self._link is not None:
                engine.throttle(own)


def row(cell: Cell, engine: Engine) -> dict[str, Any]:
    """What a cell is and what was measured, for JSON."""
    found: dict[str, Any] = {
        "name": cell.name,
        "workload": cell.workload,
        "cache_ratio": cell.ratio,
        "context": cell.context,
        "settings": cell.settings.model_dump(mode="json", exclude_defaults=True),
        "left_out": cell.left_out,
        "refused": cell.refused,
    }
    case = cell.case
    if case is None or not cell.runs:
        return found
    counted = cell.runs[-1]["counters"]
    tokens = sum(cell.runs[-1]["emitted"])
    demanded = counted["hits"] + counted["late"] + counted["misses"]
    times = [run["tpot_ms"] for run in cell.runs]
    copied = counted["fetched"] + counted["prefetched"] + counted["uploaded"]
    return found | {
        "ran": case.settings.model_dump(mode="json", exclude_defaults=True),
        "way": asdict(case.way),
        "assumed": list(case.assumed),
        "warm_steps": case.warm,
        "steps": case.steps,
        "tokens": tokens,
        "tokens_per_step": tokens / case.steps,
        "slots": sum(cell.capacity),
        "capacity": list(cell.capacity),
        "tpot_ms": cell.tpot_ms,
        "spread_pct": 100 * (max(times) / min(times) - 1),
        "hit_rate": counted["hits"] / demanded if demanded else None,
        "late_rate": counted["late"] / demanded if demanded else None,
        "cpu_rate": counted["on_cpu"] / demanded if demanded else None,
        "experts_per_layer_step": demanded / case.steps / engine.shape.n_moe_layers,
        "copied_bytes_per_token": copied * engine.expert_bytes / tokens,
        "cpu_bytes_per_token": counted["on_cpu"] * engine.expert_bytes / tokens,
        "runs": cell.runs,
    }


def simulator_ready() -> bool:
    """Whether the simulator is compiled in this process: a first call takes a minute where it is in no cache."""
    return len(getattr(host.decode, "signatures", "plain Python")) > 0


def simulate_rows(
    rows: Iterable[dict[str, Any]], workloads: Sequence[Workload], costs: CostModel, until: float = float("inf")
) -> None:
    """Add to each measured row what is simulated for the same steps, or why nothing is, until a monotonic time."""
    named = {one.name: one for one in workloads}
    for one in rows:
        if "ran" not in one or time.monotonic() > until:
            continue
        try:
            one["simulated"] = simulated(one, named[one["workload"]], costs)
            one["error_pct"] = 100 * (one["simulated"]["tpot_ms"] / one["tpot_ms"] - 1)
            told = [(counters["fetched"], counters["on_cpu"], counters["hits"]) for counters in _counted(one)]
            one["same_counts"] = told[0] == told[1]
        except ForeloadError as error:
            one["simulated"], one["error_pct"] = {"refused": str(error)}, None


def _counted(one: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """What the last repeat counted, and what the simulation did."""
    return one["runs"][-1]["counters"], one["simulated"]["counters"]


def costs_of(path: Path) -> CostModel:
    """The cost model of a profile, for the shape and type it was measured with."""
    profile = HardwareProfile.load(path)
    return CostModel(profile, ModelShape.from_fields(profile.meta.shape), profile.meta.dtype, replayed=True)


def simulated(one: Mapping[str, Any], workload: Workload, costs: CostModel) -> dict[str, Any]:
    """The timed steps of a row: those of all its steps without those of its first ones."""
    settings, way = Settings.parse(one["ran"]), Way(**one["way"])
    trace = workload.drafted(way, settings)
    starts = trace.step_starts()
    trace = replace(trace, position=trace.position - trace.position[0] + np.int32(one["context"]))

    trace = trace.take(slice(0, int(starts[one["warm_steps"] + one["steps"]])))
    part = simulate_after(trace, one["warm_steps"], costs, settings, tuple(one["capacity"]), workload.start)
    tokens = len(part.token_ns)
    return {
        "tpot_ms": float(part.token_ns.sum()) / tokens / 1e6,
        "time_per_token_ms": {kind: ns / tokens / 1e6 for kind, ns in sorted(part.time_ns.items())},
        "counters": by_name(part.counters),
        "sources": dict(part.sources),
    }


def provenance(engine: Engine, workloads: Sequence[Workload]) -> dict[str, Any]:
    """Where rows come from, for JSON."""
    on_gpu = engine.options.device == "cuda"
    return {
        "model": engine.checkpoint.name,
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "machine": machine_name(),
        "software": software(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "path": engine.path,
        "dtype": engine.dtype_name,
        "expert_bytes": engine.expert_bytes,
        "emulated_link_bytes_per_s": engine.options.link_bytes_per_s,
        "routing": {one.name: one.source for one in workloads},
        "starts_with": "the experts that the rest of the recording uses most",
    }
