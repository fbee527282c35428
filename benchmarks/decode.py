"""Decode speed of settings on one engine: replayed routing, interleaved repeats, medians, ratio to the floor.

    python -m benchmarks.decode --out DIR [--model shape:qwen3-30b-a3b] [--trace FILE ...] [--device cuda]
        [--sections resident,no-cache,cached,contexts,drafts] [--ratios 0.17,0.25,0.5] [--contexts 1024,4096]
        [--format mxfp4] [--gammas 2,4,8] [--settings FILE] [--also ROUTING=FILE ...] [--steps 24] [--repeats 3]
        [--minutes M]

Sections: everything resident; no cache; caches of some sizes beside llama.cpp's placement; long contexts, on demand
beside executed predictions; drafts forced on. Routing is replayed from --trace, or made with published statistics
(`trace synthesize --preset qwen3`) in the model's shape; verify windows and executed predictions are made of it. Of a
recording that holds verify windows, drafts alone are measured: those windows, shorter ones cut from them, and its
text without drafts, from the middle of it on. Writes DIR/decode.json (every repeat, rates, machine) after every round,
and DIR/decode.md. A cell is not begun that would not end before the minutes are over: the result names it. Contexts may
be longer than those of a published shape.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_rows import NO_DRAFTS, Rates, bars, drafts, forced, measure_rates, overlap, rows
from benchmarks.decode_runs import MARKED, Cell, Kind, Routings, recorded_gamma, run_cell
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import SCHEME, Checkpoint
from foreload.errors import ForeloadError, UsageError
from foreload.files import write_json, write_text
from foreload.machine import cores, machine_name, software
from foreload.presets import preset_settings
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.traces.io import read_trace
from foreload.traces.remodel import of_shape, renamed
from foreload.traces.schema import Trace
from foreload.traces.synthetic import Synthetic, even_recall, qwen3, write_synthetic

SECTIONS = {"resident": 3, "no cache": 4, "cached": 8, "contexts": 3, "drafts": 4}
"""In order of importance, with their shares of the time there is; what one does not need is the others'."""
CONTEXT = 1024
AHEAD = {"predictor": "gate", "prefetch_depth": 1}
FEW_AHEAD = (2, 3)
FEW = 16
"""Steps of a cell in the sections of long contexts and drafts."""
SPECULATING = {**AHEAD, "speculate_layers": "all"}
"""`router_pf` with the predictor that needs no calibration: what it copies and waits for is the same."""


@dataclass(frozen=True)
class Wanted:
    """What is to be measured. `until`: on the monotonic clock."""

    out: Path
    sections: tuple[str, ...] = tuple(SECTIONS)
    context: int = CONTEXT
    contexts: tuple[int, ...] = (4096, 16384, 65536)
    ratios: tuple[float, ...] = (0.17, 0.25, 0.5)
    gammas: tuple[int, ...] = (2, 4, 8)
    tuned: Mapping[float, Settings] = field(default_factory=dict)  # by the ratio of the cache they are for
    also: tuple[tuple[str, str, Settings], ...] = ()  # routing, name and settings, beside drafts that are forced on
    steps: int = 24
    repeats: int = 3
    longest_prompt: int = 4096  # above it a cell's TTFT is left out
    until: float = float("inf")


def workload(shape: ModelShape, steps: int, seed: int = 0) -> Trace:
    """Made-up routing of `shape`: published statistics if it is the shape they are of, else recency and skew."""
    layers, experts, top_k = shape.n_moe_layers, shape.experts, shape.top_k
    base = qwen3()
    if (layers, experts, top_k) == (base.shape.n_moe_layers, base.shape.experts, base.shape.top_k):
        made = base
    else:
        recall = even_recall((0.78,), layers)
        made = Synthetic(shape, skew=1.6, recency=2.5, persistence=4.5, recall=recall, name="like qwen3")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "workload.parquet"
        write_synthetic(path, replace(made, requests=1, tokens=steps, seed=seed))
        return read_trace(path)


