"""What-if checked: another link and fewer CPU cores, simulated from the profile of the machine as it is, and measured.

    python -m benchmarks.whatif_h200 --out DIR [--model shape:qwen3-30b-a3b] [--trace FILE] [--device cuda]
        [--profile FILE] [--minutes 2]
    python -m benchmarks.whatif_h200 --out DIR --predict [--model ...] [--trace FILE]

The engine's link is made to look slower (26 and 12 GB/s: `Engine.throttle`), its CPU experts get 4 and 8 threads; it
shares misses out by what the machine it plays costs. Each machine is predicted as `simulate --link` and `--cpu-scale`
would, of the profile and the routing alone: `--cpu-scale` is how fast the profiled CPU experts are on so many threads,
of what they are on the most. Writes DIR/whatif-h200-runs.json, every repeat, and DIR/whatif-h200.json; where predicting
would take compiling, it is done afterwards from what DIR holds (--predict).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.beside import PROFILE, simulator_ready
from benchmarks.decode import workload as made_up
from benchmarks.replayed import Bench, Lengths, Trial, Workload, decide_by, predict, shown
from benchmarks.validate_h200 import (
    Cell,
    Rounds,
    Wanted,
    compared,
    fitting,
    kept,
    measured,
    measured_with,
    predicted_cells,
    profile_of,
    routing_of,
    unpredicted,
    works_of,
)
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.experts.transfer import followed
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import ForeloadError
from foreload.files import read_mapping, write_json
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.costs import CostModel
from foreload.simulator.machines import assume
from foreload.simulator.validation import compare, summarise
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

NAME = "whatif-h200"
LINKS_GB_PER_S, THREADS = (26, 12), (8, 4)
LENGTHS = Lengths(warm=8, steps=12, warm_windows=3, windows=6)
ROUNDS, OTHERS = 6, 3
"""Rounds, and of which one in how many has settings without CPU experts, too: other load hardly changes those."""
NGRAM: dict[str, Any] = {"draft": {"kind": "ngram", "gamma": 4}}
AHEAD: dict[str, Any] = {"predictor": "gate", "prefetch_depth": 1}
LATER: dict[str, Any] = {"admission": "background"}

OF_LINK: tuple[dict[str, Any], ...] = (
    {"cache_ratio": 0.5},
    {"cache_ratio": 0.25, "miss_action": "split", **LATER},
    {"cache_ratio": 0.25},
    {"cache_ratio": 0.25, **AHEAD},
    {"cache_ratio": 0.17, "miss_action": "split"},
    {"cache_ratio": 0.5, "miss_action": "cpu", **LATER},
    {"cache_ratio": 0.17, "eviction": "lfu"},
    {"cache_ratio": 0.05, "miss_action": "split", **LATER},
    {"cache_ratio": 0.0, "miss_action": "split", "admission": "none"},
    {"cache_ratio": 0.5, "miss_action": "split", **LATER, **AHEAD},
    {"cache_ratio": 0.25, "miss_action": "split", **LATER, **NGRAM},
    {"cache_ratio": 0.0},
)
"""Settings whose copies matter."""
OF_CPU: tuple[dict[str, Any], ...] = (
    {"cache_ratio": 0.25, "miss_action": "cpu", **LATER},
    {"cache_ratio": 0.25, "miss_action": "split", **LATER},
    {"cache_ratio": 0.0, "miss_action": "cpu", "admission": "none"},
    {"cache_ratio": 0.0, "miss_action": "split", "admission": "none"},
    {"cache_ratio": 0.17, "miss_action": "split"},
    {"cache_ratio": 0.5, "miss_action": "cpu", **LATER},
    {"cache_ratio": 0.5, "miss_action": "split", **LATER},
    {"cache_ratio": 0.05, "miss_action": "cpu", **LATER},
    {"cache_ratio": 0.05, "miss_action": "split", **LATER, **AHEAD},
    {"cache_ratio": 0.17, "miss_action": "cpu", **LATER, "eviction": "lfu"},
    {"cache_ratio": 0.25, "miss_action": "split", **LATER, **NGRAM},
    {"cache_ratio": 0.25, "miss_action": "split", "admission": "demand", **AHEAD},
)
"""Settings whose CPU experts matter."""


@dataclass
class Machine:
    """One machine that is played: its flags, cells predicted with them, and what the engine does meanwhile."""

    name: str
    flags: dict[str, float]
    costs: CostModel  # by which the engine decides
    cells: list[Cell]
    refused: list[str]
    link_bytes_per_s: int | None = None
    direct: dict[str, float] = field(default_factory=dict)  # predicted ms from the profile's own threads, by setting
    copies_us: list[float] = field(default_factory=list)  # of copies that followed each other, as measured


def machines(
    shape: ModelShape,
    profile: HardwareProfile,
    works: Mapping[int, Workload],
    rates: Sequence[float],
    fit: Callable[[Sequence[Trial]], list[Trial]],
    simulate: bool,
) -> list[Machine]:
    """The slower links and the fewer threads, with everything predicted if `simulate`; rates in GB/s."""
    costs = CostModel(profile, shape, replayed=True)
    most = max(costs.cpu_threads, default=1)
    found = []
    for rate in rates:
        link = int(rate * 1e9)
        other = CostModel(assume(profile, link, None, None).profile, shape, replayed=True)
        chosen = fit(_trials(OF_LINK, most))
        cells, refused = predicted_cells(chosen, works, other) if simulate else unpredicted(chosen)
        found.append(Machine(f"link {rate:g} GB/s", {"link_gb_per_s": rate}, other, cells, refused, link))
    for threads in sorted({n for n in THREADS if n in costs.cpu_threads} or set(costs.cpu_threads[:1]), reverse=True):
        scale = cpu_scale(costs, threads, most)
        other = CostModel(assume(profile, None, scale, None).profile, shape, replayed=True)
        chosen = fit(_trials(OF_CPU, most))
        cells, refused = predicted_cells(chosen, works, other) if simulate else unpredicted(chosen)
        direct = {}
        for cell in cells:  # the same settings on the threads themselves, as the engine will run them
            cell.trial = Trial(cell.trial.settings.changed(cpu_threads=threads))
            if not simulate:
                continue
            own = predict(works[cell.trial.settings.draft.gamma], costs.fresh(), cell.trial)
            direct[cell.trial.describe()] = own.figures.tpot_ns / 1e6
        found.append(Machine(f"CPU {threads} threads", {"cpu_scale": scale}, costs, cells, refused, None, direct))
    return found


def cpu_scale(costs: CostModel, threads: int, most: int) -> float:
    """How fast a layer-step's CPU experts are on `threads` threads, of what they are on `most`; a mean."""
    counts = range(1, costs.shape.top_k + 1)
    return float(np.mean([costs.experts_cpu_ns(n, most) / costs.experts_cpu_ns(n, threads) for n in counts]))


