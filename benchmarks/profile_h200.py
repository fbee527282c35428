"""The profile of a machine, and whether one thing at a time takes what it says.

    python -m benchmarks.profile_h200 --out DIR [--model shape:qwen3-30b-a3b] [--device cuda] [--minutes 5]

Writes DIR/profile-h200-SHAPE.json (as `foreload profile` does) and DIR/microcases-h200.json: one copy, one batch of
resident experts, one batch of CPU experts, and copies beside CPU experts, each predicted from the profile and measured
by samples of its own, in microseconds. Those are taken beside the profile's probes of CPU experts, a case on so many
threads right before the probe on as many: other load on the host, which comes and goes, moves both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import FileError
from foreload.files import write_json
from foreload.profiler.graph_bench import Asked, GraphBench
from foreload.profiler.graph_cpu import Routed, computed_us, followed_us
from foreload.profiler.probes import thread_counts
from foreload.profiler.run import GRAPHS, Mode, bench_settings, profile
from foreload.profiler.schema import PROBED_CONTEXT, Measurement
from foreload.profiler.stats import averaged, in_time, middle_of_each, summarise
from foreload.simulator.costs import SCALE, CostModel
from foreload.traces.schema import Trace

FULL_S, CASES_SHARE, N_SAMPLED, MOST_S = 240, 0.15, 3 * 7, 0.3
"""Seconds that must be left for the full profile; the cases' share of the time, how often one is sampled at least, and
the seconds that one takes at most."""


@dataclass(frozen=True)
class Case:
    """One thing alone: microseconds as predicted and as measured anew."""

    name: str
    predicted_us: float
    measured_us: float  # as a profile has it: the mean beside other work on the host, else the median
    spread_pct: float  # 95th to 5th percentile, of the median
    samples: int

    @property
    def error_pct(self) -> float:
        """(predicted - measured) / measured."""
        return 100 * (self.predicted_us / self.measured_us - 1)


def case(name: str, predicted_ns: float, times: Sequence[Measurement], samples_us: Sequence[float]) -> Case:
    """A case out of its measurements, of each time it was sampled, and all samples."""
    ordered, middle = sorted(samples_us), middle_of_each(times)[0].cost_us[0]
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return Case(name, predicted_ns / 1e3, middle, 100 * (high - low) / middle, len(ordered))


@dataclass
class Cases:
    """Samples of each case, of each time it was taken, in microseconds by name; predicted afterwards."""

    bench: GraphBench
    seconds: float
    """For each case, each time."""
    times: dict[str, list[Measurement]] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    predicted: dict[str, Callable[[CostModel], float]] = field(default_factory=dict)

    def take(self, threads: int) -> None:
        """What the profile measures next, on so many threads, if these are many; the link and the device first where
        they are all.
        """
        if threads == thread_counts()[-1]:
            self._link()
            self._device()
        if threads in thread_counts()[-2:]:
            self._cpu(threads)

    def found(self, costs: CostModel) -> list[dict[str, Any]]:
        """What `costs` can predict and was measured, as JSON values."""
        told = []
        for name, times in self.times.items():
            with suppress(FileError):  # there was no time for what it is predicted by
                one = case(name, self.predicted[name](costs), times, self.samples[name])
                told.append({**asdict(one), "error_pct": one.error_pct})
        return told

    def _add(
        self,
        name: str,
        samples: Sequence[float],
        predicted: Callable[[CostModel], float],
        measured: Callable[[str, Sequence[float]], Measurement] = summarise,
    ) -> None:
        if samples:
            self.times.setdefault(name, []).append(measured(name, samples))
            self.samples.setdefault(name, []).extend(samples)
            self.predicted[name] = predicted

    def _link(self) -> None:
        bench, stage = self.bench, self.bench.stage("fetch")
        k, layers = bench.shape.top_k, bench.shape.n_moe_layers
        bench.engine.copies.spans = []
        spans: dict[int, list[float]] = {1: [], k: []}
        for turn in in_time(1000, self.seconds):
            count = 1 if turn % 2 else k
            missing = Asked.of(bench.pick(stage.absent, count, turn) + bench.pick(stage.resident, k - count, turn))
            step = bench.step([missing if layer % 2 else Asked.of(stage.resident[:k]) for layer in range(layers)])
            for times in step.layers if turn else []:
                if len(times.copies) == count:
                    spans[count].append((times.copies[-1].landed_ns - min(c.issued_ns for c in times.copies)) / 1e3)
        bench.engine.copies.spans = None
        for count, samples in spans.items():
            name = "one copy" if count == 1 else f"{count} copies"
            self._add(name, samples, lambda costs, n=count: n * costs.copy_ns + costs.cost("copy_start").host_ns)

    def _device(self) -> None:
        bench, stage = self.bench, self.bench.stage("fetch")
        k, layers = bench.shape.top_k, bench.shape.n_moe_layers

        def predicted(costs: CostModel, count: int) -> float:
            entering = costs.cost("launch").host_ns + costs.block("attention", PROBED_CONTEXT).gpu_ns
            return entering + costs.experts_gpu(count).gpu_ns

        for count in (1, k):
            turns = list[float]()
            for turn in in_time(1000, self.seconds):
                step = bench.step([Asked.of(bench.pick(stage.resident, count, turn + at)) for at in range(layers)])
                turns += [step.turn_us(layer) for layer in range(layers - 1)] if turn else []
            name = f"{count} resident experts and entering a layer"
            self._add(name, turns, lambda costs, n=count: predicted(costs, n))

    def _cpu(self, threads: int) -> None:
        bench, k, said = self.bench, self.bench.shape.top_k, f"on {threads} threads"
        stage, layers = bench.stage("cpu", threads), bench.shape.n_moe_layers
        routed = Routed(stage.absent, layers)
        alone, _ = self._computed(lambda at, _: Asked.of(routed.pick(at, k)))
        self._add(f"{k} CPU experts {said}", alone, lambda costs: costs.experts_cpu_ns(k, threads), averaged)
        stage = bench.stage("cpu", threads, depth=1)
        half = len(stage.absent) // 2
        most, mine, others = min(k, half), Routed(stage.absent[:half], layers), stage.absent[half:]
        bench.engine.copies.spans = []
        both, copies = self._computed(
            lambda at, turn: Asked.of(mine.pick(at, most), bench.pick(others, most, turn + at))
        )
        bench.engine.copies.spans = None
        self._add(
            f"{most} CPU experts {said} beside copies",
            both,
            lambda costs: costs.experts_cpu_ns(most, threads) * SCALE / costs.cpu_rate(most, threads),
            averaged,
        )
        self._add(
            f"a copy beside CPU experts {said}",
            copies,
            lambda costs: costs.copy_ns * SCALE / costs.copy_rate(threads),
            averaged,
        )

    def _computed(self, asked: Callable[[int, int], Asked]) -> tuple[list[float], list[float]]:
        """Of every layer but the first: the CPU's time, and that of copies between two landings meanwhile.

        `asked`: by layer and turn.
        """
        computed, copies = list[float](), list[float]()
        for turn in in_time(1000, self.seconds):
            step = self.bench.step([asked(at, turn) for at in range(self.bench.shape.n_moe_layers)])
            self.bench.discard()
            computed += [computed_us(times) for times in step.layers[1:]] if turn else []
            copies += followed_us(step) if turn else []
        return computed, copies


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """Profile an open engine until `until` (`time.monotonic`), taking the cases' samples beside each measuring of CPU
    experts; nothing of the recordings is used. An engine that launches no graphs has no cases.
    """
    engine.apply(bench_settings(engine.shape))
    left = until - time.monotonic()
    mode: Mode = "full" if left > FULL_S else "quick"
    begun, cases = time.monotonic(), None
    if engine.path == GRAPHS:
        cases = Cases(GraphBench(engine), max(0.02, min(MOST_S, left * CASES_SHARE / N_SAMPLED)))

    def before_cpu(threads: int) -> None:
        if cases is not None and time.monotonic() < until:
            cases.take(threads)

    try:
        measured = profile(engine, mode, until=until, before_cpu=before_cpu)
    finally:
        if cases is not None:
            cases.bench.close()
    name = engine.checkpoint.name.removeprefix("shape:")
    measured.save(out / f"profile-h200-{name}.json")
    found: dict[str, Any] = {
        "path": engine.path,
        "mode": mode,
        "seconds": time.monotonic() - begun,
        "left_out": list(measured.meta.left_out),
        "noise_pct": measured.meta.noise_pct,
        "microcases": [] if cases is None else cases.found(CostModel(measured, engine.shape)),
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
