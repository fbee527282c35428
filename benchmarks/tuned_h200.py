"""Tuned settings against default, presets and the best of a grid: simulated, then measured on replayed routing.

    python -m benchmarks.tuned_h200 --trace topo=FILE --out DIR [--model shape:qwen3-30b-a3b] [--device cuda]
    python -m benchmarks.tuned_h200 --prepare --profile FILE --trace topo=FILE --out DIR    the simulated part, on CPUs
    python -m benchmarks.tuned_h200 --simulate DIR/tuned-h200.json --profile FILE --trace topo=FILE
    python -m benchmarks.tuned_h200 --table DIR/tuned-h200.json

DIR holds the machine's profile. Cache sizes are shares of all experts; each is tuned, and a grid of more than 500
uniform settings simulated, on tokens that are not measured, for the link as it is and for a slower one. Then the engine
runs the tuned setting, the default, every preset that it can run and the grid's ten best by turns, its link throttled
for the second part; those near the best of their cache size have more turns, as they decide. What was simulated is in
DIR/tuned-h200-prepared.json, and used again if profile and tokens are the same; DIR/tuned-RATIO.json are the settings
for the link as it is, for `decode`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.beside import PROFILE, Beside, Cell, costs_of, provenance, row, simulate_rows, simulator_ready
from benchmarks.opened import add_engine_flags, opened
from benchmarks.replayed import decide_by
from benchmarks.tuned_grid import FIRST, TOKENS, Budget, Inputs, prepare
from benchmarks.workloads import Workload
from foreload.backend.engine import Engine
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import FileError
from foreload.files import read_mapping, write_json
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.costs import CostModel
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

FILE, PREPARED = "tuned-h200.json", "tuned-h200-prepared.json"
RATIOS = (0.17, 0.25, 0.05, 0.5)
LINKS = (None, 12_000_000_000)
CONTEXT, WARM, STEPS = 1024, 8, 20
PREPARE_SHARE, FULL_LINK_SHARE, MEASURE_SHARE = 0.4, 0.36, 0.95
SLOW = 1.5
"""Settings simulated to take so many times the fastest of their cache size are measured once, after some rounds."""
VERY_SLOW, FEW_STEPS = 4.0, 6
"""Those that take so many times as long are timed over fewer steps."""
NEAR, MOST, FEW_ROUNDS = 1.06, 14, 3
"""Settings that take no longer than so many times the fastest of their cache size have up to so many repeats, and more
than the least before those that are slow."""


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """All rows on an open engine until a time on the monotonic clock; also in `out`/tuned-h200.json after each round.

    FileError if `out` holds no profile.
    """
    return measure(engine, routing, until, out)


def measure(
    engine: Engine,
    routing: Mapping[str, Trace],
    until: float,
    out: Path,
    ratios: Sequence[float] = RATIOS,
    links: Sequence[int | None] = LINKS,
    context: int = CONTEXT,
    warm: int = WARM,
    steps: int = STEPS,
    tokens: int = TOKENS,
    first: int = FIRST,
) -> dict[str, Any]:
    """See `on_engine`."""
    begun = time.monotonic()
    if not (out / PROFILE).exists():
        raise FileError(f"{out / PROFILE}: is needed to tune by, and is not there")
    workload = workload_of(routing, engine.shape, warm, steps)
    inputs = Inputs.of(HardwareProfile.load(out / PROFILE), workload, tokens)
    budgets = [Budget(link, ratio) for link in links for ratio in ratios]
    prepared = prepared_in(out, inputs, budgets, PREPARE_SHARE * (until - begun), first)
    found = provenance(engine, [workload]) | {"repeats": MOST, "prepared": prepared, "rows": []}
    write_json(out / FILE, found)
    for at, link in enumerate(links):
        share = FULL_LINK_SHARE if at + 1 < len(links) else MEASURE_SHARE
        now = time.monotonic()
        costs = inputs.costs(Budget(link, 0.0))
        _measure_link(engine, workload, costs, link, prepared, found, context, now + share * (until - now), out)
    found["regret"] = regrets(found)
    write_json(out / FILE, found)
    return found


def workload_of(routing: Mapping[str, Trace], shape: ModelShape, warm: int, steps: int) -> Workload:
    """`topo` if it is there, else the first."""
    name = "topo" if "topo" in routing else next(iter(routing))
    return Workload(name, routing[name], shape, warm, steps)


def prepared_in(out: Path, inputs: Inputs, budgets: Sequence[Budget], seconds: float, first: int) -> dict[str, Any]:
    """What was simulated before with the same profile and tokens, or now."""
    path = out / PREPARED
    if path.exists():
        held = read_mapping(path, "prepared settings")
        if held.get("key") == inputs.key and not held["left_out"]:
            return held
    found = prepare(inputs, budgets, seconds, first)
    write_json(path, found)
    for of in found["budgets"].values():
        if of["link_bytes_per_s"] is None:
            write_json(out / f"tuned-{of['cache_ratio']:g}.json", of["named"]["tuned"][0])
    return found


def _measure_link(
    engine: Engine,
    workload: Workload,
    costs: CostModel,
    link: int | None,
    prepared: Mapping[str, Any],
    found: dict[str, Any],
    context: int,
    until: float,
    out: Path,
) -> None:
    """Rounds on one link: what may be the fastest, then again what is near it, the rest in between; simulations."""
    decide_by(engine, costs)
    groups = [
        cells(of, workload.name, context) for of in prepared["budgets"].values() if of["link_bytes_per_s"] == link
    ]
    quick = [cell for one, _ in groups for cell in one]
    slow = [cell for few in zip_longest(*(rest for _, rest in groups)) for cell in few if cell]
    beside, known = Beside(engine, [workload], until, link), list(found["rows"])
    for turn in range(MOST):
        again = [cell for both in groups for cell in near(*both)]
        beside.round(quick if not turn else [*again, *(slow if turn == FEW_ROUNDS else [])])
        now = [row(cell, engine) | {"link_bytes_per_s": link} for cell in (*quick, *slow)]
        found["rows"] = known + now
        found["regret"] = regrets(found)
        write_json(out / FILE, found)
    if simulator_ready():
        simulate_rows(now, [workload], costs, until + 10)


def near(quick: Sequence[Cell], slow: Sequence[Cell]) -> list[Cell]:
    """Of a budget's cells the tuned one and those that may be the fastest."""
    measured = [cell for cell in (*quick, *slow) if cell.runs]
    most = NEAR * min((cell.tpot_ms for cell in measured), default=0.0)
    return [cell for cell in measured if cell.tpot_ms <= most or is_tuned(cell.name)]