def _trials(chosen: Sequence[dict[str, Any]], threads: int) -> list[Trial]:
    with_threads = ({**fields, "cpu_threads": threads} if "miss_action" in fields else fields for fields in chosen)
    return [Trial(Settings.parse(fields)) for fields in with_threads]


class Played:
    """The engine as the machines that are played, by turns."""

    def __init__(self, engine: Engine, profile: HardwareProfile, works: Mapping[int, Workload], until: float) -> None:
        self._engine, self._until = engine, until
        self._bench = Bench(engine, works, CostModel(profile, engine.shape, replayed=True))
        self.left_out: list[str] = []

    def turn(self, machine: Machine, number: int, until: float) -> None:
        """One repeat of every setting on one machine."""
        assumed = machine.link_bytes_per_s
        rounds = Rounds(self._bench, machine.cells, min(until, self._until))
        try:
            decide_by(self._engine, machine.costs)
            self._engine.throttle(assumed)
            self._engine.copies.spans = []
            rounds.turn([cell for cell in machine.cells if cell.on_cpu or number % OTHERS == 0], number)
            machine.copies_us += followed_us(self._engine)
        except ForeloadError as error:
            self.left_out.append(f"{machine.name}: {error}")
        finally:
            self._engine.copies.spans = None
            self._engine.throttle(None)
        self.left_out += [f"{machine.name}: {text}" for text in rounds.left_out]


def followed_us(engine: Engine) -> list[float]:
    """Microseconds between arrivals of copies that were issued before the one ahead of them had arrived."""
    return [(b - a) / 1e3 for a, b in followed(engine.copies.spans or [])]