def named(trace: Trace, engine: Engine) -> Trace:
    """Of this engine's shape; where it lacks the gate's predictions, those of another predictor under that name."""
    names = [name for name, depth in trace.predictions if depth == 1]
    found = of_shape(trace, engine.shape)
    return renamed(found, {names[0]: "gate"}) if names and "gate" not in names else found


class Grid:
    """The cells of every section for one engine."""

    def __init__(self, engine: Engine, routing: Mapping[str, Trace], wanted: Wanted) -> None:
        self._engine, self._wanted = engine, wanted
        self._plain = {name: trace for name, trace in routing.items() if not recorded_gamma(trace)} or routing
        self._drafted = {name: recorded_gamma(trace) for name, trace in routing.items()}
        self._threads = max(1, cores() - 1)

    def cells(self, section: str) -> list[Cell]:
        """The cells of a section, the most telling first."""
        made = {
            "resident": self._resident,
            "no cache": self._no_cache,
            "cached": self._cached,
            "contexts": self._contexts,
            "drafts": self._drafts,
        }
        return made[section]()

    def _cell(self, section: str, name: str, kind: Kind, routing: str, **fields: Any) -> Cell:
        wanted = self._wanted
        base = {"expert_format": self._engine.settings.expert_format, "prefill_chunk_tokens": wanted.longest_prompt}
        settings = Settings.parse({**base, **fields})
        prompt = wanted.context if wanted.context <= wanted.longest_prompt else 0
        return Cell(section, name, kind, settings, wanted.context, routing, steps=wanted.steps, prompt=prompt)

    def _resident(self) -> list[Cell]:
        """Experts that are never routed to stay absent under `demand`, so that the host is asked in every layer."""
        routing = next(iter(self._plain))
        asked = self._cell("resident", "resident, a decision per layer", "resident", routing, cache_ratio=1.0)
        asked.rehearsed = True
        launched = {"cache_ratio": 1.0, "admission": "none"}
        return [self._cell("resident", "resident, one launch", "resident", routing, **launched), asked]

    def _no_cache(self) -> list[Cell]:
        routing, on_cpu = next(iter(self._plain)), {"cpu_threads": self._threads, "admission": "none"}
        found = [
            self._cell("no cache", "on_demand", "fetch", routing, cache_ratio=0),
            self._cell("no cache", "split", "split", routing, cache_ratio=0, miss_action="split", **on_cpu),
            self._cell("no cache", "cpu", "cpu", routing, cache_ratio=0, miss_action="cpu", **on_cpu),
        ]
        if ("gate", 1) in self._plain[routing].predictions:
            found.insert(1, self._cell("no cache", "router_pf", "fetch", routing, cache_ratio=0, **SPECULATING))
            ahead = {f"split, {width} ahead": {"prefetch_width": width} for width in FEW_AHEAD}
            ahead[f"split, {FEW_AHEAD[0]} ahead, 1 read"] = _read_too(FEW_AHEAD[0])
            for name, fields in ahead.items():
                every = {"cache_ratio": 0, "miss_action": "split", **on_cpu, **AHEAD, **fields}
                found.append(self._cell("no cache", name, "split", routing, **every))
        return found

    def _cached(self) -> list[Cell]:
        split = {"miss_action": "split", "cpu_threads": self._threads, "admission": "background"}
        found = []
        for number, routing in enumerate(self._plain):
            for ratio in self._wanted.ratios:
                lfru = {**split, "eviction": "lfru"}
                kinds: dict[str, dict[str, Any]] = {"split, lfru": lfru}
                if not number:  # the others beside the first routing alone
                    kinds |= {"split": split, "split, fetched kept": {**lfru, "admission": "demand"}, "fetch": {}}
                    if ("gate", 1) in self._plain[routing].predictions:
                        kinds["split, 2 ahead"] = {**lfru, **AHEAD, "prefetch_width": 2}
                placed = preset_settings("llama_cpp", self._engine.shape, self._threads, cache_ratio=ratio)
                cells = [self._cell("cached", f"llama_cpp {ratio:g}", "placed", routing, **_own_fields(placed))]
                for name, fields in kinds.items():
                    cells.append(self._cell("cached", name, "cached", routing, cache_ratio=ratio, **fields))
                for cell in cells:
                    cell.warm = self._wanted.steps
                    cell.prompt = 0 if number else cell.prompt  # it does not depend on the routing replayed
                found += cells
            for ratio, settings in () if number else self._wanted.tuned.items():
                fields = {**_own_fields(settings), "prefill_chunk_tokens": self._wanted.longest_prompt}
                named, width = {f"tuned {ratio:g}": fields}, settings.width(self._engine.shape)
                if settings.prefetch_depth and settings.miss_action != "fetch" and width < self._engine.shape.experts:
                    named[f"tuned {ratio:g}, 1 read"] = {**fields, **_read_too(width)}
                tuned = [self._cell("cached", name, "cached", routing, **of) for name, of in named.items()]
                for cell in tuned:
                    cell.warm, cell.ratio = self._wanted.steps, ratio
                found = tuned + found
        return found

    def _contexts(self) -> list[Cell]:
        limit = self._engine.options.context_tokens - FEW - MARKED - 8
        fitting = [context for context in self._wanted.contexts if context <= limit]
        routing, found = next(iter(self._plain)), []
        for context in fitting:
            for name, fields in (("on_demand", {}), ("router_pf", SPECULATING)):
                if fields and ("gate", 1) not in self._plain[routing].predictions:
                    continue
                cell = self._cell("contexts", name, "fetch", routing, cache_ratio=0, **fields)
                cell.context, cell.steps = context, min(FEW, self._wanted.steps)
                cell.prompt = context if context <= self._wanted.longest_prompt else 0
                found.append(cell)
        return found

    def _drafts(self) -> list[Cell]:
        split = {"miss_action": "split", "cpu_threads": self._threads, "admission": "background"}
        found, ratio = [], self._wanted.ratios[min(1, len(self._wanted.ratios) - 1)]
        for gamma in (0, *self._wanted.gammas):
            for routing, recorded in self._drafted.items():
                elsewhere = gamma in self._drafted.values() and gamma != recorded
                if gamma and recorded and (gamma > recorded or elsewhere):
                    continue
                draft = {"draft": {"kind": "ngram", "gamma": gamma}} if gamma else {}
                name, kind = (forced(gamma), "drafted") if gamma else (NO_DRAFTS, "cached")
                cell = self._cell("drafts", name, kind, routing, cache_ratio=ratio, **split, **draft)  # type: ignore[arg-type]
                found.append(cell)
        for routing, name, settings in self._wanted.also:
            kind = "drafted" if settings.draft.gamma else "cached"
            cell = self._cell("drafts", name, kind, routing, **_own_fields(settings))
            cell.ratio = round(sum(settings.slots_per_layer or ()) / self._engine.shape.all_experts, 2)
            found.append(cell)
        for cell in found:
            cell.warm = cell.steps = min(FEW, self._wanted.steps)
            cell.prompt, cell.middle = 0, self._drafted[cell.routing] > 0
        return found


