"""A stretch of a recording as settings of any kind replay it: plain, in windows, or with predictions executed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreload.errors import ForeloadError, UsageError
from foreload.settings import GATE_SIDE, Draft, Settings
from foreload.shape import ModelShape
from foreload.traces.histogram import uses
from foreload.traces.io import read_trace
from foreload.traces.remodel import better_of, executing, of_shape, renamed, with_windows, without_windows
from foreload.traces.schema import PREFILL, Trace

ACCEPTED = 0.7
"""Chance, assumed, that a draft of a made-up window is kept if those before it were."""


@dataclass(frozen=True)
class Engines:
    """What an engine can do beyond its settings: predictors that need a calibration, and the draft model it holds."""

    calibrated: bool
    draft: str | None


@dataclass(frozen=True)
class Way:
    """How a recording is replayed: in windows of `gamma` drafts (0: plain), and whose predictions, and as what.

    `predictor`: the recorded predictor; `named`: the one that the engine runs in its place; `executed`: by all layers
    but the first.
    """

    gamma: int = 0
    predictor: str = ""
    named: str = ""
    executed: bool = False


@dataclass(frozen=True)
class Case:
    """Settings as they can be run, and what they replay: `warm` steps that are not timed, then `steps` that are."""

    settings: Settings
    way: Way
    warm: int
    steps: int
    assumed: tuple[str, ...]


class Workload:
    """The first request of a recording: a stretch of `warm` + `tokens` tokens that is replayed, and the rest.

    The rest says which experts caches start with and, where predictors are mixed, which recalls more. Verify windows
    are those of `recorded` (gamma -> recording of the same text), or made up.
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        shape: ModelShape,
        warm: int,
        tokens: int,
        recorded: Mapping[int, Trace] | None = None,
    ) -> None:
        self.name, self.shape, self.warm, self.tokens = name, shape, warm, tokens
        self.recorded = {g: decode_rows(of_shape(one, shape)) for g, one in (recorded or {}).items()}
        whole = without_windows(decode_rows(of_shape(trace, shape)))
        if whole.rows < warm + tokens + 1:
            raise UsageError(f"trace: {name} has {whole.rows} decode tokens, {warm + tokens + 1} are needed")
        self.source = f"{trace.meta.model}: {trace.meta.source}"
        self._whole, self._stretch = whole, slice(0, min(whole.rows, warm + tokens + 32))
        self._made: dict[Way, Trace] = {}

    @property
    def start(self) -> NDArray[np.int64]:
        """Uses of each expert [MoE layers, experts] after the stretch, by which caches start; 1 token each without."""
        return uses(self._whole.experts[self._stretch.stop :], self.shape.experts)

    def rest(self, tokens: int) -> Trace:
        """The first `tokens` tokens after the stretch, with the gate's predictions alone: what a tuner may see."""
        return renamed(self._whole.take(slice(self._stretch.stop, self._stretch.stop + tokens)), {"gate": "gate"})

    def whole(self, context: int) -> Trace:
        """All decode tokens of the recording, one by one, beginning at position `context`."""
        first = self._whole.position[0]
        return replace(self._whole, position=self._whole.position - first + np.int32(context))

    def case(self, settings: Settings, engine: Engines) -> Case:
        """`settings` as this engine can replay them here, and what was changed or assumed for that."""
        settings, way, assumed = self._way(settings, engine)
        trace = self.trace(way)
        emitted = np.add.reduceat(trace.accepted, trace.step_starts()[:-1])
        ends = np.cumsum(emitted)
        warm, steps = (int(np.searchsorted(ends, n)) + 1 if n else 0 for n in (self.warm, self.warm + self.tokens))
        return Case(settings, way, warm, min(steps, len(ends)) - warm, tuple(assumed))

    def _way(self, settings: Settings, engine: Engines) -> tuple[Settings, Way, list[str]]:
        gamma, predictor, assumed = settings.draft.gamma, "", list[str]()
        if gamma:
            if settings.draft.kind == "model" and settings.draft.model_name != engine.draft:
                settings = settings.changed(draft={"kind": "ngram", "gamma": gamma})
                assumed.append("drafts take the time of a look-up, not of a draft model")
            made = f"verify windows are made up, drafts kept with chance {ACCEPTED}"
            assumed.append("verify windows as recorded with a draft model" if gamma in self.recorded else made)
        named = settings.predictor if settings.predictor in GATE_SIDE else ""
        executed = bool(settings.speculate_layers)
        if named:
            predictor = named if self._holds(named) else "gate"
            if predictor != named:
                assumed.append(f"the recording holds no predictions of {named}: those of {predictor}")
            if settings.uses_calibration and not engine.calibrated:
                assumed.append(f"predictions of {predictor} take the time of the gate's: the model has no calibration")
                named, settings = "gate", settings.changed(predictor="gate", prefetch_rolled=False)
            if executed:
                assumed.append("predictions are executed, later routing is taken not to drift")
        return settings, Way(gamma, predictor, named, executed), assumed

    def _holds(self, predictor: str) -> bool:
        held = {name for name, _ in self._whole.predictions}
        return predictor in held or (predictor == "hybrid" and {"quasi_hidden", "estimator"} <= held)

    def trace(self, way: Way) -> Trace:
        """The stretch, made over."""
        if way not in self._made:
            self._made[way] = self._make(way)
        return self._made[way]

    def _make(self, way: Way) -> Trace:
        whole = self._whole
        if way.predictor == "hybrid" and ("hybrid", 1) not in whole.predictions:
            members = [name for name in ("gate", "quasi_hidden", "estimator") if (name, 1) in whole.predictions]
            whole = better_of(whole, members, "hybrid", slice(self._stretch.stop, None))
        if way.gamma in self.recorded:
            found = self.recorded[way.gamma]
            found = found.take(slice(0, int(found.step_starts()[: self.warm + self.tokens + 1][-1])))
        else:
            found = whole.take(self._stretch)
        if way.predictor:
            found = renamed(found, {way.predictor: way.named})
        if way.executed:
            found = executing(found, way.named, range(1, self.shape.n_moe_layers))
        if way.gamma and way.gamma not in self.recorded:
            found = with_windows(found, "ngram", way.gamma, (ACCEPTED,))
        return found

    def drafted(self, way: Way, settings: Settings) -> Trace:
        """The stretch, its windows as if of the draft of `settings`."""
        return drafted_by(self.trace(way), settings.draft) if way.gamma else self.trace(way)


