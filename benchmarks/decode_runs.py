"""Runs of the decode benchmark: one setting over replayed routing, from a cache that steps of the same routing warm."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.workloads import ACCEPTED, decode_rows, drafted_by
from foreload.backend.cuda.forward import FastForward
from foreload.backend.engine import Engine
from foreload.backend.generation import DecodeStep
from foreload.backend.observe import Marks, NoMarks
from foreload.backend.policy.state import DECODE as DECODING
from foreload.backend.replay import Replay, ReplayStep
from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.simulator.workload import recorded_draft
from foreload.traces.histogram import uses
from foreload.traces.remodel import cut_windows, executing, with_windows, without_windows
from foreload.traces.schema import Trace

Kind = Literal["resident", "fetch", "cpu", "split", "cached", "placed", "drafted"]
"""What a row's floor is made of (`decode_rows.floor_ms`)."""
MARKED = 8
"""Steps after the timed ones in which the host's blocks are told apart."""


@dataclass
class Run:
    """One repeat. `host_us`: mean microseconds per step of the host's blocks, of the marked steps."""

    steps: list[DecodeStep]
    counters: NDArray[np.int64]  # [counters], of the timed steps
    ttft_ms: float | None
    host_us: dict[str, float]
    cpu_busy_ms: float  # per step, of the marked steps
    graphs_us: dict[str, float]
    seconds: float  # everything, warm-up too

    @property
    def tokens(self) -> int:
        """Tokens that the timed steps added."""
        return sum(step.emitted for step in self.steps)

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per token."""
        return sum(step.duration_ns for step in self.steps) / self.tokens / 1e6


@dataclass
class Cell:
    """One setting at one context over one routing, with its repeats."""

    section: str
    name: str
    kind: Kind
    settings: Settings
    context: int
    routing: str
    warm: int = 4  # steps before the timed ones
    steps: int = 24
    middle: bool = False  # begin in the middle of the recording: at first drafts have little text to go by
    rehearsed: bool = False  # run all its steps before them, so that what they route is in the cache
    prompt: int = 0  # tokens of the prompt whose TTFT is measured in the first repeat; 0: none
    ratio: float | None = None  # of the cache, where the settings do not say it
    runs: list[Run] = field(default_factory=list)

    @property
    def gamma(self) -> int:
        """Drafts per step."""
        return self.settings.draft.gamma

    @property
    def needs(self) -> int:
        """Steps that a recording must have."""
        return self.warm + self.steps + MARKED

    @property
    def tpot_ms(self) -> float:
        """Median of the repeats."""
        return median(run.tpot_ms for run in self.runs)


def recorded_gamma(trace: Trace) -> int:
    """Drafts of each verify window that it holds; 0 for a recording of plain decode."""
    recorded = recorded_draft(trace)
    return 0 if recorded is None else recorded[1]


class Routings:
    """The recordings of a run on the engine's device, made over for what a cell's settings do."""

    def __init__(self, traces: Mapping[str, Trace], engine: Engine) -> None:
        self._traces, self._engine = traces, engine
        self._made: dict[tuple[str, int, str], Replay] = {}

    def of(self, cell: Cell) -> Replay:
        """The routing a cell replays: as recorded, in verify windows, or with predictions executed."""
        settings, shape = cell.settings, self._engine.shape
        layers = settings.speculated(shape)
        key = (cell.routing, cell.gamma, settings.predictor if layers else "")
        if key not in self._made:
            trace = self._traces[cell.routing]
            if not cell.gamma:
                trace = without_windows(trace)
            elif recorded_gamma(trace):
                trace = drafted_by(cut_windows(trace, cell.gamma), settings.draft)
            else:
                trace = with_windows(trace, settings.draft.kind, cell.gamma, (ACCEPTED,))
            if layers:
                trace = executing(trace, settings.predictor, layers)
            self._made[key] = Replay(trace, shape, self._engine.device)
        return self._made[key]

    def start(self, cell: Cell) -> NDArray[np.int64] | None:
        """What residents that stay are chosen by: the rows of the recording that the cell does not reach."""
        if cell.settings.eviction != "static":
            return None
        every = decode_rows(self._traces[cell.routing]).experts
        rest = every[: len(every) // 2] if cell.middle else every[cell.needs * (cell.gamma + 1) :]
        return uses(rest, self._engine.shape.experts)


def run_cell(engine: Engine, cell: Cell, routings: Routings) -> None:
    """One repeat of a cell, from an empty cache."""
    begun, recorded = time.monotonic(), routings.of(cell)
    with engine.replaying(recorded):
        engine.warm_by(routings.start(cell))
        engine.apply(cell.settings)
        ttft = first_token_ms(engine, cell.prompt) if cell.prompt and not cell.runs else None
        engine.reset_cache()
        if cell.rehearsed:
            _Steps(engine, cell, recorded).take(cell.needs)
        steps = _Steps(engine, cell, recorded)
        steps.take(cell.warm)
        before = engine.brain.counters.copy()
        timed = steps.take(cell.steps)
        counted = (engine.brain.counters - before)[DECODING].sum(axis=0)
        marks, busy = _marked(engine, steps)
        forward = engine.forward
        graphs = forward.step_times(cell.gamma + 1, 5) if isinstance(forward, FastForward) else {}
    cell.runs.append(Run(timed, counted, ttft, _by_kind(marks), busy, graphs, time.monotonic() - begun))


def _marked(engine: Engine, steps: _Steps) -> tuple[Marks, float]:
    """Some steps with the host's blocks told apart, and how long CPU experts were busy in each, in milliseconds."""
    marks, engine.cpu.spans = Marks(), []
    engine.forward.marks = marks
    try:
        steps.take(MARKED)
        return marks, _union_ms([(a, b) for _, _, a, b in engine.cpu.spans or []]) / MARKED
    finally:
        engine.forward.marks, engine.cpu.spans = NoMarks(), None