def is_tuned(name: str) -> bool:
    """Whether it is what the tuner chose, perhaps among other names."""
    return "tuned" in name.split(" = ")


def simulate_measured(found: dict[str, Any], inputs: Inputs, workload: Workload) -> None:
    """Add to measured rows what is simulated for the same steps."""
    for link in {one["link_bytes_per_s"] for one in found["rows"]}:
        mine = [one for one in found["rows"] if one["link_bytes_per_s"] == link]
        simulate_rows(mine, [workload], inputs.costs(Budget(link, 0.0)))


def cells(of: Mapping[str, Any], workload: str, context: int) -> tuple[list[Cell], list[Cell]]:
    """Distinct settings of a budget, those that may be the fastest and the slow ones; equal ones share a cell and its
    name. Those that are simulated fastest come first.
    """
    named: dict[str, tuple[dict[str, Any], float]] = {name: tuple(entry) for name, entry in of["named"].items()}
    named |= {f"grid {at}": tuple(entry) for at, entry in enumerate(of["grid"], 1)}
    ordered = sorted(named, key=lambda name: named[name][1])
    alike: dict[Settings, list[str]] = {}
    for name in ordered:
        alike.setdefault(Settings.parse(named[name][0]), []).append(name)
    made: tuple[list[Cell], list[Cell]] = ([], [])
    for settings, names in alike.items():
        slower = named[names[0]][1] / named[ordered[0]][1]
        steps = FEW_STEPS if slower >= VERY_SLOW else None
        cell = Cell(" = ".join(names), workload, settings, context, of["cache_ratio"], steps)
        made[0 if is_tuned(cell.name) or slower <= SLOW else 1].append(cell)
    return made


