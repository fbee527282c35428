"""What the decode benchmark makes of its runs: rates of this machine, rows beside their floors, and the bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.decode_runs import Cell, Run, as_dict
from foreload.backend.cuda.forward import FastForward
from foreload.backend.engine import Engine
from foreload.backend.policy import Counter, SplitCosts
from foreload.machine import cores
from foreload.profiler import graph_cpu
from foreload.profiler.bench import Bench
from foreload.profiler.graph_bench import GraphBench
from foreload.profiler.probes import QUICK
from foreload.settings import slot_counts

COPY_BYTES = 1 << 28
NO_DRAFTS = "no drafts"
"""The name of rows beside which drafts are forced on."""


@dataclass(frozen=True)
class Rates:
    """Measured in this run: bytes per second of link and CPU experts, each alone and beside the other; device memory.

    `cpu_ns`: n experts on the CPU beside copies, by n; `cpu_token_ns`: each token of an expert beyond its first.
    """

    link: float
    cpu: float
    link_beside: float
    cpu_beside: float
    device: float  # bytes read and written by a copy inside the device
    cpu_ns: dict[int, int]
    cpu_token_ns: int

    def costs(self, engine: Engine) -> SplitCosts:
        """What `split` decides by."""
        size, n = engine.expert_bytes, np.arange(engine.shape.experts + 1, dtype=np.int64)
        known = [0, *self.cpu_ns]
        cpu = np.interp(n, known, [0, *self.cpu_ns.values()])
        beyond = n > known[-1]
        cpu[beyond] = cpu[known[-1]] / known[-1] * n[beyond]
        return SplitCosts(int(size / self.link_beside * 1e9), n * 4_000, cpu.astype(np.int64), self.cpu_token_ns)

    def as_dict(self) -> dict[str, Any]:
        """GB/s and nanoseconds, for JSON."""
        names = ("link", "cpu", "link_beside", "cpu_beside", "device")
        return {name: getattr(self, name) / 1e9 for name in names} | {
            "cpu_ns_by_experts": self.cpu_ns,
            "cpu_token_ns": self.cpu_token_ns,
        }


def measure_rates(engine: Engine) -> Rates:
    """Copies and CPU experts of this engine's size, alone and at once. Leaves the cache empty."""
    bench, k, size = Bench(engine), engine.shape.top_k, engine.expert_bytes
    threads = max(1, cores() - 1)
    try:
        stage = bench.stage("fetch", threads)
        absent = stage.absent[: min(k, len(stage.absent))]
        layers = engine.shape.n_moe_layers
        in_steps = isinstance(engine.forward, FastForward)
        link = size * 1e6 / median(t for at in range(16) for t in bench.copy_times(at % layers, absent, []))
        engine.cpu.resize(threads)
        token_ns = max(0, _cpu_ns(engine, bench, k, 9) - _cpu_ns(engine, bench, k, 1)) // (8 * k)
        apart = None if in_steps else _apart(engine, bench, absent)
    finally:
        engine.cpu.spans = None
        bench.close()
    alone, beside, link_beside_us = apart or _in_steps(engine, threads)
    cpu = (size * k * 1e9 / found[k] for found in (alone, beside))
    return Rates(link, next(cpu), size * 1e6 / link_beside_us, next(cpu), _device_rate(engine), beside, token_ns)


def _apart(engine: Engine, bench: Bench, absent: list[int]) -> tuple[dict[int, int], dict[int, int], float]:
    """As `_in_steps`, where steps are no graphs: submissions and copies that no step is around."""
    shape, copied = engine.shape, list[float]()
    alone = {n: _cpu_ns(engine, bench, n, 1) for n in _counts(shape.top_k)}
    beside = {}
    for n in alone:
        engine.cpu.spans = []
        for at in range(4):
            copied += bench.copy_times(at % shape.n_moe_layers, absent, list(range(shape.experts)), n)
        company = [done - begun for _, _, begun, done in engine.cpu.spans]  # none where copies were over first
        beside[n] = round(median(company or [alone[n]]))
    return alone, beside, median(copied)


