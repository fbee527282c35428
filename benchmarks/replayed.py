"""One recording replayed under one setting, predicted from a profile and measured on an engine, over the same steps.

Both run from an empty cache (or one warmed by the recording's own counts) through `warm` steps that do not count to
those that do, in one go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.backend.cuda.forward import FastForward
from foreload.backend.engine import Engine
from foreload.backend.policy import Counter
from foreload.backend.policy.copied import copied_bytes
from foreload.backend.policy.state import DECODE
from foreload.backend.replay import Replay
from foreload.machine import stolen
from foreload.settings import Settings, slot_counts
from foreload.shape import ModelShape
from foreload.simulator.compiled import simulate
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import CostModel
from foreload.simulator.validation import Figures, rates
from foreload.traces.histogram import uses
from foreload.traces.remodel import as_deep, of_shape, renamed, with_windows, without_windows
from foreload.traces.schema import PREFILL, Trace

BEHAVIOURS = 24
"""Graphs to keep captured: trials take turns, and none should wait for a capture twice."""
ACCEPTED = (0.7, 0.6, 0.5, 0.5)
"""Share of drafts kept by their place in a window, where the recording has none: round figures."""


@dataclass(frozen=True)
class Trial:
    """One setting to try; `warmed`: residents are loaded before, by the recording's counts."""

    settings: Settings
    warmed: bool = False

    def describe(self) -> str:
        """On one line."""
        return self.settings.describe() + (" warm-start" if self.warmed else "")


@dataclass(frozen=True)
class Lengths:
    """Decode steps before those that count, and those; of one token each, and of verify windows."""

    warm: int = 20
    steps: int = 24
    warm_windows: int = 8
    windows: int = 12


@dataclass(frozen=True)
class Workload:
    """One request of decode steps alone, from position `context` on."""

    trace: Trace
    context: int
    warm: int
    counts: NDArray[np.int64]  # [MoE layers, experts] uses in the recording

    @property
    def emitted(self) -> list[int]:
        """Tokens that each step adds."""
        starts = self.trace.step_starts()
        return [int(self.trace.accepted[a:b].sum()) for a, b in pairwise(starts)]


def workload(trace: Trace, shape: ModelShape, context: int, lengths: Lengths, gamma: int = 0) -> Workload:
    """The longest request of a recording made over: this shape, from `context` on, with windows of `gamma` drafts.

    Where the gate's predictions were not recorded, those of another predictor take their place; where none were two
    layers ahead, those of one.
    """
    trace = without_windows(of_shape(trace, shape))
    counts = uses(trace.experts, shape.experts)
    decoded = trace.phase != PREFILL
    longest = max(trace.requests(), key=lambda n: int((decoded & (trace.request == n)).sum()))
    text = trace.take(np.flatnonzero(decoded & (trace.request == longest)))
    names = [name for name, depth in text.predictions if depth == 1]
    if names and "gate" not in names:
        text = renamed(text, {names[0]: "gate"})
    if names and ("gate", 2) not in text.predictions:
        text = as_deep(text, "gate", 2)
    warm, steps = (lengths.warm_windows, lengths.windows) if gamma else (lengths.warm, lengths.steps)
    if gamma:
        text = with_windows(text, "ngram", gamma, ACCEPTED)
    starts = text.step_starts()
    needed = min(len(starts) - 1, warm + steps)
    text = text.take(slice(0, int(starts[needed])))
    text = replace(text, position=text.position - text.position[0] + context)
    return Workload(text, context, min(warm, needed - 1), counts)


@dataclass(frozen=True)
class Predicted:
    """What the simulator says of a trial: figures of the steps that count, and their counters [MoE layers, Counter]."""

    figures: Figures
    counters: NDArray[np.int64]
    sources: Mapping[str, str]


def predict(work: Workload, costs: CostModel, trial: Trial) -> Predicted:
    """From the profile alone. Raises as `simulate`."""
    capacity, warm = slot_counts(trial.settings, costs.shape), work.counts if trial.warmed else None
    part = simulate_after(work.trace, work.warm, costs, trial.settings, capacity, warm)
    hits, late, _ = rates(part.counters)
    carried = copied_bytes(part.counters, part.layer_bytes) / max(1, len(part.token_ns))
    figures = Figures(float(part.token_ns.mean()), hits, late, carried, time_ns=part.time_ns)
    return Predicted(figures, part.counters, part.sources)


@dataclass(frozen=True)
class Part:
    """What is simulated of the steps that count."""

    token_ns: NDArray[np.int64]  # [tokens]
    counters: NDArray[np.int64]  # [MoE layers, Counter]
    time_ns: Mapping[str, int]
    sources: Mapping[str, str]
    layer_bytes: tuple[int, ...]