def regrets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Per budget the tuned setting against default, presets and the grid's ten, measured and simulated.

    Measured, it is that of the others it is the most behind, in the median of the rounds that both were in: a host is
    faster and slower as a whole. Of others in fewer rounds than `FEW_ROUNDS` only where all are: each is one of many,
    and the luckiest of many single turns says little.
    """
    table = []
    for key, of in found["prepared"]["budgets"].items():
        mine = (of["link_bytes_per_s"], of["cache_ratio"])
        rows = [
            one for one in found["rows"] if (one["link_bytes_per_s"], one["cache_ratio"]) == mine and "tpot_ms" in one
        ]
        times = {name: one["tpot_ms"] for one in rows for name in one["name"].split(" = ")}
        if "tuned" not in times:
            continue
        table.append(
            {
                "budget": key,
                "tuned_ms": times["tuned"],
                "spread_pct": max(one["spread_pct"] for one in rows),
                "speedup": times["default"] / times["tuned"] if "default" in times else None,
                "behind_grid_pct": _behind(rows, "grid "),
                "behind_presets_pct": _behind(rows, "preset "),
                "grid_measured": sum(name.startswith("grid ") for name in times),
                "presets_measured": sum(name.startswith("preset ") for name in times),
                "grid_settings": of["grid_settings"],
                "simulated_regret_pct": of["simulated_regret_pct"],
                "simulated_behind_presets_pct": of["simulated_behind_best_preset_pct"],
            }
        )
    return table


def _behind(rows: Sequence[Mapping[str, Any]], prefix: str) -> float | None:
    """Per cent that the tuned row is behind the best of those whose name begins so; below 0 if it is ahead of all."""

    def rounds(one: Mapping[str, Any]) -> dict[int, float]:
        return {run["round"]: run["tpot_ms"] for run in one["runs"]}

    mine = next(rounds(one) for one in rows if is_tuned(one["name"]))
    found: list[tuple[int, float]] = []
    for one in rows:
        if any(name.startswith(prefix) for name in one["name"].split(" = ")):
            theirs = rounds(one)
            both = mine.keys() & theirs.keys()
            found += [(len(both), 100 * (median(mine[at] / theirs[at] for at in both) - 1))] if both else []
    least = min(FEW_ROUNDS, max((count for count, _ in found), default=0))
    return max((behind for count, behind in found if count >= least), default=None)


def markdown(found: Mapping[str, Any]) -> str:
    """The regrets as a table."""

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:+.1f} %"

    lines = [
        f"{found['model']} on {found['device']}, {found['date']}\n",
        "| cache, link | tuned ms/token | x default | behind the grid's best | simulated | behind the best preset "
        "| simulated | grid settings, measured |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in found["regret"]:
        faster = "-" if one["speedup"] is None else f"{one['speedup']:.2f}"
        lines.append(
            f"| {one['budget']} | {one['tuned_ms']:.2f} | {faster} | {shown(one['behind_grid_pct'])} "
            f"| {shown(one['simulated_regret_pct'])} | {shown(one['behind_presets_pct'])} "
            f"| {shown(one['simulated_behind_presets_pct'])} | {one['grid_settings']}, {one['grid_measured']} |"
        )
    return "\n".join(lines) + "\n"


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Prepare, measure, or show what was measured; returns it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_flags(parser)
    parser.add_argument("--trace", action="append", default=[], metavar="NAME=FILE", help="the workload")
    parser.add_argument("--prepare", action="store_true", help="simulate alone, from --profile")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--simulate", type=Path, help="simulate these results' rows anew, from --profile")
    parser.add_argument("--table", type=Path, help="show these results instead")
    given = parser.parse_args(args)
    found: dict[str, Any]
    if given.table is not None:
        found = read_mapping(given.table, "results")
        print(markdown(found))
        return found
    routing = {name: read_trace(Path(path)) for name, _, path in (one.partition("=") for one in given.trace)}
    if given.prepare or given.simulate is not None:
        costs = costs_of(given.profile)
        workload = workload_of(routing, costs.shape, WARM, STEPS)
        inputs = Inputs.of(costs.profile, workload)
        if given.simulate is not None:
            found = read_mapping(given.simulate, "results")
            simulate_measured(found, inputs, workload)
            write_json(given.simulate, found)
            print(markdown(found))
            return found
        budgets = [Budget(link, ratio) for link in LINKS for ratio in RATIOS]
        return prepared_in(given.out, inputs, budgets, given.minutes * 60, FIRST)
    with opened(given, CONTEXT + 256, checkpoint) as engine:
        found = measure(engine, routing, time.monotonic() + given.minutes * 60, given.out)
    print(markdown(found))
    return found


if __name__ == "__main__":
    main()
