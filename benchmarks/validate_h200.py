"""Predicted beside measured on a full-size shape: 48 settings, simulated from the profile alone, measured by turns.

    python -m benchmarks.validate_h200 --out DIR [--model shape:qwen3-30b-a3b] [--trace FILE] [--device cuda]
        [--profile FILE] [--minutes 4]
    python -m benchmarks.validate_h200 --out DIR --predict [--model ...] [--trace FILE]

The settings are fixed and the profile is there before anything is measured. Rounds over the settings come in an order
drawn by a seed (settings that launch the same graphs stay together). Those whose misses the CPU serves are measured
first and more often, since other load on the host changes within minutes; a repeat is every third turn. Predictions
are made of the profile and the routing alone, before the rounds, or where that would take compiling, afterwards from
what DIR holds (--predict). Writes DIR/validate-h200-runs.json, every repeat, and with predictions
DIR/validate-h200.json, a list of rows, and DIR/validate-h200-summary.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks.beside import PROFILE, simulator_ready
from benchmarks.decode import workload as made_up
from benchmarks.replayed import Bench, Lengths, Predicted, Run, Trial, Workload, joined, predict, shown, workload
from benchmarks.validate_grid import GAMMA, trials
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import ForeloadError, MismatchError
from foreload.files import read_mapping, write_json
from foreload.profiler.run import profile as measure_profile
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, slot_counts, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.costs import CostModel
from foreload.simulator.validation import Comparison, compare, summarise
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

NAME = "validate-h200"
CONTEXT, SEED, ROUNDS = 1024, 0, 36
REPEATS, OTHERS = 3, 12
"""Repeats of a setting; settings without CPU experts have a turn in every so manieth round."""
FIRST = 8
"""Rounds of settings with CPU experts before any of the others."""
LENGTHS = Lengths(warm=4, steps=10, warm_windows=2, windows=5)
"""Many short turns: what a host does meanwhile goes on for seconds. Where turns differ by 4.6 % (standard deviation)
one of 23 settings with CPU experts repeats worse than 5 % with 36 turns each, two with 24, six with 12."""


@dataclass
class Cell:
    """A trial with what was predicted and every repeat."""

    trial: Trial
    predicted: Predicted | None
    runs: list[Run] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        """Whether CPU experts serve any miss."""
        return self.trial.settings.miss_action != "fetch"

    @property
    def repeats(self) -> list[Run]:
        """Each of turns that are far apart."""
        several = min(REPEATS, len(self.runs))
        return [joined(self.runs[at::several]) for at in range(several)]

    @property
    def behaviour(self) -> str:
        """What decides which graphs are launched."""
        settings = self.trial.settings
        return f"{settings.draft.gamma} {settings.prefetch_depth} {self.on_cpu}"


@dataclass(frozen=True)
class Wanted:
    """What to run: decode lengths, the position they begin at, rounds, and when to stop (monotonic seconds)."""

    lengths: Lengths = LENGTHS
    context: int = CONTEXT
    rounds: int = ROUNDS
    until: float = float("inf")


def profile_of(engine: Engine, out: Path) -> HardwareProfile:
    """The profile in the output folder; where there is none, one is measured and put there."""
    path = out / PROFILE
    if not path.exists():
        measure_profile(engine).save(path)
    return HardwareProfile.load(path)


def routing_of(routing: Mapping[str, Trace]) -> Trace:
    """The recording to replay: of the trained model, if there is one."""
    return routing["topo"] if "topo" in routing else next(iter(routing.values()))


def works_of(trace: Trace, shape: ModelShape, wanted: Wanted) -> dict[int, Workload]:
    """The recording as it is replayed without drafts and with them."""
    return {gamma: workload(trace, shape, wanted.context, wanted.lengths, gamma) for gamma in (0, GAMMA)}


class Rounds:
    """Cells measured by turns until a time; what did not fit or was refused is said."""

    def __init__(self, bench: Bench, cells: Sequence[Cell], until: float) -> None:
        self._bench, self._until = bench, until
        self.cells = list(cells)
        self.left_out: list[str] = []
        self._overhead_s = 1.0  # of a turn beyond its steps, the longest so far

    def turn(self, cells: Sequence[Cell], number: int) -> None:
        """One repeat of each, in an order of its own."""
        for cell in self._order(cells, number):
            work = self._bench.work(cell.trial)
            tpot_ns = [run.tpot_ns for run in cell.runs] or [cell.predicted.figures.tpot_ns if cell.predicted else 0.0]
            expected_s = sum(work.emitted) * max(tpot_ns) / 1e9
            if time.monotonic() + 1.3 * expected_s + self._overhead_s > self._until:
                self.left_out.append(f"turn {number}: {cell.trial.describe()}: no time left")
                continue
            begun = time.monotonic()
            try:
                cell.runs.append(self._bench.run(cell.trial))
            except (ForeloadError, RuntimeError) as error:
                self.left_out.append(f"turn {number}: {cell.trial.describe()}: {type(error).__name__}: {error}")
                continue
            self._overhead_s = max(self._overhead_s, time.monotonic() - begun - sum(cell.runs[-1].step_ns) / 1e9)

    @staticmethod
    def _order(cells: Sequence[Cell], number: int) -> list[Cell]:
        rng, groups = Random(f"{SEED} {number}"), dict[str, list[Cell]]()
        for cell in cells:
            groups.setdefault(cell.behaviour, []).append(cell)
        names = sorted(groups)
        rng.shuffle(names)
        for group in groups.values():
            rng.shuffle(group)
        return [cell for name in names for cell in groups[name]]


def in_order(rounds: int) -> Iterator[tuple[int, bool]]:
    """Rounds and whether they are of settings with CPU experts."""
    for number in range(rounds):
        yield number, True
        if number + 1 == min(FIRST, rounds):
            yield from ((other, False) for other in range(0, number + 1, OTHERS))
        elif number >= FIRST and number % OTHERS == OTHERS - 1:
            yield number, False


def predicted_cells(
    chosen: Sequence[Trial], works: Mapping[int, Workload], costs: CostModel
) -> tuple[list[Cell], list[str]]:
    """A cell for every trial that the profile can say something about, and what it cannot."""
    cells, refused = [], []
    for trial in chosen:
        try:
            cells.append(Cell(trial, predict(works[trial.settings.draft.gamma], costs.fresh(), trial)))
        except ForeloadError as error:
            refused.append(f"{trial.describe()}: {error}")
    return cells, refused


def unpredicted(chosen: Sequence[Trial]) -> tuple[list[Cell], list[str]]:
    """The same before anything is simulated."""
    return [Cell(trial, None) for trial in chosen], []


def rows(
    cells: Sequence[Cell], profile: HardwareProfile, expert_bytes: int, spread_of: int = 1
) -> list[dict[str, Any]]:
    """One row per cell that was measured, in the order of the grid."""
    found = []
    for cell in [cell for cell in cells if len(cell.runs) >= spread_of]:
        assert cell.predicted is not None
        table = compare([compared(cell, expert_bytes)])
        row = {name: None if value != value else value for name, value in table.iloc[0].to_dict().items()}
        row["settings"] = cell.trial.describe()
        told = shown(cell.trial, cell.predicted, cell.runs, expert_bytes)
        told |= {"turns_tpot_ms": told["repeats_tpot_ms"], "repeats_tpot_ms": [r.tpot_ns / 1e6 for r in cell.repeats]}
        found.append({**row, "profile_hash": profile.digest, **told})
    return found


def compared(cell: Cell, expert_bytes: int) -> Comparison:
    """Predicted beside measured; counters are those of all turns."""
    assert cell.predicted is not None
    times = [run.tpot_ns for run in cell.repeats]
    return Comparison(cell.trial.settings, cell.predicted.figures, times, joined(cell.runs).figures(expert_bytes))


def validate(
    engine: Engine, routing: Mapping[str, Trace], out: Path, wanted: Wanted, simulate: bool = True
) -> dict[str, Any]:
    """Predict (if `simulate`), measure, write; returns the summary."""
    trace, profile = routing_of(routing), profile_of(engine, out)
    costs, works = CostModel(profile, engine.shape, replayed=True), works_of(trace, engine.shape, wanted)
    begun, chosen = time.monotonic(), fitting(engine, trials(costs.cpu_threads or (1,)))
    cells, refused = predicted_cells(chosen, works, costs) if simulate else unpredicted(chosen)
    found: dict[str, Any] = {
        "model": engine.checkpoint.name,
        "path": engine.path,
        "routing": f"{trace.meta.model}: {trace.meta.source}",
        "machine": profile.meta.machine,
        "device": profile.meta.device_name,
        "profile_hash": profile.digest,
        "profile_date": profile.meta.date,
        "context": wanted.context,
        "lengths": vars(wanted.lengths),
        "predicting_s": time.monotonic() - begun,
        "refused": refused,
        "rounds": wanted.rounds,
    }
    rounds = Rounds(Bench(engine, works, costs), cells, wanted.until)
    for number, on_cpu in in_order(wanted.rounds):
        rounds.turn([cell for cell in cells if cell.on_cpu == on_cpu], number)
        found |= {"left_out": rounds.left_out, "measuring_s": time.monotonic() - begun}
        write_json(out / f"{NAME}-runs.json", [kept(cell) for cell in cells])
        _write(out, found, cells, profile, engine.expert_bytes)
    engine.warm_by(None)
    return found


def kept(cell: Cell) -> dict[str, Any]:
    """What was measured of a cell, for JSON."""
    return {
        "settings": cell.trial.settings.model_dump(mode="json", exclude_defaults=True),
        "warmed": cell.trial.warmed,
        "runs": [{**vars(run), "counters": run.counters.tolist()} for run in cell.runs],
    }


def measured(one: Mapping[str, Any]) -> Cell:
    """The cell of which that was `kept`."""
    runs = [Run(**{**run, "counters": np.array(run["counters"])}) for run in one["runs"]]
    return Cell(Trial(Settings.parse(one["settings"]), one["warmed"]), None, runs)


def measured_with(
    out: Path, found: Mapping[str, Any], shape: ModelShape, trace: Trace
) -> tuple[HardwareProfile, dict[int, Workload]]:
    """The profile beside what was measured, and what was replayed; MismatchError if it is another profile."""
    profile = HardwareProfile.load(out / PROFILE)
    if found["profile_hash"] != profile.digest:
        raise MismatchError(f"{out / PROFILE}: hash {profile.digest}, measured beside {found['profile_hash']}")
    return profile, works_of(trace, shape, Wanted(Lengths(**found["lengths"]), found["context"]))


def predict_measured(out: Path, shape: ModelShape, trace: Trace) -> dict[str, Any]:
    """Predict what `validate` has measured, from the profile beside it; writes the rows, returns the summary."""
    found = read_mapping(out / f"{NAME}-summary.json", "summary")
    profile, works = measured_with(out, found, shape, trace)
    costs = CostModel(profile, shape, replayed=True)
    cells = [measured(one) for one in json.loads((out / f"{NAME}-runs.json").read_text())]
    predicted, found["refused"] = predicted_cells([cell.trial for cell in cells], works, costs)
    known = {cell.trial.describe(): cell.predicted for cell in predicted}
    for cell in cells:
        cell.predicted = known.get(cell.trial.describe())
    _write(out, found, [cell for cell in cells if cell.predicted], profile, profile.meta.expert_bytes)
    return found


def _write(out: Path, found: dict[str, Any], cells: Sequence[Cell], profile: HardwareProfile, size: int) -> None:
    told = [cell for cell in cells if cell.runs and cell.predicted]
    write_json(out / f"{NAME}.json", rows(told, profile, size))
    if told:
        table = compare([compared(cell, size) for cell in told])
        table["settings"] = [cell.trial.describe() for cell in told]
        found["summary"] = summarise(table).as_dict()
    write_json(out / f"{NAME}-summary.json", found)


def fitting(engine: Engine, chosen: Sequence[Trial]) -> list[Trial]:
    """Those that this engine's device memory holds, in the engine's expert format."""
    same = [replace(t, settings=t.settings.changed(expert_format=engine.settings.expert_format)) for t in chosen]

    def slots(settings: Settings) -> int:
        return sum(slot_counts(settings, engine.shape)) + staging_slots(settings, engine.shape)

    return [trial for trial in same if slots(trial.settings) <= engine.slot_limit]


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """All settings on an open engine, in as many rounds as there is time for."""
    return validate(engine, routing, out, Wanted(LENGTHS, until=until), simulator_ready())


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--link", type=float, help="bytes per second of an emulated link")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--predict", action="store_true", help="what DIR holds; nothing is measured")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    wanted = Wanted(LENGTHS, given.context, given.rounds, time.monotonic() + 60 * given.minutes)
    model = checkpoint or Checkpoint.open(given.model)
    if given.profile is not None:
        HardwareProfile.load(given.profile).save(given.out / PROFILE)
    link = None if given.link is None else int(given.link)
    options = EngineOptions(device=given.device, context_tokens=given.context + 256, link_bytes_per_s=link)
    trace = made_up(model.shape, 128) if given.trace is None else read_trace(given.trace)
    if given.predict:
        found = predict_measured(given.out, model.shape, trace)
        print(found.get("summary"))
        return found
    with Engine(model, options, Settings(cache_ratio=0.0)) as engine:
        found = validate(engine, {"routing": trace}, given.out, wanted)
    print({key: found[key] for key in ("rounds", "refused", "left_out", "summary") if key in found})
    return found


if __name__ == "__main__":
    main()
