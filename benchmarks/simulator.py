"""How fast settings are simulated: 256 tokens of 48 layers, 8 experts each, compiled and by SimPy; 1,000 settings.

    python -m benchmarks.simulator [--out FILE] [--settings 1000] [--processes 2]

`python -m benchmarks simulator` prints the rates alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.inputs import SHAPE, graph_profile, profile, trace
from benchmarks.timing import Rate, group, measure
from foreload.cli.output import table
from foreload.files import write_json
from foreload.machine import machine_name, software
from foreload.settings import Settings
from foreload.simulator.compiled import simulate_requests
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import CostModel
from foreload.simulator.engine_model import simulate
from foreload.simulator.replay import replay
from foreload.simulator.workload import Request, load_requests

SIMULATED, COMPILED, REPLAYED = 50, 256, 2000
SLOTS = (32,) * SHAPE.n_moe_layers
SETTINGS = {
    "fetch": Settings(slots_per_layer=SLOTS),
    "split": Settings(slots_per_layer=SLOTS, miss_action="split", cpu_threads=16),
    "fetch, depth 1": Settings(slots_per_layer=SLOTS, predictor="gate", prefetch_depth=1),
}


def run() -> list[Rate]:
    """Tokens per second of each, the SimPy model with plain fetching first."""
    costs = CostModel(profile(), SHAPE)
    short, long = trace(SIMULATED), trace(REPLAYED)
    rates = []
    for name, settings in SETTINGS.items():

        def simulated(settings: Settings = settings) -> object:
            return simulate(short, costs, SHAPE, settings, SLOTS)

        rates.append(measure(f"SimPy, {name}", simulated, SIMULATED, "tokens", 3, time.process_time))
    for path, costs_of_path in (("", costs), ("graphs, ", CostModel(graph_profile(), SHAPE))):
        for name, settings in SETTINGS.items():
            requests = load_requests(trace(COMPILED), SHAPE, settings)

            def compiled(settings: Settings = settings, requests=requests, costs=costs_of_path) -> object:  # type: ignore[no-untyped-def]
                return simulate_requests(requests, costs, settings, SLOTS)

            rates.append(measure(f"compiled model, {path}{name}", compiled, COMPILED, "tokens", 3, time.process_time))
    for name, settings in SETTINGS.items():
        split = split_costs(costs, SHAPE, settings) if settings.needs_costs is not None else None
        requests = load_requests(long, SHAPE, settings)

        def replayed(settings: Settings = settings, requests=requests, split=split) -> object:  # type: ignore[no-untyped-def]
            return replay(requests, SHAPE, settings, SLOTS, split)

        rates.append(measure(f"compiled replay, {name}", replayed, REPLAYED, "tokens", 3, time.process_time))
    return group(rates)


def many(count: int) -> list[Settings]:
    """So many different settings: slot counts, evictions, miss actions, admissions, prefetch."""
    actions: list[dict[str, Any]] = [{}, {"predictor": "gate", "prefetch_depth": 1}]
    actions += [{"miss_action": name, "admission": "background", "cpu_threads": 16} for name in ("cpu", "split")]
    choices = product(range(2, SHAPE.experts, 2), ("lru", "lfu", "lfru", "random"), actions)
    found = [
        Settings.parse({"slots_per_layer": (slots,) * SHAPE.n_moe_layers, "eviction": eviction, **action})
        for slots, eviction, action in islice(choices, count)
    ]
    return found


@cache
def _inputs(depth: int) -> tuple[CostModel, list[Request]]:
    settings = SETTINGS["fetch, depth 1"] if depth else SETTINGS["fetch"]
    return CostModel(profile(), SHAPE), load_requests(trace(COMPILED), SHAPE, settings)


def one(settings: Settings) -> float:
    """Simulate a setting; the processor's seconds it took."""
    costs, requests = _inputs(settings.prefetch_depth)
    begun = time.process_time()
    simulate_requests(requests, costs, settings, settings.slots_per_layer or ())
    return time.process_time() - begun


def all_of(settings: Sequence[Settings], processes: int) -> tuple[float, float]:
    """Seconds until all are simulated, by processes that have compiled before, and the processor's seconds."""
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(one, settings[:processes] + settings[-processes:]))
        begun = time.perf_counter()
        busy = sum(pool.map(one, settings, chunksize=16))
        return time.perf_counter() - begun, busy


def main(args: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--settings", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(args)
    rates, chosen = run(), many(given.settings)
    seconds, busy = all_of(chosen, given.processes)
    rows = [(r.name, f"{r.per_second:,.0f}", f"{1e3 * COMPILED / r.per_second:,.1f}", f"{r.ratio:.1f}") for r in rates]
    note = (
        f"source: measured on {machine_name()}; {len(chosen)} settings on {given.processes} processes: {seconds:.1f} s"
    )
    columns = ("48 layers, 8 of 128 experts", "tokens/s", f"ms for {COMPILED} tokens", "of the first")
    Console(width=100, highlight=False).print(table("Speed of the simulator", columns, rows, note))
    if given.out is not None:
        found = {"machine": machine_name(), "software": software(), "rates": [rate.as_dict() for rate in rates]}
        settings = {"count": len(chosen), "processes": given.processes, "seconds": seconds, "busy_s": busy}
        write_json(given.out, {**found, "tokens_per_setting": COMPILED, "settings": settings})


if __name__ == "__main__":
    main()