def _in_steps(engine: Engine, threads: int) -> tuple[dict[int, int], dict[int, int], float]:
    """Nanoseconds of n CPU experts in decode steps, without and with copies beside them, and microseconds of a copy."""
    bench, found = GraphBench(engine), dict[tuple[str, int], float]()
    try:
        for one in chain(graph_cpu.alone(bench, QUICK, threads), graph_cpu.beside_copies(bench, QUICK, threads)):
            found[one.probe, one.at.get("experts", 0)] = one.p50_us
    finally:
        bench.close()
    alone, beside = (
        {n: round(1e3 * us) for (name, n), us in found.items() if name == probe and n}
        for probe in ("experts_cpu", "experts_cpu_beside_copy")
    )
    return alone, {**alone, **beside}, found["copy_beside_cpu", 0]


def _counts(k: int) -> list[int]:
    return sorted({1, max(1, k // 2), k})


def _cpu_ns(engine: Engine, bench: Bench, experts: int, tokens: int) -> int:
    """Median time of so many experts over so many tokens each, other ones every time."""
    engine.cpu.spans = []
    x, rows = bench.hidden(tokens).cpu(), [np.arange(tokens)] * experts
    for turn in range(2 * engine.shape.n_moe_layers):
        chosen = [(turn * experts + n) % engine.shape.experts for n in range(experts)]
        engine.cpu.submit(turn % engine.shape.n_moe_layers, chosen, x, rows)
        engine.cpu.join()
    return round(median(done - begun for _, _, begun, done in engine.cpu.spans))


def _device_rate(engine: Engine) -> float:
    """Bytes per second, read and written, of a copy from device memory to device memory."""
    if engine.device.type != "cuda":
        return 0.0
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=engine.device)
    target, times = torch.empty_like(source), []
    for _ in range(6):
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        target.copy_(source)
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended))
    return 2e3 * COPY_BYTES / median(times[1:])


def missing_bytes(run: Run, size: int) -> float:
    """Per token, bytes of what was demanded and not resident from an earlier step, however it was served."""
    c = run.counters
    used = c[Counter.FETCHED] + c[Counter.ON_CPU] + c[Counter.PREFETCHED] - c[Counter.WASTED]
    return float(used) * size / run.tokens


def floor_ms(cell: Cell, run: Run, size: int, rates: Rates, resident_ms: float | None) -> float | None:
    """The least this row could take, as its kind says; None if what it rests on was not measured.

    fetch, cpu: bytes over that rate alone; split: over both beside each other; cached, placed and drafted: that, and
    the step with everything resident.
    """
    together = rates.link_beside + rates.cpu_beside
    rate = {"fetch": rates.link, "cpu": rates.cpu}.get(cell.kind, together)
    moved = missing_bytes(run, size) / rate * 1e3
    if cell.kind in ("fetch", "cpu", "split"):
        return moved
    return None if cell.kind == "resident" or resident_ms is None else resident_ms + moved


def rows(engine: Engine, cells: Sequence[Cell], rates: Rates) -> list[dict[str, Any]]:
    """A row of every cell that has run."""
    done = [cell for cell in cells if cell.runs]
    return [_row(engine, cell, rates, _resident_ms(engine, cell, done), _gpu_ms(engine, cell, done)) for cell in done]


def _resident_ms(engine: Engine, cell: Cell, done: Sequence[Cell]) -> float | None:
    """Per token, this engine with all experts resident at the cell's context; a window's is its graphs' device time."""
    if cell.gamma:
        return _gpu_ms(engine, cell, done)
    found = [c.tpot_ms for c in done if c.kind == "resident" and c.context == cell.context]
    return min(found) if found else None