def drafted_by(trace: Trace, draft: Draft) -> Trace:
    """A recording's windows as if of that draft."""
    fields = {"draft": draft.kind, "gamma": draft.gamma}
    model = {"draft_model": draft.model_name} if draft.kind == "model" else {}
    return replace(trace, meta=trace.meta.model_copy(update={"sampling": {**trace.meta.sampling, **fields, **model}}))


def decode_rows(trace: Trace) -> Trace:
    """The decode rows of the first request."""
    mine = (trace.request == trace.requests()[0]) & (trace.phase != PREFILL)
    return trace.take(np.flatnonzero(mine))


def recorded_windows(folder: Path, kind: str, shape: ModelShape) -> dict[int, Trace]:
    """Recordings of `folder` with verify windows of drafts of that kind and of this many layers and experts, by gamma.

    All of them of one text: the first by name whose other gammas are there too; empty if there are none.
    """
    found: dict[str, dict[int, Trace]] = {}
    for path in sorted(folder.glob(f"*-{kind}-*.parquet")):
        text, _, gamma = path.stem.rpartition("-")
        try:
            found.setdefault(text, {})[int(gamma)] = of_shape(read_trace(path), shape)
        except (ForeloadError, ValueError):
            continue
    return max(found.values(), key=len, default={})