def _read_too(width: int) -> dict[str, Any]:
    """Fields of settings that predict `width` experts to be copied, and one more that CPU workers read."""
    return {"prefetch_width": width + 1, "cpu_read_ahead": True}


def _own_fields(settings: Settings) -> dict[str, Any]:
    """The fields of settings that differ from the default."""
    return settings.model_dump(exclude_defaults=True)


def machine_head(engine: Engine) -> dict[str, Any]:
    """What, on what, with what, when."""
    return {
        "model": engine.checkpoint.name,
        "device": torch.cuda.get_device_name() if engine.device.type == "cuda" else machine_name(),
        "machine": machine_name(),
        "software": software(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "path": engine.path,
    }


class Measurement:
    """Runs sections and writes what they found."""

    def __init__(self, engine: Engine, routing: Mapping[str, Trace], wanted: Wanted) -> None:
        self._engine, self._wanted = engine, wanted
        known = {name: named(trace, engine) for name, trace in routing.items()}
        self._grid, self._routings = Grid(engine, known, wanted), Routings(known, engine)
        self._cells: list[Cell] = []
        self.left_out: list[str] = []
        self._rates: Rates | None = None
        self.found: dict[str, Any] = {
            **machine_head(engine),
            "routing": {name: f"{trace.meta.model}: {trace.meta.source}" for name, trace in routing.items()},
            "steps": wanted.steps,
            "left_out": self.left_out,
        }

    def run(self) -> dict[str, Any]:
        """Everything wanted, in order of importance, as far as there is time."""
        self._rates = measured = measure_rates(self._engine)
        self.found["rates"] = measured.as_dict()
        self._engine.use_costs(lambda _: measured.costs(self._engine))
        for number, section in enumerate(self._wanted.sections):
            cells, until = self._grid.cells(section), self._section_until(number)
            self._cells += cells
            for turn in range(self._wanted.repeats):
                for cell in cells:
                    self._one(cell, turn, until)
                self._write(measured)
        return self.found

    def _section_until(self, number: int) -> float:
        """When a section must end, so that those after it have their share."""
        weights, now = [SECTIONS[name] for name in self._wanted.sections[number:]], time.monotonic()
        return now + (self._wanted.until - now) * weights[0] / sum(weights)

    def _one(self, cell: Cell, turn: int, until: float) -> None:
        """A repeat of a cell, if there is time; a setting that is refused or fails costs the others nothing."""
        known = [run.seconds for run in cell.runs] or [run.seconds for other in self._cells for run in other.runs]
        expected = max(known, default=0.0) * (1 if cell.runs else 1 + cell.gamma / 2)
        label = f"{cell.section}: {cell.name}, {cell.routing}, context {cell.context}, repeat {turn}"
        if time.monotonic() + 1.2 * expected > until:
            self.left_out.append(label)
            return
        try:
            run_cell(self._engine, cell, self._routings)
        except (ForeloadError, RuntimeError) as error:
            self.left_out.append(f"{label}: {type(error).__name__}: {error}")

    def _write(self, measured: Rates) -> None:
        found, out = self.found, self._wanted.out
        found["rows"] = made = rows(self._engine, self._cells, measured)
        found["overlap"] = overlap(made, self._engine, measured)
        found["drafts"] = drafts(made)
        found["bars"] = bars(made)
        write_json(out / "decode.json", found)
        write_text(out / "decode.md", markdown(found))


def markdown(found: dict[str, Any]) -> str:
    """The rows and bars as Markdown tables."""
    head = f"{found['model']} on {found['device']}, {found['date']}; {found['path']}; measured\n\n"
    titles = ("cache", "settings", "routing", "context", "ms/token", "spread", "floor", "ratio", "hits")
    titles += ("above resident", "TTFT", "most")
    lines = [f"| {' | '.join(titles)} |", "|---|---|---|" + "---:|" * 8 + "---|"]

    def shown(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    for r in found["rows"]:
        ttft = f"{shown(r['ttft_ms'], '.0f')} ({r['ttft_tokens']})" if r["ttft_ms"] is not None else ""
        cells = (shown(r["cache_ratio"]), r["name"], r["routing"], str(r["context"]), shown(r["tpot_ms"]))
        cells += (f"{r['spread_pct']:.0f} %", shown(r["floor_ms"]), shown(r["ratio"]), f"{r['hit_rate']:.1%}")
        lines.append(f"| {' | '.join((*cells, shown(r['stall_ms']), ttft, r['bottleneck']))} |")
    lines += ["", "| what | measured | limit | met |", "|---|---:|---:|---|"]
    for b in found["bars"]:
        lines.append(f"| {b['what']} | {b['value']:.2f} | {b['limit']:.2f} | {'yes' if b['met'] else 'no'} |")
    return head + "\n".join(lines) + "\n"


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """The rows on an open engine, the most important first, until a time on the monotonic clock."""
    return Measurement(engine, routing, Wanted(out, tuned=tuned_of(prepared(out)), until=until)).run()


def drafts_on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """Drafts of every recording that holds verify windows, forced on and as in `out`/tuned-drafts/RECORDING-*.json."""
    drafted = {name: trace for name, trace in routing.items() if recorded_gamma(trace)}
    if not drafted:
        raise UsageError("drafts: none of the recordings holds verify windows")
    files = [(name, path) for name in drafted for path in sorted((out / "tuned-drafts").glob(f"{name}-*.json"))]
    also = tuple((name, path.stem, Settings.load(path)) for name, path in files)
    wanted = Wanted(out / "drafts", ("drafts",), gammas=(2, 4), also=also, until=until)
    return Measurement(engine, drafted, wanted).run()


def prepared(out: Path) -> list[Path]:
    """Tuned settings that were put where the result goes."""
    return sorted(out.glob("tuned-[0-9]*.json"))


def tuned_of(paths: Sequence[Path]) -> dict[float, Settings]:
    """Tuned settings by the ratio of the cache they are for; UsageError for files of other names."""
    found = {}
    for path in paths:
        try:
            found[float(path.stem.removeprefix("tuned-"))] = Settings.load(path)
        except ValueError:
            raise UsageError(f"{path}: tuned settings are in files like tuned-0.25.json, for that ratio") from None
    return found


def routed(text: str) -> tuple[str, str, Settings]:
    """ROUTING=FILE: the routing, the file's name and its settings."""
    routing, _, path = text.partition("=")
    return routing, Path(path).stem, Settings.load(Path(path))


def numbers(text: str) -> tuple[float, ...]:
    """Comma-separated numbers."""
    return tuple(float(part) for part in text.split(",") if part)


def numbered(text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers."""
    return tuple(int(part) for part in text.split(",") if part)


def arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--trace", type=Path, action="append", default=[])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--format", help="expert_format")
    parser.add_argument("--sections", default=",".join(SECTIONS).replace(" ", "-"))
    parser.add_argument("--ratios", type=numbers, default=(0.17, 0.25, 0.5))
    parser.add_argument("--contexts", type=numbered, default=(CONTEXT,), help="the first is that of all other sections")
    parser.add_argument("--gammas", type=numbered, default=(2, 4, 8))
    parser.add_argument(
        "--settings", type=Path, action="append", default=[], help="tuned-RATIO.json, beside those in --out"
    )
    parser.add_argument("--also", type=routed, action="append", default=[], metavar="ROUTING=FILE")
    parser.add_argument("--link", type=float, help="bytes per second of an emulated link, on cpu")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(args)


def opened(model: str, positions: int) -> Checkpoint:
    """The model; random weights are made for so many positions where those of the published shape are fewer."""
    found = Checkpoint.open(model)
    if found.folder is not None or positions <= found.shape.max_positions:
        return found
    return Checkpoint.random(model.removeprefix(SCHEME), max_position_embeddings=positions)


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load, measure, write; returns what was written."""
    given = arguments(args)
    most = max(given.gammas, default=0) + 1
    recorded = (2 * given.steps + MARKED) * most
    longest = max(given.contexts) + recorded
    model = checkpoint or opened(given.model, longest)
    options = EngineOptions(
        device=given.device,
        context_tokens=longest,
        link_bytes_per_s=int(given.link) if given.link else None,
        eager=given.eager,
    )
    routing = {path.stem: read_trace(path) for path in given.trace}
    if not routing:
        routing = {"synthetic": workload(model.shape, recorded)}
    wanted = Wanted(
        given.out,
        tuple(given.sections.replace("-", " ").split(",")),
        given.contexts[0],
        given.contexts[1:],
        given.ratios,
        given.gammas,
        tuned_of([*prepared(given.out), *given.settings]),
        tuple(given.also),
        given.steps,
        given.repeats,
        max(given.contexts),
        time.monotonic() + 60 * given.minutes if given.minutes else float("inf"),
    )
    with Engine(model, options, Settings(cache_ratio=0.0, expert_format=given.format)) as engine:
        found = Measurement(engine, routing, wanted).run()
    print(markdown(found))
    return found


if __name__ == "__main__":
    main()
