"""Replay: recorded routing, predictions and windows move the bytes of the recording, whatever the weights are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
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
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.settings import Settings
from foreload.simulator import simulate, split_costs
from foreload.traces.io import read_trace
from foreload.traces.remodel import executing, with_windows
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
    engine.apply(Settings(cache_ratio=0.5))
    with pytest.raises(SettingsError, match=r"0 layers by 'none': the recording holds what gate did at 2 layers"):
        engine.replay(replayed(engine, executing(trace, "gate", (1, 2))), 0)
    other = replace(trace, meta=trace.meta.model_copy(update={"experts": 16}))
    with pytest.raises(MismatchError, match="16 experts"):
        replayed(engine, other)


CHOICES: dict[str, dict[str, Any]] = {
    "nothing_kept": {"cache_ratio": 0.0},
    "half": {"cache_ratio": 0.5},
    "lfu": {"cache_ratio": 0.25, "eviction": "lfu", "pool": "shared"},
    "cpu": {"cache_ratio": 0.25, "miss_action": "cpu"},
    "utility": {"cache_ratio": 0.5, "eviction": "utility", "pool": "shared", "miss_action": "split"},
}
SAME = [Counter.HITS, Counter.LATE, Counter.MISSES, Counter.FETCHED, Counter.ON_CPU]


@pytest.mark.integration
@pytest.mark.parametrize("windows", ["plain", "recorded", "made up"])
def test_counters_are_the_simulators(
    make_engine: MakeEngine, make_profile: Callable[..., HardwareProfile], tmp_path: Path, windows: str
) -> None:
    """Replayed without a prompt, in two parts, the engine counts per layer what the simulator counts."""
    engine = make_engine()
    shape, size = engine.shape, engine.expert_bytes
    trace = recorded(engine, tmp_path / "t.parquet", {"kind": "ngram", "gamma": 2} if windows == "recorded" else None)
    trace = trace.select([0]).take(np.flatnonzero((trace.request == 0) & (trace.phase != 0)))
    if windows == "made up":
        trace = with_windows(trace, "ngram", 2, [0.6], seed=3)
    base = make_profile(shape=asdict(shape), shape_hash=shape.hash, expert_bytes=size)
    copy = Measurement(probe="copy", at={"bytes": size, "pinned": 0}, p50_us=100, p95_us=100, repeats=1)
    profile = HardwareProfile(meta=base.meta, measurements=(*(m for m in base.measurements if m.probe != "copy"), copy))
    engine._costs = lambda wanted: split_costs(profile, shape, wanted)
    draft = {} if windows == "plain" else {"draft": {"kind": "ngram", "gamma": 2}}
    for name, fields in CHOICES.items():
        settings = Settings.parse({**fields, **draft})
        engine.apply(settings)
        engine.reset_cache()
        before = engine.brain.counters.copy()
        parts = [engine.replay(replayed(engine, trace), 0, most, 5, skip) for most, skip in ((2, 0), (None, 2))]
        simulated = simulate(trace, profile, shape, settings, engine.capacity)
        counted = (engine.brain.counters - before)[DECODE][:, SAME]
        assert np.array_equal(counted, simulated.counters[DECODE][:, SAME]), name
        assert counted.sum() > 0
        assert sum(part.decode_tokens for part in parts) == simulated.tokens
        assert sum(len(part.steps) for part in parts) == simulated.steps


@pytest.mark.integration
def test_drafts_of_the_recorded_text_are_made(make_engine: MakeEngine, tmp_path: Path) -> None:
    """Every verify step drafts after the text up to its first token, also when the context is longer than the text."""
    engine = make_engine()
    trace = recorded(engine, tmp_path / "t.parquet", {"kind": "ngram", "gamma": 2})
    replay, seen = replayed(engine, trace), list[tuple[int, ...]]()
    propose = engine.drafts.propose

    def watch(text: list[int], most: int, sampler: Any) -> Any:
        seen.append((len(text), *text[-2:], most))
        return propose(text, most, sampler)

    engine.drafts.propose = watch  # type: ignore[method-assign]
    engine.replay(replay, 0, context=50)
    position, text = 50, replay.prompt(0)
    for step, got in zip(replay.steps(0), seen, strict=True):
        text.append(step.token_ids[0])
        assert got == (position + 1, *text[-2:], max(1, len(step.token_ids) - 1))
        text += step.token_ids[1 : step.emitted]
        position += step.emitted


@pytest.mark.integration
def test_executed_predictions_are_replayed(make_engine: MakeEngine, tmp_path: Path) -> None:
    """What the recording says was executed at speculated layers is demanded there, not what the model predicts now."""
    engine = make_engine()
    trace = executing(recorded(engine, tmp_path / "t.parquet"), "gate", (1, 2))
    engine.apply(SETTINGS.changed(cache_ratio=0.0, speculate_layers="all"))
    demanded: list[list[int]] = []
    begin = engine.brain.begin

    def watch(layer: int, experts: Any, counts: Any) -> Any:
        demanded.append(sorted(experts.tolist()))
        return begin(layer, experts, counts)

    engine.brain.begin = watch  # type: ignore[method-assign]
    engine.replay(replayed(engine, trace), 0, most=4, context=5)
    rows = [step.row for step in replayed(engine, trace).steps(0)[:4]]
    assert demanded == [sorted(trace.experts[row, layer].tolist()) for row in rows for layer in range(3)]


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
