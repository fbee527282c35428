"""Every preset, ours tuned and the bounds over cache sizes and workloads: measured on replayed routing, and simulated.

    python -m benchmarks.union_h200 --trace topo=FILE --trace qwen3=FILE --out DIR [--model shape:qwen3-30b-a3b]
        [--device cuda] [--minutes 2] [--tuned FILE]
    python -m benchmarks.union_h200 --tune FILE --profile FILE --trace topo=FILE ...      settings for --tuned, on CPUs
    python -m benchmarks.union_h200 --simulate DIR/union-h200.json --profile FILE --trace topo=FILE ...
    python -m benchmarks.union_h200 --table DIR/union-h200.json

Cache sizes are shares of all experts. `tuned` may use as many slots as the default there, staging included. A preset
that keeps nothing is the same at every size: it runs once. Drafts take the time of a look-up where the engine holds no
draft model, and predictions that of the gate's where there is no calibration: rows say so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside import Beside, Cell, costs_of, find_costs, provenance, row, simulate_rows, simulator_ready
from benchmarks.opened import add_engine_flags, opened
from benchmarks.tuned_h200 import PREPARED
from benchmarks.union_tables import markdown
from benchmarks.union_tuned import Tuned, read_prepared, read_tuned, tune_all, write_tuned
from benchmarks.workloads import Workload
from foreload.backend.engine import Engine
from foreload.backend.models.checkpoint import Checkpoint
from foreload.files import read_mapping, write_json, write_text
from foreload.machine import cores
from foreload.presets import PRESETS, preset_settings
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.bounds import belady_loads, bounds
from foreload.simulator.costs import CostModel
from foreload.simulator.workload import load_requests
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

FILE, TUNED = "union-h200.json", "union-tuned.json"
RATIOS = (0.17, 0.25, 0.05, 0.5, 0.0)
"""The most important first."""
ORDER = ("tuned", "llama_cpp", "on_demand", "moe_spac", "router_pf", "freetoken", "llama_cpp_lru", "fiddler")
"""The same; the other presets come after these."""
CONTEXT, WARM, TOKENS, REPEATS = 1024, 8, 20, 2
SHARE, TUNE_S = 0.85, 30.0


def plan(
    shape: ModelShape, name: str, threads: int, ratios: Sequence[float], tuned: Mapping[float, Settings], context: int
) -> list[list[Cell]]:
    """One group of cells for each cache size, the most important first."""
    done: set[str] = set()
    groups = []
    for ratio in ratios:
        named = {"tuned": tuned[ratio]} if ratio in tuned else {}
        for preset in sorted(PRESETS, key=lambda one: ORDER.index(one) if one in ORDER else len(ORDER)):
            settings = preset_settings(preset, shape, threads, cache_ratio=ratio)
            keeps_nothing = (
                settings.slots_per_layer is not None
                and preset_settings(preset, shape, threads, cache_ratio=1.0) == settings
            )
            if preset in done:
                continue
            if keeps_nothing:
                done.add(preset)
            named[preset] = settings
        groups.append(
            [Cell(one, name, settings, context, 0.0 if one in done else ratio) for one, settings in named.items()]
        )
    return groups


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """All rows on an open engine until a time on the monotonic clock; also in `out`/union-h200.json after each round.

    Tuned settings are those in `out`/union-tuned.json, or else what `tuned_h200` has prepared there; for workloads that
    neither holds they are searched first, for as long as a quarter of the time. Rows are simulated, and settings
    searched, if that takes no compiling; else --simulate and --tune do it.
    """
    return measure(engine, routing, until, out, simulate=simulator_ready())


def measure(
    engine: Engine,
    routing: Mapping[str, Trace],
    until: float,
    out: Path,
    ratios: Sequence[float] = RATIOS,
    context: int = CONTEXT,
    warm: int = WARM,
    tokens: int = TOKENS,
    simulate: bool = True,
) -> dict[str, Any]:
    """See `on_engine`."""
    costs, begun = find_costs(engine, out), time.monotonic()
    threads = costs.cpu_threads[-1] if costs is not None and costs.cpu_threads else max(1, cores() - 1)
    workloads = workloads_of(routing, engine.shape, warm, tokens)
    tuned = found_before(out)
    missing = [one for one in workloads if one.name not in tuned]
    if costs is not None and simulate and missing:
        tuned |= tune_all(costs, missing, ratios, min(TUNE_S, (until - begun) / 4))
    groups = [plan(engine.shape, one.name, threads, ratios, tuned.get(one.name, {}), context) for one in workloads]
    beside = Beside(engine, workloads, begun + (SHARE if simulate else 1.0) * (until - begun))
    found = provenance(engine, workloads) | {"repeats": REPEATS, "warm_tokens": warm, "tokens": tokens}
    for _ in range(REPEATS):
        for of_ratio in zip(*groups, strict=True):
            for group in of_ratio:
                beside.round(group)
            found["rows"] = [row(cell, engine) for one in groups for several in one for cell in several]
            write_json(out / FILE, found)
    if costs is not None and simulate:
        found["bounds"] = all_bounds(workloads, costs, ratios, context)
        simulate_rows(found["rows"], workloads, costs, until)
        write_json(out / FILE, found)
    return found


def found_before(out: Path) -> Tuned:
    """Tuned settings that are in `out` already, by workload."""
    if (out / TUNED).exists():
        return read_tuned(out / TUNED)
    return read_prepared(out / PREPARED, "topo") if (out / PREPARED).exists() else {}


def workloads_of(routing: Mapping[str, Trace], shape: ModelShape, warm: int, tokens: int) -> list[Workload]:
    """The recordings in order."""
    return [Workload(name, trace, shape, warm, tokens) for name, trace in routing.items()]


def all_bounds(
    workloads: Sequence[Workload], costs: CostModel, ratios: Sequence[float], context: int
) -> dict[str, dict[str, dict[str, Any]]]:
    """Workload -> cache size -> floors in ms of the whole recording, from an empty cache and one token a step."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for one in workloads:
        requests = load_requests(one.whole(context), costs.shape, Settings())
        loads = belady_loads(requests, costs.shape)
        staging = staging_slots(Settings(), costs.shape)
        found[one.name] = {
            str(ratio): bounds(requests, costs, round(ratio * costs.shape.all_experts) + staging, loads).as_dict()
            for ratio in sorted(ratios)
        }
    return found


