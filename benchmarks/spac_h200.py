"""MoE-SpAc piece by piece on replayed routing, measured and simulated, beside the paper's own ablation.

    python -m benchmarks.spac_h200 --model shape:qwen3-30b-a3b --trace topo.parquet --windows traces/samples --out DIR
        [--device cuda] [--minutes 2] [--ratio 0.17]
    python -m benchmarks.spac_h200 --simulate DIR/spac-h200.json --profile FILE --trace topo.parquet
    python -m benchmarks.spac_h200 --table DIR/spac-h200.json

`full` is the method of arXiv 2603.09983 with boundaries that adapt (section 5 of the design); every other row changes
one thing. Drafts take the time of a look-up where the engine holds no draft model: rows say so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.beside import Beside, Cell, costs_of, find_costs, provenance, row, simulate_rows, simulator_ready
from benchmarks.opened import add_engine_flags, opened
from benchmarks.workloads import Workload, recorded_windows
from foreload.backend.engine import Engine
from foreload.backend.models.checkpoint import Checkpoint
from foreload.files import read_mapping, write_json, write_text
from foreload.machine import cores
from foreload.presets import preset_settings
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.traces.io import read_trace
from foreload.traces.remodel import acceptance
from foreload.traces.schema import Trace

SAMPLES = Path("traces/samples")
FILE = "spac-h200.json"
RATIO, GAMMA, CONTEXT = 0.17, 8, 1024
WARM, TOKENS, REPEATS = 8, 24, 2
MADE, RECORDED = "topo", "recorded drafts"
"""The workloads: one text with made-up verify windows, and one whose windows a draft model made."""
LENGTHS = (512, 1024, 2048, 4096)
SHARE = 0.75
"""Of the time, for measuring, where rows are simulated in the rest."""

PAPER: Mapping[str, str] = {
    "binary score": "-19 to -27 %",
    "no prefetch": "-28 to -33 %",
    "plain LRU": "-25 to -29 %",
    "no drafts": "-30 to -42 %",
    "fixed tau 2": "-5 to -12 %",
    "fixed theta": "-1 to -2 %",
}
"""Change of tokens per second without that piece: arXiv 2603.09983, its ablation, on an RTX 4090."""


def full(engine: Engine, threads: int, ratio: float) -> Settings:
    """The method, its boundaries real-valued."""
    return preset_settings("moe_spac", engine.shape, threads, cache_ratio=ratio).changed(
        utility={"k": 4, "rate": 0.1, "reset_done": True}
    )


def ablation(base: Settings) -> dict[str, Settings]:
    """Name -> settings; the first is `base` itself."""

    def utility(**fields: Any) -> Settings:
        return base.changed(utility={**base.utility.model_dump(), **fields})

    def drafts(**fields: Any) -> Settings:
        return base.changed(draft=fields)

    return {
        "full": base,
        "no drafts": drafts(kind="none", gamma=0),
        "no prefetch": base.changed(predictor="none"),
        "plain LRU": base.changed(eviction="lru"),
        "binary score": utility(k=1),
        "fixed tau 2": utility(tau=2),
        "fixed theta": utility(adapt="off"),
        "floored theta": utility(adapt="floored"),
        "level signal": utility(signal="level"),
        "balance objective": base.changed(objective="balance"),
        "gamma 4": drafts(kind=base.draft.kind, gamma=4),
        "gamma 2": drafts(kind=base.draft.kind, gamma=2),
        "split by makespan": base.changed(split_rule="makespan"),
    }


def plan(
    engine: Engine, threads: int, ratio: float, context: int, lengths: Sequence[int], recorded: bool
) -> list[list[Cell]]:
    """Groups of cells, the most important first: cells of one group take turns."""
    named = ablation(full(engine, threads, ratio))

    def cell(name: str, settings: Settings, at: int, workload: str = MADE) -> Cell:
        return Cell(name, workload, settings, at, ratio)

    with_drafts = [cell(name, s, context) for name, s in named.items() if s.draft.gamma == GAMMA]
    others = [cell(name, s, context) for name, s in named.items() if s.draft.gamma != GAMMA]
    long = [
        cell(f"{name}, {length} tokens", named[name], length) for length in lengths for name in ("full", "no drafts")
    ]
    real = [cell(f"{name}, {RECORDED}", named[name], context, RECORDED) for name in ("full", "gamma 4", "no drafts")]
    return [with_drafts, others, real if recorded else [], long]


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """All rows on an open engine until a time on the monotonic clock; also in `out`/spac-h200.json after each round.

    Rows are simulated if that takes no compiling; else --simulate does it.
    """
    return measure(engine, routing["topo"], SAMPLES, until, out, simulate=simulator_ready())


def measure(
    engine: Engine,
    trace: Trace,
    samples: Path,
    until: float,
    out: Path,
    ratio: float = RATIO,
    context: int = CONTEXT,
    lengths: Sequence[int] = LENGTHS,
    warm: int = WARM,
    tokens: int = TOKENS,
    simulate: bool = True,
) -> dict[str, Any]:
    """See `on_engine`. `samples`: a folder that may hold recordings of verify windows."""
    costs = find_costs(engine, out)
    threads = costs.cpu_threads[-1] if costs is not None and costs.cpu_threads else max(1, cores() - 1)
    workloads = workloads_of(trace, samples, engine.shape, warm, tokens)
    begun = time.monotonic()
    beside = Beside(engine, workloads, begun + (SHARE if simulate else 1.0) * (until - begun))
    groups = plan(engine, threads, ratio, context, lengths, len(workloads) > 1)
    found = provenance(engine, workloads) | {"repeats": REPEATS, "warm_tokens": warm, "tokens": tokens}
    found["accepted_as_recorded"] = {str(g): list(acceptance(one)) for g, one in workloads[-1].recorded.items()}

    def keep() -> None:
        found["rows"] = rows = [row(cell, engine) for group in groups for cell in group]
        compare(rows)
        write_json(out / FILE, found)

    for _ in range(REPEATS):
        for group in groups:
            beside.round(group)
            keep()
    if costs is not None and simulate:
        simulate_rows(found["rows"], workloads, costs, until)
        compare(found["rows"])
        write_json(out / FILE, found)
    return found


def workloads_of(trace: Trace, samples: Path, shape: ModelShape, warm: int, tokens: int) -> list[Workload]:
    """`trace` with made-up windows, and the text whose windows are recorded in `samples` with a draft model, if any."""
    windows = recorded_windows(samples, "model", shape)
    found = [Workload(MADE, trace, shape, warm, tokens)]
    return [*found, Workload(RECORDED, windows[max(windows)], shape, warm, tokens, windows)] if windows else found


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add to each row its tokens per second against those of `full` at the same context, measured and simulated."""
    for one in rows:
        _, _, kind = one["name"].partition(", ")
        base = next(other for other in rows if other["name"] == (f"full, {kind}" if kind else "full"))
        one["against_full_pct"] = _change(base.get("tpot_ms"), one.get("tpot_ms"))
        simulated = [r.get("simulated", {}).get("tpot_ms") for r in (base, one)]
        one["against_full_simulated_pct"] = _change(*simulated)


