"""Decode speed of settings on one engine: replayed routing, interleaved repeats, medians, ratio to the floor.

    python -m benchmarks.decode --model shape:qwen3-30b-a3b --out DIR [--trace FILE] [--device cuda]
        [--ratios 0,0.17,0.25,0.5,1] [--actions fetch,cpu,split] [--contexts 1024] [--steps 48] [--repeats 3]

Routing is replayed: from --trace, or made with published statistics (`trace synthesize --preset qwen3`) in the model's
shape. Writes DIR/decode.json (rows, rates, machine) after every round, and DIR/decode.md.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.generation import Generation
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter, SplitCosts
from foreload.backend.policy.state import DECODE
from foreload.backend.replay import Replay
from foreload.files import write_json, write_text
from foreload.machine import cores, machine_name, software
from foreload.profiler.bench import Bench
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace
from foreload.traces.synthetic import Synthetic, even_recall, qwen3, write_synthetic

WARM_STEPS = 4


@dataclass(frozen=True)
class Rates:
    """Bytes per second, measured in this run: link and CPU experts, each alone and beside the other."""

    link: float
    cpu: float
    link_beside: float
    cpu_beside: float


@dataclass
class Cell:
    """One setting at one context, with its repeats."""

    name: str
    settings: Settings
    context: int
    tpot_ns: list[float] = field(default_factory=list)
    counters: Any = None
    tokens: int = 0


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


def rates(engine: Engine) -> Rates:
    """Copies and CPU experts of this engine's size, alone and at once. Leaves the cache empty."""
    bench, k, size = Bench(engine), engine.shape.top_k, engine.expert_bytes
    threads = max(1, cores() - 1)
    try:
        stage = bench.stage("fetch", threads)
        absent = stage.absent[: min(k, len(stage.absent))]
        link = size * 1e6 / median(t for at in range(4) for t in bench.copy_times(at % 2, absent, []))
        engine.cpu.resize(threads)
        engine.cpu.spans = []
        x, rows = bench.hidden().cpu(), [np.zeros(1, np.int64)] * k
        for layer in range(min(8, engine.shape.n_moe_layers)):
            engine.cpu.submit(layer, list(range(k)), x, rows)
            engine.cpu.join()
        cpu = _cpu_rate(engine, size)
        engine.cpu.spans = []
        beside = size * 1e6 / median(t for at in range(4) for t in bench.copy_times(at % 2, absent, list(range(k))))
        return Rates(link, cpu, beside, _cpu_rate(engine, size))
    finally:
        engine.cpu.spans = None
        bench.close()


def _cpu_rate(engine: Engine, size: int) -> float:
    spans = engine.cpu.spans or []
    return size * 1e9 * sum(n for _, n, _, _ in spans) / max(1, sum(done - begun for _, _, begun, done in spans))


def grid(ratios: Sequence[float], actions: Sequence[str], predict: bool) -> list[tuple[str, Settings]]:
    """Named settings: every ratio and miss action, and at no cache the gate's prefetch."""
    threads = max(1, cores() - 1)
    found = []
    for ratio in ratios:
        for action in actions if ratio < 1 else ("fetch",):
            extra = (
                {} if action == "fetch" else {"cpu_threads": threads, "admission": "background" if ratio else "none"}
            )
            base = {"cache_ratio": ratio, "miss_action": action, **extra}
            found.append((action, Settings.parse(base)))
    if predict and 0 in ratios and "fetch" in actions:
        prefetch = {"cache_ratio": 0.0, "predictor": "gate", "prefetch_depth": 1}
        found.append(("fetch, gate prefetch", Settings.parse(prefetch)))
    return found


def costs_of(shape: ModelShape, size: int, measured: Rates) -> SplitCosts:
    """What `split` decides by, from this run's contended rates."""
    n = np.arange(shape.top_k * 2 + 1, dtype=np.int64)
    return SplitCosts(
        int(size / measured.link_beside * 1e9), n * 4_000, (n * (size / measured.cpu_beside) * 1e9).astype(np.int64)
    )


def run_cell(engine: Engine, cell: Cell, recorded: Replay, steps: int) -> None:
    """One repeat from a cache as left by warm-up steps of the same recording."""
    engine.apply(cell.settings)
    engine.reset_cache()
    request = recorded.requests()[0]
    whole = cell.settings.cache_ratio == 1.0  # only with everything it needs there is it the resident step
    engine.replay(recorded, request, None if whole else WARM_STEPS, cell.context)
    done: Generation = engine.replay(recorded, request, steps, cell.context + WARM_STEPS, WARM_STEPS)
    cell.tpot_ns.append(done.decode_ns / done.decode_tokens)
    cell.counters, cell.tokens = done.counters[DECODE].sum(axis=0), done.decode_tokens


