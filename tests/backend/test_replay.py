"""Replay: recorded routing, predictions and windows move the bytes of the recording, whatever the weights are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import CONTEXT

from foreload.backend.engine import Engine
from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE
from foreload.backend.recorder import Prompt, record
from foreload.backend.replay import Replay
from foreload.cli import main
from foreload.errors import MismatchError, SettingsError, UsageError
from foreload.settings import Settings
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

MakeEngine = Callable[..., Engine]
SETTINGS = Settings(cache_ratio=0.5, predictor="gate", prefetch_depth=1)


def recorded(engine: Engine, path: Path, draft: dict[str, Any] | None = None) -> Trace:
    settings = SETTINGS.changed(draft=draft) if draft else SETTINGS
    engine.apply(settings)
    record(engine, [Prompt("", "w3 w14 w15 w9"), Prompt("", "w2 w7")], path, max_tokens=12, depth=1, stop=False)
    return read_trace(path)


def replayed(engine: Engine, trace: Trace) -> Replay:
    return Replay(trace, engine.shape, torch.device("cpu"))


@pytest.mark.integration
@pytest.mark.parametrize("draft", [None, {"kind": "ngram", "gamma": 2}])
def test_the_same_model_counts_the_same(make_engine: MakeEngine, tmp_path: Path, draft: Any) -> None:
    """The recording's own model, replayed from its own prompt, demands what it demanded when it was recorded."""
    engine = make_engine()
    trace = recorded(engine, tmp_path / "trace.parquet", draft)
    engine.reset_cache()
    before = engine.brain.counters.copy()
    replay = replayed(engine, trace)
    for request in replay.requests():
        found = engine.replay(replay, request)
        assert found.token_ids == [s for step in replay.steps(request) for s in step.token_ids[: step.emitted]]
    counted = (engine.brain.counters - before)[DECODE].sum(axis=0)
    demanded = counted[[Counter.HITS, Counter.LATE, Counter.MISSES]].sum()
    starts, phases = trace.step_starts(), trace.phase
    distinct = sum(
        len(np.unique(trace.experts[a:b, layer]))
        for a, b in pairwise(starts)
        if phases[a] != 0
        for layer in range(engine.shape.n_moe_layers)
    )
    assert demanded == distinct > 0


@pytest.mark.integration
def test_other_weights_move_the_recorded_experts(make_engine: MakeEngine, tmp_path: Path) -> None:
    """What the weights would route does not matter: with routing rotated, other experts are fetched."""
    engine = make_engine(Settings(cache_ratio=0.0))
    trace = recorded(engine, tmp_path / "trace.parquet")
    turned = replace(trace, experts=(trace.experts + 3) % engine.shape.experts)
    engine.apply(Settings(cache_ratio=0.0))
    seen: list[tuple[int, tuple[int, ...]]] = []
    begin = engine.brain.begin

    def watch(layer: int, experts: Any, counts: Any) -> Any:
        seen.append((layer, tuple(sorted(experts.tolist()))))
        return begin(layer, experts, counts)

    engine.brain.begin = watch  # type: ignore[method-assign]
    engine.replay(replayed(engine, turned), 0, most=3, context=5)
    first = int(np.flatnonzero((trace.request == 0) & (trace.phase != 0))[0])
    expected = [
        (layer, tuple(sorted(turned.experts[first + step, layer].tolist())))
        for step in range(3)
        for layer in range(engine.shape.n_moe_layers)
    ]
    assert seen == expected


@pytest.mark.integration
def test_predictions_are_the_recorded_ones(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    trace = recorded(engine, tmp_path / "trace.parquet")
    engine.apply(SETTINGS.changed(cache_ratio=0.0))
    nothing = {key: np.full_like(block, -1) for key, block in trace.predictions.items()}
    for guesses, some in ((trace.predictions, True), (nothing, False)):
        before = engine.brain.counters[DECODE, :, Counter.PREFETCHED].sum()
        engine.replay(replayed(engine, replace(trace, predictions=guesses)), 0)
        assert (engine.brain.counters[DECODE, :, Counter.PREFETCHED].sum() > before) == some


@pytest.mark.integration
def test_what_is_not_recorded_is_refused(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = make_engine()
    trace = recorded(engine, tmp_path / "trace.parquet")
    replay = replayed(engine, trace)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"draft": {"kind": "ngram", "gamma": 3}}, "draft 'ngram' with gamma 3: the recording holds 'none'"),
        ({"predictor": "gate", "prefetch_depth": 2}, "'gate' at depth 2"),
        (
            {"predictor": "gate", "prefetch_depth": 1, "prefetch_width": 8},
            "8 wide: the recording holds gate at depth 1",
        ),
        ({"predictor": "gate", "prefetch_depth": 1, "speculate_layers": "all"}, "speculate_layers"),
    ]
    for fields, message in cases:
        engine.apply(Settings.parse({"cache_ratio": 0.5, **fields}))
        with pytest.raises(SettingsError, match=message):
            engine.replay(replay, 0)
    engine.apply(SETTINGS)
    with pytest.raises(UsageError, match="do not fit in the context"):
        engine.replay(replay, 0, context=CONTEXT - 2)
    with pytest.raises(UsageError, match="request 9 has no decode steps"):
        engine.replay(replay, 9)
    other = replace(trace, meta=trace.meta.model_copy(update={"experts": 16}))
    with pytest.raises(MismatchError, match="16 experts"):
        replayed(engine, other)


@pytest.mark.integration
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recording takes the place of a prompt; what it does not hold is refused."""
    path = tmp_path / "trace.parquet"
    assert (
        main(["record", "mini", "--out", str(path), "--requests", "1", "--tokens", "6", "--depth", "0", "--json"]) == 0
    )
    capsys.readouterr()
    assert main(["run", "mini", "--replay", str(path), "--tokens", "4", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["decode_steps"] == 4
    assert values["prompt_tokens"] > 0
    assert main(["run", "mini", "--replay", str(path), "--draft", "ngram"]) == 2
    assert "draft 'ngram' with gamma 4: the recording holds 'none'" in capsys.readouterr().err
    assert main(["run", "mini", "--replay", str(path), "--prompt", "x"]) == 2
