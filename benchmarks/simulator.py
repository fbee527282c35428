"""Tokens of a 48-layer model simulated per second: by SimPy, by the same compiled, and replayed without a clock."""

from __future__ import annotations

from benchmarks.inputs import SHAPE, profile, trace
from benchmarks.timing import Rate, group, measure
from foreload.settings import Settings
from foreload.simulator.compiled import simulate_requests
from foreload.simulator.costs import CostModel, split_costs
from foreload.simulator.engine_model import simulate
from foreload.simulator.replay import replay
from foreload.simulator.workload import load_requests

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

        rates.append(measure(f"SimPy, {name}", simulated, SIMULATED, "tokens", 3))
    for name, settings in SETTINGS.items():
        requests = load_requests(trace(COMPILED), SHAPE, settings)

        def compiled(settings: Settings = settings, requests=requests) -> object:  # type: ignore[no-untyped-def]
            return simulate_requests(requests, costs, settings, SLOTS)

        rates.append(measure(f"compiled model, {name}", compiled, COMPILED, "tokens", 3))
    for name, settings in SETTINGS.items():
        split = split_costs(costs, SHAPE, settings) if settings.needs_costs is not None else None
        requests = load_requests(long, SHAPE, settings)

        def replayed(settings: Settings = settings, requests=requests, split=split) -> object:  # type: ignore[no-untyped-def]
            return replay(requests, SHAPE, settings, SLOTS, split)

        rates.append(measure(f"compiled replay, {name}", replayed, REPLAYED, "tokens", 3))
    return group(rates)