def row(engine: Engine, cell: Cell, measured: Rates, resident_ms: float | None) -> dict[str, Any]:
    """A row of the table. floor: bytes that moved over the rates that moved them, beside each other if both did."""
    size, c, tpot = engine.expert_bytes, cell.counters, median(cell.tpot_ns) / 1e6
    copied = int(c[Counter.FETCHED] + c[Counter.PREFETCHED] + c[Counter.UPLOADED]) * size / cell.tokens
    computed = int(c[Counter.ON_CPU]) * size / cell.tokens
    together = measured.link_beside + measured.cpu_beside
    rate = together if copied and computed else (measured.cpu if computed else measured.link)
    floor = (copied + computed) / rate * 1e3
    demand = int(c[Counter.HITS] + c[Counter.LATE] + c[Counter.MISSES])
    return {
        "shape": engine.checkpoint.name,
        "format": engine.dtype_name,
        "cache_ratio": cell.settings.cache_ratio,
        "settings": cell.settings.describe(),
        "name": cell.name,
        "context": cell.context,
        "tpot_ms": tpot,
        "spread_pct": 100 * (max(cell.tpot_ns) / min(cell.tpot_ns) - 1),
        "floor_ms": floor,
        "ratio": tpot / floor if floor else None,
        "hit_rate": int(c[Counter.HITS]) / demand,
        "stall_ms": None if resident_ms is None else tpot - resident_ms,
        "copied_bytes": copied,
        "cpu_bytes": computed,
        "repeats": len(cell.tpot_ns),
    }


def markdown(found: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    head = f"{found['model']} on {found['device']}, {found['date']}; {found['routing']}; measured\n\n"
    titles = ("cache", "settings", "context", "ms/token", "floor", "ratio", "hits", "above resident")
    lines = [f"| {' | '.join(titles)} |", "|---|---|---:|---:|---:|---:|---:|---:|"]
    for r in found["rows"]:
        ratio = "" if r["ratio"] is None else f"{r['ratio']:.2f}"
        stall = "" if r["stall_ms"] is None else f"{r['stall_ms']:.2f}"
        lines.append(
            f"| {r['cache_ratio']:.2f} | {r['name']} | {r['context']} | {r['tpot_ms']:.2f} | {r['floor_ms']:.2f} "
            f"| {ratio} | {r['hit_rate']:.1%} | {stall} |"
        )
    return head + "\n".join(lines) + "\n"


def measure(
    engine: Engine, cells: list[Cell], recorded: Replay, given: argparse.Namespace, routing: str, measured: Rates
) -> dict[str, Any]:
    """All cells, settings taking turns; written after every round."""
    found: dict[str, Any] = {
        "model": engine.checkpoint.name,
        "device": torch.cuda.get_device_name() if given.device == "cuda" else machine_name(),
        "machine": machine_name(),
        "software": software(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "path": engine.path,
        "routing": routing,
        "rates_gb_per_s": {name: value / 1e9 for name, value in vars(measured).items()},
        "steps": given.steps,
    }
    for _ in range(given.repeats):
        for cell in cells:
            run_cell(engine, cell, recorded, given.steps)
        resident = {c.context: median(c.tpot_ns) / 1e6 for c in cells if c.settings.cache_ratio == 1.0}
        found["rows"] = [row(engine, cell, measured, resident.get(cell.context)) for cell in cells]
        write_json(given.out / "decode.json", found)
        write_text(given.out / "decode.md", markdown(found))
    return found


def numbers(text: str) -> list[float]:
    """Comma-separated numbers."""
    return [float(part) for part in text.split(",")]


def arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--ratios", type=numbers, default=[0.0, 0.17, 0.25, 0.5, 1.0])
    parser.add_argument("--actions", default="fetch,cpu,split")
    parser.add_argument("--contexts", default="1024")
    parser.add_argument("--link", type=float, help="bytes per second of an emulated link, on cpu")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(args)


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load, measure, write; returns what was written."""
    given = arguments(args)
    contexts = [int(part) for part in given.contexts.split(",")]
    model = checkpoint or Checkpoint.open(given.model)
    options = EngineOptions(
        device=given.device,
        context_tokens=max(contexts) + given.steps + 64,
        link_bytes_per_s=int(given.link) if given.link else None,
        eager=given.eager,
    )
    trace = workload(model.shape, given.steps + WARM_STEPS) if given.trace is None else read_trace(given.trace)
    routing = f"routing of {given.trace}" if given.trace else "synthetic routing, qwen3 preset"
    costs: list[SplitCosts] = []
    with Engine(model, options, Settings(cache_ratio=0.0), lambda _: costs[0]) as engine:
        measured = rates(engine)
        costs.append(costs_of(engine.shape, engine.expert_bytes, measured))
        recorded = Replay(trace, engine.shape, engine.device)
        named = grid(given.ratios, given.actions.split(","), ("gate", 1) in trace.predictions)
        cells = [Cell(name, settings, context) for context in contexts for name, settings in named]
        found = measure(engine, cells, recorded, given, routing, measured)
    print(markdown(found))
    return found


if __name__ == "__main__":
    main()
