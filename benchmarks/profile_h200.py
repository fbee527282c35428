"""The profile of a machine, and whether one thing at a time takes what it says.

    python -m benchmarks.profile_h200 --out DIR [--model shape:qwen3-30b-a3b] [--device cuda] [--minutes 5]

Writes DIR/profile-h200-SHAPE.json (as `foreload profile` does) and DIR/microcases-h200.json: one copy, one batch of
resident experts, one batch of CPU experts, and copies beside CPU experts, each predicted from the profile and measured
by steps of its own, in microseconds. One such step follows each turn of the probe that predicts it: other load on the
host, which comes and goes, moves both alike.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import FileError
from foreload.files import write_json
from foreload.profiler.bench import Stage
from foreload.profiler.graph_bench import Asked, GraphBench, StepTimes
from foreload.profiler.graph_cpu import Routed, computed_us, followed_us
from foreload.profiler.probes import thread_counts
from foreload.profiler.run import Mode, bench_settings, profile
from foreload.profiler.schema import PROBED_CONTEXT, Measurement
from foreload.profiler.stats import averaged, summarise
from foreload.simulator.costs import SCALE, CostModel
from foreload.traces.schema import Trace

FULL_S = 240
"""Seconds that must be left for the full profile."""


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


def case(name: str, predicted_ns: float, measured: Measurement, samples_us: Sequence[float]) -> Case:
    """A case out of its samples and what they come to."""
    ordered, middle = sorted(samples_us), measured.cost_us[0]
    low, high = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
    return Case(name, predicted_ns / 1e3, middle, 100 * (high - low) / middle, len(ordered))


Predicted = Callable[[CostModel], float]
Summary = Callable[[str, Sequence[float]], Measurement]


class Cases:
    """Samples of each case in microseconds, by name, and how each is predicted and summarised."""

    def __init__(self) -> None:
        self._samples: dict[str, list[float]] = {}
        self._of: dict[str, tuple[Predicted, Summary]] = {}
        self._turn = 0
        self._routed: dict[str, Routed] = {}

    def after_turn(self, bench: GraphBench, probe: str, stage: Stage, threads: int) -> None:
        """A step of a case that this probe predicts; CPU experts on many threads alone."""
        self._turn += 1
        if probe == "copy":
            self._link(bench, stage)
        elif probe == "experts_gpu":
            self._device(bench, stage)
        elif threads in thread_counts()[-2:]:
            (self._alone if probe == "experts_cpu" else self._beside)(bench, stage, threads)

    def found(self, costs: CostModel) -> list[dict[str, Any]]:
        """What `costs` can predict and was measured, as JSON values."""
        told = []
        for name, samples in self._samples.items():
            predicted, summary = self._of[name]
            with suppress(FileError):  # there was no time for what it is predicted by
                one = case(name, predicted(costs), summary(name, samples), samples)
                told.append({**asdict(one), "error_pct": one.error_pct})
        return told

    def _add(self, name: str, samples: Sequence[float], predicted: Predicted, summary: Summary = summarise) -> None:
        if samples:
            self._samples.setdefault(name, []).extend(samples)
            self._of[name] = predicted, summary

    def _link(self, bench: GraphBench, stage: Stage) -> None:
        k, layers = bench.shape.top_k, bench.shape.n_moe_layers
        count = 1 if self._turn % 2 else k
        missing = bench.pick(stage.absent, count, self._turn) + bench.pick(stage.resident, k - count, self._turn)
        step = bench.step([Asked.of(missing) if layer % 2 else Asked.of(stage.resident[:k]) for layer in range(layers)])
        spans = [
            (times.copies[-1].landed_ns - min(copy.issued_ns for copy in times.copies)) / 1e3
            for times in step.layers
            if len(times.copies) == count
        ]
        name = "one copy" if count == 1 else f"{count} copies"
        self._add(name, spans, lambda costs: count * costs.copy_ns + costs.cost("copy_start").host_ns)

    def _device(self, bench: GraphBench, stage: Stage) -> None:
        count = 1 if self._turn % 2 else bench.shape.top_k
        layers = range(bench.shape.n_moe_layers)
        step = bench.step([Asked.of(bench.pick(stage.resident, count, self._turn + at)) for at in layers])

        def predicted(costs: CostModel) -> float:
            entering = costs.cost("launch").host_ns + costs.block("attention", PROBED_CONTEXT).gpu_ns
            return entering + costs.experts_gpu(count).gpu_ns

        turns = [step.turn_us(layer) for layer in layers[:-1]]
        self._add(f"{count} resident experts and entering a layer", turns, predicted)

    def _alone(self, bench: GraphBench, stage: Stage, threads: int) -> None:
        k, layers = bench.shape.top_k, bench.shape.n_moe_layers
        name = f"{k} CPU experts on {threads} threads"
        routed = self._routed.setdefault(name, Routed(stage.absent, layers))
        step = bench.step([Asked.of(routed.pick(at, k)) for at in range(layers)])
        self._add(name, _computed_us(step), lambda costs: costs.experts_cpu_ns(k, threads), averaged)

    def _beside(self, bench: GraphBench, stage: Stage, threads: int) -> None:
        layers, half = bench.shape.n_moe_layers, len(stage.absent) // 2
        most, others = min(bench.shape.top_k, half), stage.absent[half:]
        name = f"{most} CPU experts on {threads} threads beside copies"
        mine = self._routed.setdefault(name, Routed(stage.absent[:half], layers))
        step = bench.step(
            [Asked.of(mine.pick(at, most), bench.pick(others, most, self._turn + at)) for at in range(layers)]
        )
        bench.discard()
        self._add(
            name,
            _computed_us(step),
            lambda costs: costs.experts_cpu_ns(most, threads) * SCALE / costs.cpu_rate(most, threads),
            averaged,
        )
        self._add(
            f"a copy beside CPU experts on {threads} threads",
            followed_us(step),
            lambda costs: costs.copy_ns * SCALE / costs.copy_rate(threads),
            averaged,
        )


def _computed_us(step: StepTimes) -> list[float]:
    """The CPU's time in every layer but the first."""
    return [computed_us(times) for times in step.layers[1:]]


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """Profile an open engine until `until` (`time.monotonic`), with a step of the cases after turns of the probes that
    predict them; nothing of the recordings is used. An engine that launches no graphs has no cases.
    """
    engine.apply(bench_settings(engine.shape))
    left = until - time.monotonic()
    mode: Mode = "full" if left > FULL_S else "quick"
    begun, cases = time.monotonic(), Cases()
    measured = profile(engine, mode, until=until, after_turn=cases.after_turn)
    name = engine.checkpoint.name.removeprefix("shape:")
    measured.save(out / f"profile-h200-{name}.json")
    found: dict[str, Any] = {
        "path": engine.path,
        "mode": mode,
        "seconds": time.monotonic() - begun,
        "left_out": list(measured.meta.left_out),
        "noise_pct": measured.meta.noise_pct,
        "microcases": cases.found(CostModel(measured, engine.shape)),
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