def check(
    engine: Engine,
    routing: Mapping[str, Trace],
    out: Path,
    wanted: Wanted,
    rates: Sequence[float],
    simulate: bool = True,
) -> dict[str, Any]:
    """Predict all machines (if `simulate`), measure them by turns, write; returns what was written."""
    trace, profile = routing_of(routing), profile_of(engine, out)
    works = works_of(trace, engine.shape, wanted)
    played = machines(engine.shape, profile, works, rates, lambda chosen: fitting(engine, chosen), simulate)
    bench = Played(engine, profile, works, wanted.until)
    found: dict[str, Any] = {
        "model": engine.checkpoint.name,
        "path": engine.path,
        "routing": f"{trace.meta.model}: {trace.meta.source}",
        "machine": profile.meta.machine,
        "profile_hash": profile.digest,
        "context": wanted.context,
        "lengths": vars(wanted.lengths),
        "rates_gb_per_s": list(rates),
        "left_out": bench.left_out,
    }
    for number in range(wanted.rounds):
        for at, machine in enumerate(played):
            now = time.monotonic()
            share = (wanted.until - now) / (len(played) - at) if number == 0 else wanted.until - now
            bench.turn(machine, number, now + share)
            found["machines"] = [described(one, profile, engine.expert_bytes) for one in played]
            write_json(out / f"{NAME}.json", found)
            runs = {one.name: {"copies_us": one.copies_us, "cells": list(map(kept, one.cells))} for one in played}
            write_json(out / f"{NAME}-runs.json", runs)
        if time.monotonic() > wanted.until:
            break
    return found


def predict_measured(out: Path, shape: ModelShape, trace: Trace) -> dict[str, Any]:
    """Predict what `check` has measured, from the profile beside it; returns what was written."""
    found, runs = read_mapping(out / f"{NAME}.json", "results"), read_mapping(out / f"{NAME}-runs.json", "runs")
    profile, works = measured_with(out, found, shape, trace)
    played = machines(shape, profile, works, found["rates_gb_per_s"], list, True)
    for machine in played:
        of = runs[machine.name]
        machine.copies_us = of["copies_us"]
        known = {cell.trial.describe(): cell.runs for cell in map(measured, of["cells"])}
        for cell in machine.cells:
            cell.runs = known.get(cell.trial.describe(), [])
    found["machines"] = [described(one, profile, profile.meta.expert_bytes) for one in played]
    write_json(out / f"{NAME}.json", found)
    return found


def described(machine: Machine, profile: HardwareProfile, expert_bytes: int) -> dict[str, Any]:
    """One machine: what was assumed, what copies really took, rows, and errors over them."""
    cells = [cell for cell in machine.cells if cell.runs and cell.predicted]
    found: dict[str, Any] = {"name": machine.name, "assumed": machine.flags, "refused": machine.refused, "rows": []}
    if machine.copies_us and machine.link_bytes_per_s is not None:
        found["copies_us_p50"] = median(machine.copies_us)
        found["link_gb_per_s_reached"] = expert_bytes / median(machine.copies_us) / 1e3
    if not cells:
        return found
    table = compare([compared(cell, expert_bytes) for cell in cells])
    table["settings"] = [cell.trial.describe() for cell in cells]
    for cell, row in zip(cells, table.to_dict(orient="records"), strict=True):
        known = {name: None if value != value else value for name, value in row.items()}
        known["predicted_direct_ms"] = machine.direct.get(str(row["settings"]))
        assert cell.predicted is not None
        found["rows"].append({**known, **shown(cell.trial, cell.predicted, cell.runs, expert_bytes)})
    found["summary"] = summarise(table).as_dict()
    return found


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """All machines on an open engine, by turns as far as there is time."""
    wanted = Wanted(LENGTHS, rounds=ROUNDS, until=until)
    return check(engine, routing, out, wanted, LINKS_GB_PER_S, simulator_ready())


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--links", default="26,12", help="GB/s")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--predict", action="store_true", help="what DIR holds; nothing is measured")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    if given.profile is not None:
        HardwareProfile.load(given.profile).save(given.out / PROFILE)
    model = checkpoint or Checkpoint.open(given.model)
    trace = made_up(model.shape, 128) if given.trace is None else read_trace(given.trace)
    wanted, rates = Wanted(LENGTHS, given.context, ROUNDS), [float(text) for text in given.links.split(",")]
    if given.predict:
        found = predict_measured(given.out, model.shape, trace)
    else:
        options = EngineOptions(device=given.device, context_tokens=given.context + 256)
        with Engine(model, options, Settings(cache_ratio=0.0)) as engine:
            until = time.monotonic() + 60 * given.minutes
            found = check(engine, {"routing": trace}, given.out, replace(wanted, until=until), rates)
    for machine in found["machines"]:
        summary = machine.get("summary", {})
        print(machine["name"], {k: summary.get(k) for k in ("p50_error_pct", "worst_error_pct", "regret_pct")})
    return found


if __name__ == "__main__":
    main()