def simulate_after(
    trace: Trace,
    skipped: int,
    costs: CostModel,
    settings: Settings,
    capacity: tuple[int, ...],
    warm: NDArray[np.int64] | None,
) -> Part:
    """All steps of `trace` but its first `skipped` ones: the difference of two simulations. Raises as `simulate`."""
    whole = simulate(trace, costs, costs.shape, settings, capacity, warm=warm)
    counters, tokens, time_ns = whole.counters[DECODE], 0, dict(whole.time_ns)
    if skipped:
        first = trace.take(slice(0, int(trace.step_starts()[skipped])))
        before = simulate(first, costs, costs.shape, settings, capacity, warm=warm)
        counters, tokens = counters - before.counters[DECODE], before.tokens
        time_ns = {kind: ns - before.time_ns.get(kind, 0) for kind, ns in time_ns.items()}
    return Part(whole.token_ns[tokens:], counters, time_ns, whole.sources, whole.layer_bytes)


@dataclass(frozen=True)
class Run:
    """One repeat: time and tokens of each step that counts, and counters [MoE layers, Counter] of all of them."""

    step_ns: list[int]
    emitted: list[int]
    counters: NDArray[np.int64]
    stolen_pct: float = 0.0  # of all cores' time meanwhile: a virtual machine's host ran somebody else

    @property
    def tpot_ns(self) -> float:
        """Time per token."""
        return sum(self.step_ns) / sum(self.emitted)

    def figures(self, expert_bytes: int) -> Figures:
        """As measured."""
        hits, late, moved = rates(self.counters)
        return Figures(self.tpot_ns, hits, late, moved * expert_bytes / sum(self.emitted))

    def counted(self) -> dict[str, int]:
        """Counters over all layers, by name."""
        return by_name(self.counters)


def joined(runs: Sequence[Run]) -> Run:
    """Several repeats as one."""
    counters = np.sum([run.counters for run in runs], axis=0)
    steps, emitted = [ns for run in runs for ns in run.step_ns], [n for run in runs for n in run.emitted]
    return Run(steps, emitted, counters, fmean(run.stolen_pct for run in runs))


def by_name(counters: NDArray[np.int64]) -> dict[str, int]:
    """Counters [MoE layers, Counter] over all layers, by name."""
    return {counter.name.lower(): int(counters[:, counter].sum()) for counter in Counter}


def decide_by(engine: Engine, costs: CostModel) -> None:
    """Have an engine share misses out by what a machine is taken to cost."""
    engine.use_costs(lambda settings: split_costs(costs, engine.shape, settings))


class Bench:
    """Trials on one engine, each from an empty cache; `costs` are what it decides by."""

    def __init__(self, engine: Engine, works: Mapping[int, Workload], costs: CostModel) -> None:
        """works: by drafted tokens (0: none)."""
        self._engine, self._works = engine, works
        if isinstance(engine.forward, FastForward):
            engine.forward.behaviours = BEHAVIOURS
        self._replays = {gamma: Replay(work.trace, engine.shape, engine.device) for gamma, work in works.items()}
        decide_by(engine, costs)

    def work(self, trial: Trial) -> Workload:
        """What a trial replays."""
        return self._works[trial.settings.draft.gamma]

    def run(self, trial: Trial) -> Run:
        """One repeat. Raises SettingsError or BudgetError for settings that the engine refuses."""
        engine, work, recorded = self._engine, self.work(trial), self._replays[trial.settings.draft.gamma]
        engine.warm_by(work.counts if trial.warmed else None)
        with engine.replaying(recorded):
            engine.apply(trial.settings)
            engine.reset_cache()
            with _counted_from(engine, work.warm) as before, stolen() as share:
                done = engine.replay(recorded, recorded.requests()[0], context=work.context)
        steps = done.steps[work.warm :]
        counted = engine.brain.counters[DECODE] - before[0]
        return Run([step.duration_ns for step in steps], [step.emitted for step in steps], counted, share[0])


@contextmanager
def _counted_from(engine: Engine, steps: int) -> Iterator[list[NDArray[np.int64]]]:
    """Give the decode counters as they are after so many steps from here."""
    brain, end_step, found, seen = engine.brain, engine.brain.end_step, list[NDArray[np.int64]](), 0
    if not steps:
        found.append(brain.counters[DECODE].copy())

    def watched() -> None:
        nonlocal seen
        end_step()
        seen += 1
        if seen == steps:
            found.append(brain.counters[DECODE].copy())

    brain.end_step = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        brain.end_step = end_step  # type: ignore[method-assign]


def shown(trial: Trial, predicted: Predicted, runs: list[Run], expert_bytes: int) -> dict[str, Any]:
    """What understanding an error later takes: every repeat, counters of both, predicted time by cause."""
    tokens = max(1, sum(runs[0].emitted)) if runs else 1
    return {
        "parsed": trial.settings.model_dump(mode="json", exclude_defaults=True),
        "warmed": trial.warmed,
        "tokens": tokens,
        "repeats_tpot_ms": [run.tpot_ns / 1e6 for run in runs],
        "stolen_pct": [run.stolen_pct for run in runs],
        "steps_us": [[ns // 1000 for ns in run.step_ns] for run in runs],
        "predicted_counters": by_name(predicted.counters),
        "measured_counters": [run.counted() for run in runs],
        "predicted_time_per_token_ms": {k: ns / tokens / 1e6 for k, ns in predicted.figures.time_ns.items() if ns},
        "sources": dict(predicted.sources),
        "expert_bytes": expert_bytes,
    }
