"""How long the integer program takes at 48 layers x 129 slot counts x 24 options, and the gap it proves."""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.inputs import SHAPE
from foreload.machine import machine_name, software
from foreload.simulator.solver import Problem, Solution, cheapest, solve

OPTIONS, RATIO, GAP = 24, 0.17, 0.005


def costs(seed: int = 0) -> NDArray[np.float64]:
    """Microseconds of a layer-step [L, options, E + 1]: falling in slots, linear between 13 of them."""
    rng, layers, experts = np.random.default_rng(seed), SHAPE.n_moe_layers, SHAPE.experts
    grid, counts = np.linspace(0, experts, 13), np.arange(experts + 1)
    table = np.empty((layers, OPTIONS, experts + 1))
    for layer, option in np.ndindex(layers, OPTIONS):
        hits = (1 - np.exp(-grid / experts / rng.uniform(0.02, 0.2))) ** rng.uniform(0.5, 2)
        hits = np.maximum.accumulate(hits + rng.normal(0, 0.01, len(grid)))
        table[layer, option] = rng.uniform(50, 100) + 1300 * rng.uniform(0.6, 1.3) * (1 - np.interp(counts, grid, hits))
    return table


def problems(table: NDArray[np.float64]) -> dict[str, Problem]:
    """One program with an option per layer, under one budget and under two."""
    layers, options, counts = table.shape
    slots = np.ascontiguousarray(np.broadcast_to(np.arange(counts), table.shape)).reshape(layers, -1)
    vram = int(RATIO * layers * (counts - 1))
    noise = np.random.default_rng(1).uniform(0.9, 1.1, (layers, options, 1))
    link = (noise * 1000 * (1 - np.arange(counts) / (counts - 1))).reshape(layers, -1).astype(np.int64)
    cost = table.reshape(layers, -1)
    return {
        "an option per layer, one budget": Problem(cost, {"vram": slots}, {"vram": vram}),
        "an option per layer, two budgets": Problem(
            cost, {"vram": slots, "link": link}, {"vram": vram, "link": int(layers * 1000 * (1 - RATIO))}
        ),
    }


def run() -> list[dict[str, object]]:
    """One row per program."""
    table, rows = costs(), []
    slots = np.tile(np.arange(table.shape[2]), (len(table), 1))
    limit = int(RATIO * slots[:, -1].sum())
    begun = time.perf_counter()
    _, found = cheapest({o: Problem(table[:, o], {"vram": slots}, {"vram": limit}) for o in range(OPTIONS)}, gap=GAP)
    rows.append(_row("one option for all layers (24 programs)", found, time.perf_counter() - begun))
    for name, problem in problems(table).items():
        begun = time.perf_counter()
        rows.append(_row(name, solve(problem, gap=GAP), time.perf_counter() - begun))
    return rows


def _row(name: str, found: Solution, seconds: float) -> dict[str, object]:
    return {
        "program": name, "solver": found.solver, "outcome": found.outcome.value, "seconds": round(seconds, 2),
        "gap": found.gap, "relaxed_share": found.relaxed / found.objective,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.program", description=__doc__)
    parser.parse_args()
    print(json.dumps({"machine": machine_name(), "software": software(), "rows": run()}, indent=1))