def _change(base: float | None, value: float | None) -> float | None:
    return None if base is None or value is None else 100 * (base / value - 1)


def markdown(found: Mapping[str, Any]) -> str:
    """The rows as a table."""
    head = f"MoE-SpAc on {found['model']}, {found['device']}, {found['date']}; routing of {found['routing'][MADE]}\n\n"
    titles = ("settings", "context", "ms/token", "simulated", "tokens/s against full", "simulated", "paper", "hits")
    lines = [f"| {' | '.join((*titles, 'tokens/step'))} |", "|---|" + "---:|" * len(titles)]
    for one in found["rows"]:
        if "tpot_ms" not in one:
            lines.append(f"| {one['name']} | {one['context']} | {one['refused'] or 'left out: no time'} |" + " |" * 6)
            continue
        cells = [one["name"], str(one["context"]), f"{one['tpot_ms']:.2f}"]
        cells.append(_shown(one.get("simulated", {}).get("tpot_ms"), ".2f"))
        cells += [_shown(one[key], "+.1f", " %") for key in ("against_full_pct", "against_full_simulated_pct")]
        cells += [PAPER.get(one["name"], ""), f"{one['hit_rate']:.1%}", f"{one['tokens_per_step']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    assumed = sorted({what for one in found["rows"] for what in one.get("assumed", ())})
    return head + "\n".join(lines) + "".join(f"\n\nAssumed: {what}." for what in assumed) + "\n"


def _shown(value: float | None, how: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{how}}{unit}"


def arguments() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_flags(parser)
    parser.add_argument("--trace", type=Path, help="recording of the routing to replay")
    parser.add_argument("--windows", type=Path, default=SAMPLES, help="folder with recordings of verify windows")
    parser.add_argument("--ratio", type=float, default=RATIO)
    parser.add_argument("--table", type=Path, help="show these rows instead")
    parser.add_argument("--simulate", type=Path, help="simulate these rows anew, from --profile, instead of measuring")
    parser.add_argument("--profile", type=Path)
    return parser


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Measure, simulate anew, or show what was measured; returns it."""
    parser = arguments()
    given = parser.parse_args(args)
    if given.table is not None:
        found: dict[str, Any] = read_mapping(given.table, "results")
    elif given.trace is None:
        parser.error("--trace is needed")
    elif given.simulate is not None:
        costs, found = costs_of(given.profile), read_mapping(given.simulate, "results")
        sizes = found["warm_tokens"], found["tokens"]
        workloads = workloads_of(read_trace(given.trace), given.windows, costs.shape, *sizes)
        simulate_rows(found["rows"], workloads, costs)
        compare(found["rows"])
        write_json(given.simulate, found)
    else:
        with opened(given, max(LENGTHS) + 256, checkpoint) as engine:
            until = time.monotonic() + given.minutes * 60
            found = measure(engine, read_trace(given.trace), given.windows, until, given.out, given.ratio)
        write_text(given.out / "spac-h200.md", markdown(found))
    print(markdown(found))
    return found


if __name__ == "__main__":
    main()