def _gpu_ms(engine: Engine, cell: Cell, done: Sequence[Cell]) -> float | None:
    """Device time per token: the layers' graphs, and k resident experts' as often as the demand holds k."""
    planned = [c.runs[-1].graphs_us["planned"] for c in done if c.kind == "resident" and c.runs[-1].graphs_us]
    run, shape = cell.runs[-1], engine.shape
    if not planned or not run.graphs_us:
        return None
    steps = len(run.steps)
    experts_us = max(planned) * _demand(run) / steps / shape.top_k
    return (run.graphs_us["enter"] + experts_us) * steps / run.tokens / 1e3


def _share(engine: Engine, cell: Cell) -> float:
    """Persistent slots of all experts."""
    return sum(slot_counts(cell.settings, engine.shape)) / (engine.shape.experts * engine.shape.n_moe_layers)


def _demand(run: Run) -> int:
    return int(run.counters[[Counter.HITS, Counter.LATE, Counter.MISSES]].sum())


def _row(engine: Engine, cell: Cell, rates: Rates, resident_ms: float | None, gpu_ms: float | None) -> dict[str, Any]:
    size, tpot = engine.expert_bytes, cell.tpot_ms
    run = sorted(cell.runs, key=lambda run: run.tpot_ms)[(len(cell.runs) - 1) // 2]
    c, steps = run.counters, len(run.steps)
    demand = _demand(run)
    copied = int(c[[Counter.FETCHED, Counter.PREFETCHED, Counter.UPLOADED]].sum()) * size / run.tokens
    floor = floor_ms(cell, run, size, rates, resident_ms)
    link = rates.link_beside if cell.settings.miss_action != "fetch" else rates.link
    busy = {"link": copied / link * 1e3, "cpu": run.cpu_busy_ms * steps / run.tokens}
    busy |= {"gpu": gpu_ms} if gpu_ms is not None else {}
    most = max(busy, key=lambda name: busy[name])
    times = [run.tpot_ms for run in cell.runs]
    return {
        "section": cell.section,
        "shape": engine.checkpoint.name,
        "format": "/".join(sorted(set(engine.formats))),
        "cache_ratio": next(
            (r for r in (cell.ratio, cell.settings.cache_ratio) if r is not None), _share(engine, cell)
        ),
        "settings": cell.settings.describe(),
        "name": cell.name,
        "kind": cell.kind,
        "routing": cell.routing,
        "context": cell.context,
        "gamma": cell.gamma,
        "tpot_ms": tpot,
        "spread_pct": 100 * (max(times) / min(times) - 1),
        "floor_ms": floor,
        "ratio": tpot / floor if floor else None,
        "hit_rate": int(c[Counter.HITS]) / demand,
        "stall_ms": None if resident_ms is None else tpot - resident_ms,
        "resident_ms": resident_ms,
        "ttft_ms": cell.runs[0].ttft_ms,
        "ttft_tokens": cell.prompt,
        "missing_bytes": missing_bytes(run, size),
        "copied_bytes": copied,
        "cpu_bytes": int(c[Counter.ON_CPU]) * size / run.tokens,
        "busy_ms": busy,
        "bottleneck": most if tpot < 2 * busy[most] else f"waits between {most} and the rest",
        "tokens_per_step": run.tokens / steps,
        "experts_per_layer_step": demand / steps / engine.shape.n_moe_layers,
        "step_ms": tpot * run.tokens / steps,
        "repeats": len(cell.runs),
        "runs": [as_dict(run) for run in cell.runs],
    }


def overlap(found: Sequence[dict[str, Any]], engine: Engine, rates: Rates) -> list[dict[str, Any]]:
    """Per context: what executing predictions gains, beside what overlap could save (arXiv 2603.19289, equation 1)."""
    result = []
    for context in sorted({row["context"] for row in found}):
        by_name = {row["name"]: row for row in found if row["context"] == context}
        if not {"on_demand", "router_pf"} <= by_name.keys():
            continue
        plain, ahead = by_name["on_demand"], by_name["router_pf"]
        saved, layers = plain["tpot_ms"] - ahead["tpot_ms"], engine.shape.n_moe_layers
        entry = {"context": context, "on_demand_ms": plain["tpot_ms"], "router_pf_ms": ahead["tpot_ms"]}
        entry |= {"gain_pct": 100 * saved / plain["tpot_ms"], "saving_ms": saved}
        if "gpu" in ahead["busy_ms"]:
            t_copy = engine.shape.top_k * engine.expert_bytes / rates.link * 1e3
            possible = layers * min(t_copy, ahead["busy_ms"]["gpu"] / layers)
            entry |= {"possible_ms": possible, "overlap_efficiency": saved / possible}
        result.append(entry)
    return result


def forced(gamma: int) -> str:
    """The name of rows whose drafts are forced on."""
    return f"drafts, gamma {gamma}"


def drafts(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drafts forced on beside the same setting without; they win if a step adds more than `break_even` tokens."""
    result = []
    plain = {(r["routing"], r["cache_ratio"]): r for r in found if r["name"] == NO_DRAFTS}
    for row in found:
        base = plain.get((row["routing"], row["cache_ratio"]))
        if base and row["name"] == forced(row["gamma"]):
            fields = (
                "routing",
                "cache_ratio",
                "gamma",
                "tpot_ms",
                "tokens_per_step",
                "experts_per_layer_step",
                "step_ms",
            )
            ratio = row["tpot_ms"] / base["tpot_ms"]
            result.append(
                {name: row[name] for name in fields}
                | {"tpot_ratio": ratio, "wins": ratio < 1, "break_even": row["step_ms"] / base["tpot_ms"]}
            )
    return result


def bars(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What must be shown, as far as the rows say it: each figure, its limit, and whether it is met."""
    result: list[dict[str, Any]] = []

    def least(**wanted: Any) -> dict[str, Any] | None:
        fitting = [row for row in found if all(row[name] == value for name, value in wanted.items())]
        return min(fitting, key=lambda row: float(row["tpot_ms"]), default=None)

    def bar(what: str, value: float | None, limit: float, upper: bool = True) -> None:
        if value is not None:
            result.append({"what": what, "value": value, "limit": limit, "met": (value <= limit) == upper})

    for name, limit in (("resident, one launch", 3.8), ("resident, a decision per layer", 4.4)):
        for row in (r for r in found if r["name"] == name):
            bar(f"{name}, {row['routing']}: ms per token", row["tpot_ms"], limit)
    for name, limit in (("on_demand", 1.10), ("router_pf", 1.03), ("split", 1.20)):
        row = least(section="no cache", **({"kind": name} if name == "split" else {"name": name}))
        bar(f"no cache, {name}: times the floor", row and row["ratio"], limit)
    split = least(section="no cache", kind="split")
    fetch, cpu = (least(section="no cache", name=n) for n in ("on_demand", "cpu"))
    for other, limit in ((fetch, 1.7), (cpu, 1.2)):
        if split and other:
            bar(
                f"no cache, split: times faster than {other['name']}", other["tpot_ms"] / split["tpot_ms"], limit, False
            )
    for ratio, limit in ((0.17, 1.20), (0.25, 1.25), (0.5, 1.35)):
        for routing in dict.fromkeys(row["routing"] for row in found):
            best = least(kind="cached", cache_ratio=ratio, routing=routing)
            bar(f"cache {ratio}, {routing}: times the floor", best and best["ratio"], limit)
            other = least(name=f"llama_cpp {ratio:g}", routing=routing)
            if best and other and ratio == 0.17:
                gain = other["tpot_ms"] / best["tpot_ms"]
                bar(f"cache {ratio}, {routing}: times faster than llama_cpp", gain, 1.65, False)
    return result
