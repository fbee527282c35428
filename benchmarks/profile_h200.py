"""The profile of a machine, and whether one thing at a time takes what it says.

    python -m benchmarks.profile_h200 --out DIR [--model shape:qwen3-30b-a3b] [--device cuda] [--minutes 5]

Writes DIR/profile-h200-SHAPE.json (as `foreload profile` does) and then DIR/microcases-h200.json: one copy, one batch
of resident experts, one batch of CPU experts, and copies beside CPU experts, each predicted from the profile and
measured anew, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import FileError
from foreload.files import write_json
from foreload.profiler.graph_bench import CONTEXT, Asked, GraphBench
from foreload.profiler.graph_cpu import computed_us
from foreload.profiler.probes import thread_counts
from foreload.profiler.run import GRAPHS, Mode, bench_settings, profile
from foreload.profiler.schema import HardwareProfile
from foreload.profiler.stats import in_time
from foreload.simulator.costs import SCALE, CostModel
from foreload.traces.schema import Trace

FULL_S, CASES_S = 240, 12
"""Seconds that must be left for the full profile; seconds kept for the cases."""


@dataclass(frozen=True)
class Case:
    """One thing alone: microseconds as predicted and as measured anew."""

    name: str
    predicted_us: float
    measured_us: float  # median
    spread_pct: float  # 95th to 5th percentile, of the median
    samples: int

    @property
    def error_pct(self) -> float:
        """(predicted - measured) / measured."""
        return 100 * (self.predicted_us / self.measured_us - 1)


def case(name: str, predicted_ns: float, samples_us: Sequence[float]) -> Case:
    """A case out of its samples."""
    ordered, middle = sorted(samples_us), median(samples_us)
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return Case(name, predicted_ns / 1e3, middle, 100 * (high - low) / middle, len(ordered))


def cases(bench: GraphBench, costs: CostModel, seconds: float) -> Iterator[Case]:
    """One resource at a time, then two beside each other."""
    yield from _link_and_device(bench, costs, seconds)
    for threads in thread_counts()[-2:]:
        yield from _cpu(bench, costs, threads, seconds)


def _link_and_device(bench: GraphBench, costs: CostModel, seconds: float) -> Iterator[Case]:
    stage, k, layers = bench.stage("fetch"), bench.shape.top_k, bench.shape.n_moe_layers
    bench.engine.copies.spans = []
    single, burst = list[float](), list[float]()
    for turn in in_time(1000, seconds):
        count = 1 if turn % 2 else k
        missing = Asked.of(bench.pick(stage.absent, count, turn) + bench.pick(stage.resident, k - count, turn))
        step = bench.step([missing if layer % 2 else Asked.of(stage.resident[:k]) for layer in range(layers)])
        for times in step.layers if turn else []:
            if len(times.copies) == count:
                span = (times.copies[-1].landed_ns - min(copy.issued_ns for copy in times.copies)) / 1e3
                (single if count == 1 else burst).append(span)
    bench.engine.copies.spans = None
    start = costs.cost("copy_start").host_ns
    yield case("one copy", costs.copy_ns + start, single)
    yield case(f"{k} copies", k * costs.copy_ns + start, burst)
    enter = costs.cost("launch").host_ns + costs.block("attention", CONTEXT).gpu_ns
    for count in (1, k):
        turns = list[float]()
        for turn in in_time(1000, seconds):
            step = bench.step([Asked.of(bench.pick(stage.resident, count, turn + at)) for at in range(layers)])
            turns += [step.turn_us(layer) for layer in range(layers - 1)] if turn else []
        if turns:
            yield case(f"{count} resident experts and entering a layer", enter + costs.experts_gpu(count).gpu_ns, turns)


def _cpu(bench: GraphBench, costs: CostModel, threads: int, seconds: float) -> Iterator[Case]:
    k, layers, said = bench.shape.top_k, bench.shape.n_moe_layers, f"on {threads} threads"

    def computed(asked: Callable[[int], Asked]) -> list[float]:
        found = list[float]()
        for turn in in_time(1000, seconds):
            step = bench.step([asked(turn + at) for at in range(layers)])
            found += [computed_us(times) for times in step.layers[1:]] if turn else []
        bench.discard()
        return found

    stage = bench.stage("cpu", threads)
    alone = computed(lambda at: Asked.of(bench.pick(stage.absent, k, at)))
    yield case(f"{k} CPU experts {said}", costs.experts_cpu_ns(k, threads), alone)
    stage = bench.stage("cpu", threads, depth=1)
    half = len(stage.absent) // 2
    most, mine, others = min(k, half), stage.absent[:half], stage.absent[half:]
    both = computed(lambda at: Asked.of(bench.pick(mine, most, at), bench.pick(others, most, at)))
    predicted = costs.experts_cpu_ns(most, threads) * SCALE / costs.cpu_rate(most, threads)
    yield case(f"{most} CPU experts {said} beside copies", predicted, both)
    stage = bench.stage("fetch", threads)
    bench.engine.cpu.resize(threads)
    gaps = list[float]()
    for turn in in_time(1000, seconds):
        mine = bench.pick(stage.absent, min(k, len(stage.absent)), turn)
        gaps += bench.copy_times(turn % layers, mine, stage.absent, min(k, threads), submissions=3)
    bench.engine.cpu.resize(0)
    yield case(f"a copy beside CPU experts {said}", costs.copy_ns * SCALE / costs.copy_rate(threads), gaps)


def microcases(engine: Engine, measured: HardwareProfile, seconds: float) -> list[dict[str, Any]]:
    """The cases that the profile can predict, as JSON values; none for an engine that launches no graphs."""
    if engine.path != GRAPHS:
        return []
    bench, found = GraphBench(engine), list[Case]()
    try:
        with suppress(FileError):  # there was no time to measure what the next ones need
            found.extend(cases(bench, CostModel(measured, engine.shape), seconds))
    finally:
        bench.close()
    return [{**asdict(one), "error_pct": one.error_pct} for one in found]


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """Profile an open engine until `until` (`time.monotonic`), then the cases; nothing of the recordings is used."""
    engine.apply(bench_settings(engine.shape))
    left = until - time.monotonic()
    mode: Mode = "full" if left > FULL_S else "quick"
    begun = time.monotonic()
    measured = profile(engine, mode, until=until - CASES_S)
    taken = time.monotonic() - begun
    name = engine.checkpoint.name.removeprefix("shape:")
    measured.save(out / f"profile-h200-{name}.json")
    seconds = max(0.02, min(1.0, (until - time.monotonic()) / 20))
    found: dict[str, Any] = {
        "path": engine.path,
        "mode": mode,
        "seconds": taken,
        "left_out": list(measured.meta.left_out),
        "noise_pct": measured.meta.noise_pct,
        "microcases": microcases(engine, measured, seconds),
    }
    write_json(out / "microcases-h200.json", found)
    return found


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load a model, profile, print the cases; returns what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--context", type=int, default=66560)
    parser.add_argument("--minutes", type=float, default=5.0)
    given = parser.parse_args(args)
    model = checkpoint or Checkpoint.open(given.model)
    options = EngineOptions(device=given.device, context_tokens=given.context)
    with Engine(model, options, bench_settings(model.shape)) as engine:
        found = on_engine(engine, {}, time.monotonic() + 60 * given.minutes, given.out)
    for one in found["microcases"]:
        print(
            f"{one['name']}: {one['predicted_us']:.1f} us predicted, {one['measured_us']:.1f} measured, "
            f"{one['error_pct']:+.1f} %, spread {one['spread_pct']:.1f} %"
        )
    return found


if __name__ == "__main__":
    main()