class _Steps:
    """Steps of a recording, one part after the other."""

    def __init__(self, engine: Engine, cell: Cell, recorded: Replay) -> None:
        self._engine, self._recorded, self._request = engine, recorded, recorded.requests()[0]
        self._done, self._position = _middle(recorded.steps(self._request)) if cell.middle else 0, cell.context

    def take(self, count: int) -> list[DecodeStep]:
        found = self._engine.replay(self._recorded, self._request, count, self._position, self._done)
        if len(found.steps) < count:
            raise UsageError(f"trace: request {self._request} has fewer than {self._done + count} decode steps")
        self._done += count
        self._position += found.decode_tokens
        return found.steps


def _middle(steps: Sequence[ReplayStep]) -> int:
    """The step at which half of the tokens are there: the same place of a text with drafts and without."""
    there = np.cumsum([step.emitted for step in steps])
    return int(np.searchsorted(there, there[-1] / 2))


def first_token_ms(engine: Engine, tokens: int) -> float:
    """Milliseconds to the first token after a prompt of random tokens, from an empty cache."""
    engine.reset_cache()
    prompt = np.random.default_rng(1).integers(engine.shape.vocab, size=tokens).tolist()
    return engine.generate(prompt, 1, stop=False).ttft_ns / 1e6


def _by_kind(marks: Marks) -> dict[str, float]:
    """Mean microseconds per marked step of the host's blocks."""
    total: dict[str, float] = {}
    for kind, _, _, begun, done in marks.spans:
        total[kind] = total.get(kind, 0.0) + (done - begun) / 1e3
    return {kind: value / MARKED for kind, value in total.items()}


def _union_ms(spans: list[tuple[int, int]]) -> float:
    """Milliseconds in which at least one of the spans (ns) runs."""
    total, end = 0, 0
    for begun, done in sorted(spans):
        total += max(0, done - max(begun, end))
        end = max(end, done)
    return total / 1e6


def as_dict(run: Run) -> dict[str, Any]:
    """What a run found, for JSON; steps in microseconds."""
    return {
        "step_us": [round(step.duration_ns / 1e3) for step in run.steps],
        "emitted": [step.emitted for step in run.steps],
        "counters": run.counters.tolist(),
        "host_us_per_step": {kind: round(us, 1) for kind, us in run.host_us.items()},
        "cpu_busy_ms_per_step": run.cpu_busy_ms,
        "graphs_us": run.graphs_us,
        "seconds": run.seconds,
    }
