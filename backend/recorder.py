"""Recording: run prompts through the engine and write the routing of every token (design: section 7b)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foreload.assets import ASSETS
from foreload.backend.engine import Engine
from foreload.backend.generation import Generation
from foreload.backend.observe import Routed
from foreload.backend.predict import PREDICTORS, Predictor
from foreload.backend.sampling import Sampling
from foreload.errors import FileError, UsageError
from foreload.files import read_bytes
from foreload.machine import machine_name, software
from foreload.settings import Settings
from foreload.traces.io import TraceWriter
from foreload.traces.schema import PREFILL, PredictionColumn, TraceMeta


@dataclass(frozen=True)
class Prompt:
    """One request to record."""

    subject: str
    text: str


def read_prompts(path: Path | None = None) -> list[Prompt]:
    """Prompts of a file: JSON lines with `text` and optionally `subject`, else one prompt per non-empty line.

    Without a path, the bundled prompts. FileError names the line that is wrong.
    """
    path = path or ASSETS / "prompts.jsonl"
    try:
        lines = read_bytes(path, "prompts").decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: prompts are not UTF-8 text: {error}") from error
    prompts = [parse_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise FileError(f"{path}: holds no prompt: one per line, or JSON lines with a field 'text', are accepted")
    return prompts


def parse_prompt(path: Path, number: int, line: str) -> Prompt:
    """One line of a file of prompts; FileError names it if it is wrong."""
    if path.suffix != ".jsonl":
        return Prompt("", line)
    try:
        row = json.loads(line)
        text, subject = row["text"], row.get("subject", row.get("kind", ""))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path}: line {number} is no JSON object with a field 'text'") from error
    if not isinstance(text, str) or not isinstance(subject, str) or not text:
        raise FileError(f"{path}: line {number}: fields 'text' (not empty) and 'subject' must be strings")
    return Prompt(subject, text)


USUAL_DEPTH = 2
Watched = Sequence[tuple[Predictor, tuple[int, ...]]]
"""Predictors to record, and the depths of each."""


class Recorder:
    """An `Observer` that writes what it sees, and what `predictors` say at the depths that go with each."""

    def __init__(self, writer: TraceWriter, predictors: Watched, width: int) -> None:
        self.predictors, self.width = predictors, width
        self.request = 0
        self._writer = writer
        self._step = 0

    def routed(self, routed: Routed) -> None:
        """Write the rows of one forward."""
        positions = range(routed.position, routed.position + len(routed.token_ids))
        self._writer.append(
            self.request,
            self._step,
            routed.phase,
            list(positions),
            routed.token_ids,
            routed.experts,
            accepted=np.arange(len(routed.token_ids)) < routed.kept,
            weights=routed.weights if self._writer.meta.has_weights else None,
            predictions={} if routed.phase == PREFILL else routed.predicted,
        )
        self._step += 1


def trace_meta(
    engine: Engine, subjects: Sequence[str], sampling: Sampling, columns: Sequence[PredictionColumn], weights: bool
) -> TraceMeta:
    """Provenance of a recording made by `engine` under its present settings."""
    shape, checkpoint, settings = engine.shape, engine.checkpoint, engine.settings
    speculated = settings.speculated(shape)
    return TraceMeta.of(
        shape,
        model=checkpoint.name,
        weights_hash=checkpoint.weights_hash,
        tokenizer_hash=checkpoint.tokenizer_hash,
        source="foreload engine",
        sampling={**asdict(sampling), **drafting(engine.settings)},
        machine=machine_name(),
        software=software(),
        seed=sampling.seed,
        subjects=tuple(subjects),
        has_weights=weights,
        predictions=tuple(columns),
        speculated=speculated,
        speculated_by=settings.predictor if speculated else "",
    )


def drafting(settings: Settings) -> dict[str, Any]:
    """What a recording says about drafts beside the sampling; nothing without them."""
    draft = settings.draft
    if draft.kind == "none":
        return {}
    named = {"draft_model": draft.model_name} if draft.kind == "model" else {}
    return {"draft": draft.kind, "gamma": draft.gamma, **named}


def watched(engine: Engine, names: Sequence[str] | None, depth: int, rolled: bool = False) -> Watched:
    """The predictors `names` up to `depth` layers ahead; by default the gate, and with a calibration all.

    With `rolled` also their rolled form, which differs from the second layer ahead on. UsageError for an unknown name.
    """
    depth = min(depth, engine.shape.n_moe_layers - 1)
    if depth == 0:
        return []
    chosen = tuple(names or (PREDICTORS if engine.calibrated else ("gate",)))
    for name in chosen:
        if name not in PREDICTORS:
            raise UsageError(f"predictor {name!r} cannot be recorded: {', '.join(PREDICTORS)} can")
    found = [(engine.predictor(name), tuple(range(1, depth + 1))) for name in chosen]
    if rolled and depth > 1:
        found += [(engine.predictor(name, rolled=True), tuple(range(2, depth + 1))) for name in chosen]
    return found


def columns(chosen: Watched, width: int) -> list[PredictionColumn]:
    """The columns of a recording of `chosen`."""
    return [PredictionColumn(predictor=p.key, depth=depth, width=width) for p, depths in chosen for depth in depths]


def record(
    engine: Engine,
    prompts: Sequence[Prompt],
    out: Path,
    *,
    prompt_tokens: int = 128,
    max_tokens: int = 64,
    sampling: Sampling | None = None,
    depth: int = USUAL_DEPTH,
    width: int | None = None,
    predictors: Sequence[str] | None = None,
    rolled: bool = False,
    weights: bool = False,
    stop: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Generate up to `max_tokens` after the first `prompt_tokens` of each prompt and write the routing to `out`.

    Predictions are recorded to `depth` (0: none) and `width` (default 2 top-k): those of `predictors`, by default the
    gate's, and the others' where there is a calibration; with `rolled` also their rolled form. FileError, with nothing
    under the final name, if the file cannot be written.
    """
    sampling = sampling or Sampling()
    width = min(width or 2 * engine.shape.top_k, engine.shape.experts)
    chosen = watched(engine, predictors, depth, rolled)
    subjects = [prompt.subject for prompt in prompts]
    meta = trace_meta(engine, subjects, sampling, columns(chosen, width), weights)
    generations = []
    with TraceWriter(out, meta) as writer:
        recorder = Recorder(writer, chosen, width)
        for index, prompt in enumerate(prompts):
            recorder.request = index
            ids = engine.tokenizer.encode(prompt.text)[:prompt_tokens]
            generations.append(engine.generate(ids, max_tokens, sampling, recorder, stop=stop))
            if progress is not None:
                progress(index + 1, len(prompts))
    return generations