def arguments() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_flags(parser)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE", help="a workload; may be repeated")
    parser.add_argument("--tuned", type=Path, help="tuned settings, as --tune writes them")
    parser.add_argument("--table", type=Path, help="show these rows instead")
    parser.add_argument("--simulate", type=Path, help="simulate these rows anew, from --profile, instead of measuring")
    parser.add_argument("--tune", type=Path, help="write tuned settings here, from --profile, instead of measuring")
    parser.add_argument("--profile", type=Path)
    return parser


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Measure, tune, simulate anew, or show what was measured; returns it."""
    given = arguments().parse_args(args)
    if given.table is not None:
        found: dict[str, Any] = read_mapping(given.table, "results")
        print(markdown(found))
        return found
    routing = {name: read_trace(Path(path)) for name, _, path in (one.partition("=") for one in given.trace)}
    if given.tune is not None:
        return _tune(given, routing)
    if given.simulate is not None:
        costs, found = costs_of(given.profile), read_mapping(given.simulate, "results")
        sizes = found["warm_tokens"], found["tokens"]
        workloads = workloads_of(routing, costs.shape, *sizes)
        simulate_rows(found["rows"], workloads, costs)
        found["bounds"] = all_bounds(workloads, costs, RATIOS, CONTEXT)
        write_json(given.simulate, found)
    else:
        if given.tuned is not None:
            write_tuned(given.out / TUNED, read_tuned(given.tuned))
        with opened(given, CONTEXT + 256, checkpoint) as engine:
            found = measure(engine, routing, time.monotonic() + given.minutes * 60, given.out)
        write_text(given.out / "union-h200.md", markdown(found))
    print(markdown(found))
    return found


def _tune(given: argparse.Namespace, routing: Mapping[str, Trace]) -> dict[str, Any]:
    costs = costs_of(given.profile)
    workloads = workloads_of(routing, costs.shape, WARM, TOKENS)
    tuned = tune_all(costs, workloads, RATIOS, given.minutes * 60)
    write_tuned(given.tune, tuned)
    return {name: {ratio: s.describe() for ratio, s in of.items()} for name, of in tuned.items()}


if __name__ == "__main__":
    main()
