"""The fast path on a played device: the same text as the plain path, the same bits whatever is resident."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_device import FakeDevice
from played import accelerate
from test_random_weights import BY_NAME, SMALL
from tiny_models import CONTEXT

from foreload.backend.cuda import forward
from foreload.backend.cuda.kernels.layout import BlockLayout
from foreload.backend.cuda.kernels.torch_ops import TorchOps
from foreload.backend.cuda.pieces import Pieces
from foreload.backend.cuda.plan import merge_told, sort_demand
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.observe import Marks
from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE
from foreload.backend.recorder import Prompt, record
from foreload.backend.replay import Replay
from foreload.errors import InternalError
from foreload.settings import Settings
from foreload.traces.io import read_trace
from foreload.traces.remodel import executing, with_windows

PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9, 32, 38, 46]
TOKENS = 8
MakeEngine = Callable[..., Engine]


@pytest.fixture
def fast(make_engine: MakeEngine) -> Iterator[MakeEngine]:
    """Engines on the played device; keywords as for `make_engine`, `seed`, and whether freed slots are poisoned."""
    devices: list[tuple[Engine, FakeDevice]] = []

    def make(settings: Settings, seed: int = 0, poison: bool = False, **options: Any) -> Engine:
        engine = make_engine(settings, **options)
        devices.append((engine, accelerate(engine, seed, poison)))
        return engine

    yield make
    for engine, device in devices:
        engine.copies.close()
        engine.copies = _Closed()  # type: ignore[assignment]
        device.close()


class _Closed:
    def close(self) -> None: ...


def decoded(engine: Engine) -> tuple[list[int], list[torch.Tensor]]:
    """Two requests' tokens, and the logits of every decode step."""
    seen: list[torch.Tensor] = []
    original = engine.forward.decode

    def run(*arguments: Any) -> torch.Tensor:
        seen.append(original(*arguments).clone())
        return seen[-1]

    engine.forward.decode = run  # type: ignore[method-assign]
    tokens = [engine.generate(PROMPT[n:], TOKENS, stop=False).token_ids for n in range(2)]
    engine.forward.decode = original  # type: ignore[method-assign]
    return tokens[0] + tokens[1], seen


FETCH_ONLY: dict[str, dict[str, Any]] = {
    "nothing_kept": {"cache_ratio": 0.0},
    "half_lfu": {"cache_ratio": 0.5, "eviction": "lfu"},
    "uneven": {"slots_per_layer": (0, 8, 3), "eviction": "lfru"},
    "depth_1": {"cache_ratio": 0.25, "predictor": "gate", "prefetch_depth": 1, "prefetch_width": 3},
    "depth_2": {"cache_ratio": 0.25, "predictor": "gate", "prefetch_depth": 2, "admission": "background"},
    "formats": {
        "cache_ratio": 0.25,
        "expert_format": ("fp8", "bf12", "int8"),
        "predictor": "gate",
        "prefetch_depth": 1,
    },
    "drafts": {"cache_ratio": 0.25, "draft": {"kind": "ngram", "gamma": 2}, "predictor": "gate", "prefetch_depth": 1},
}


@pytest.mark.integration
@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("name", FETCH_ONLY)
def test_bits_do_not_depend_on_what_is_resident(
    make_engine: MakeEngine, fast: MakeEngine, name: str, poison: bool
) -> None:
    settings = Settings.parse(FETCH_ONLY[name])
    whole = Settings(cache_ratio=1.0, draft=settings.draft, expert_format=settings.expert_format)
    plain_tokens, plain = decoded(make_engine(whole))
    resident_tokens, resident = decoded(fast(whole, seed=1))
    engine = fast(settings, seed=len(name), poison=poison)
    tokens, logits = decoded(engine)
    assert tokens == resident_tokens == plain_tokens
    assert len(logits) == len(resident) == len(plain)
    for one, other, slow in zip(logits, resident, plain, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, slow, rtol=1e-4, atol=1e-4)
    engine.brain.check_integrity()
    counted = engine.brain.counters.sum(axis=1)
    assert counted[DECODE, [Counter.FETCHED, Counter.PREFETCHED]].sum() > 0
    if settings.prefetch_depth:
        assert counted[DECODE, Counter.PREFETCHED] > 0


@pytest.mark.integration
@pytest.mark.parametrize("layers", ["all", (2,)])
def test_speculated_layers(make_engine: MakeEngine, fast: MakeEngine, layers: Any) -> None:
    """They execute what was predicted, in one launch per layer as in one per step."""
    fields = {"predictor": "gate", "prefetch_depth": 1, "speculate_layers": layers}
    tokens, logits = decoded(make_engine(Settings.parse({"cache_ratio": 0.5, **fields})))
    exact, _ = decoded(make_engine(Settings(cache_ratio=0.5)))
    for ratio in (0.25, 1.0):
        found, quick = decoded(fast(Settings.parse({"cache_ratio": ratio, **fields}), seed=6))
        assert found == tokens != exact
        for one, other in zip(quick, logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.integration
@pytest.mark.parametrize("action", ["cpu", "split"])
def test_experts_that_the_cpu_reads_ahead(make_engine: MakeEngine, fast: MakeEngine, action: Any) -> None:
    """They change no token, on neither path; workers are told of experts that the next layer then asks for."""
    fields = {"cache_ratio": 0.25, "miss_action": action, "predictor": "gate", "prefetch_depth": 1}
    settings = Settings.parse({**fields, "prefetch_width": 4, "cpu_read_ahead": True})
    tokens, _ = decoded(make_engine(settings.changed(cpu_read_ahead=False)))
    plain, engine = make_engine(settings), fast(settings, seed=5)
    told: list[int] = []
    read_ahead = plain.cpu.read_ahead
    plain.cpu.read_ahead = lambda layer, expert: (told.append(expert), read_ahead(layer, expert))  # type: ignore[method-assign]
    assert decoded(plain)[0] == tokens
    assert any(expert >= 0 for expert in told)
    assert decoded(engine)[0] == tokens
    assert engine.brain.counters[DECODE, :, Counter.ON_CPU].sum() > 0


@pytest.mark.integration
@pytest.mark.parametrize("action", ["cpu", "split"])
def test_experts_on_the_cpu(make_engine: MakeEngine, fast: MakeEngine, action: Any) -> None:
    settings = Settings(cache_ratio=0.25, miss_action=action, admission="background")
    tokens, logits = decoded(make_engine(settings))
    engine = fast(settings, seed=5)
    found, close = decoded(engine)
    assert found == tokens
    for one, other in zip(close, logits, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert engine.brain.counters[DECODE, :, Counter.ON_CPU].sum() > 0


@pytest.mark.integration
def test_prompts_find_their_kernels_ready(fast: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layout has run before the first prompt, which then runs its residents together."""
    ran: list[tuple[str, int]] = []
    original = TorchOps.chunk_experts

    def spy(ops: TorchOps, layout: BlockLayout, k: int, x: torch.Tensor, plan: torch.Tensor, *rest: Any) -> None:
        ran.append((layout.format, len(plan)))
        original(ops, layout, k, x, plan, *rest)

    monkeypatch.setattr(TorchOps, "chunk_experts", spy)
    engine = fast(Settings(cache_ratio=1.0, expert_format=("fp8", "bf16", "fp8")))
    assert sorted(ran) == [("bfloat16", 1), ("fp8", 1)]
    engine.generate(PROMPT, 1, stop=False)
    ran.clear()
    engine.generate(PROMPT, 1, stop=False)
    assert [format_ for format_, _ in ran] == ["fp8", "bfloat16", "fp8"]
    assert all(tiles > 1 for _, tiles in ran)


@pytest.mark.integration
def test_counts_are_those_of_the_plain_path(make_engine: MakeEngine, fast: MakeEngine) -> None:
    """Without prefetches the brain is told the same, whether a step is one launch or one per layer."""
    for ratio in (1.0, 0.5):
        plain, quick = make_engine(Settings(cache_ratio=ratio)), fast(Settings(cache_ratio=ratio))
        for engine in (plain, quick):
            engine.generate(PROMPT, TOKENS, stop=False)
        assert (plain.brain.counters == quick.brain.counters).all()


@pytest.mark.integration
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_replay(make_engine: MakeEngine, fast: MakeEngine, tmp_path: Path, ratio: float) -> None:
    """Recorded routing goes in place of the gates' on both paths: counts agree, with predictions and without."""
    settings = Settings(cache_ratio=ratio)
    plain, quick = make_engine(settings), fast(settings)
    record(plain, [Prompt("", "w3 w14 w15 w9")], tmp_path / "t.parquet", max_tokens=8, depth=1, stop=False)
    trace = read_trace(tmp_path / "t.parquet")
    turned = replace(trace, experts=(trace.experts + 3) % plain.shape.experts)
    found = []
    for engine in (plain, quick):
        engine.reset_cache()
        replay = Replay(turned, engine.shape, engine.device)
        before = engine.brain.counters.copy()
        engine.replay(replay, 0, context=5)
        counted = engine.brain.counters - before
        found.append(counted[DECODE][:, [Counter.HITS, Counter.LATE, Counter.MISSES, Counter.FETCHED]])
    assert (found[0] == found[1]).all()
    assert found[0].sum() > 0
    quick.apply(settings.changed(predictor="gate", prefetch_depth=1))
    quick.replay(Replay(turned, quick.shape, quick.device), 0, context=5)
    assert quick.brain.counters[DECODE, :, Counter.PREFETCHED].sum() > 0


@pytest.mark.integration
def test_replay_of_windows_and_of_executed_predictions(
    make_engine: MakeEngine, fast: MakeEngine, tmp_path: Path
) -> None:
    """Both paths demand the same of verify windows, and of layers that execute what was recorded as predicted."""
    base = Settings(cache_ratio=0.0)
    plain, quick = make_engine(base), fast(base)
    record(plain, [Prompt("", "w3 w14 w15 w9")], tmp_path / "t.parquet", max_tokens=12, depth=1, stop=False)
    trace = read_trace(tmp_path / "t.parquet")
    turned = replace(trace, predictions={key: (block + 3) % 8 for key, block in trace.predictions.items()})
    cases = (
        (with_windows(trace, "ngram", 2, [0.7]), base.changed(draft={"kind": "ngram", "gamma": 2})),
        (executing(turned, "gate", (1, 2)), base.changed(predictor="gate", prefetch_depth=1, speculate_layers="all")),
    )
    for recording, settings in cases:
        found = []
        for engine in (plain, quick):
            with engine.replaying(Replay(recording, engine.shape, engine.device)):
                engine.apply(settings)
            before = engine.brain.counters.copy()
            engine.replay(Replay(recording, engine.shape, engine.device), 0, context=5)
            counted = (engine.brain.counters - before)[DECODE]
            found.append(counted[:, [Counter.HITS, Counter.LATE, Counter.MISSES]].sum(axis=1))
        assert (found[0] == found[1]).all()
        assert found[0].all()


@pytest.mark.integration
def test_throttled_link(fast: MakeEngine) -> None:
    """Copies take at least what the rate says, from issue to arrival; the text stays."""
    engine = fast(Settings(cache_ratio=0.0))
    tokens, logits = decoded(engine)
    engine.forward.throttle(engine.expert_bytes * 2000)
    engine.copies.spans = []
    found, slowed = decoded(engine)
    spans = engine.copies.spans
    engine.copies.spans = None
    assert found == tokens
    assert all(torch.equal(one, other) for one, other in zip(slowed, logits, strict=True))
    assert len(spans) > 10
    assert all(span.landed_ns - span.issued_ns >= 500_000 for span in spans)
    engine.forward.throttle(None)
    assert decoded(engine)[0] == tokens


class Stopwatch:
    """In place of `torch.cuda.Event`: when everything queued before it has run."""

    device: FakeDevice

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None:
        self.device.cudaStreamSynchronize(0)
        assert self.device.idle

    def elapsed_time(self, other: Stopwatch) -> float:
        assert other is not self
        return 1.0


@pytest.mark.integration
def test_graphs_are_timed_with_a_plan_of_as_many_rows(fast: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last plan was for one row: as a plan for three it would read experts wherever its words point."""
    settings = Settings.parse({"cache_ratio": 0.5, "draft": {"kind": "ngram", "gamma": 2}})
    engine = fast(settings, seed=5)
    monkeypatch.setattr(Stopwatch, "device", engine.forward.device, raising=False)  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "Event", Stopwatch)
    engine.generate(PROMPT, TOKENS, stop=False)
    for rows, others in ((3, 1), (1, 3)):
        engine.forward.decode([1] * rows, len(PROMPT))
        timed = engine.forward.step_times(rows, 2)  # type: ignore[attr-defined]
        assert {name: ms / 1e3 for name, ms in timed.items()} == {"enter": 1, "planned": 1, "whole": 1}
        assert set(engine.forward.step_times(others, 2)) == {"enter", "whole"}  # type: ignore[attr-defined]


@pytest.mark.integration
def test_settings_change_while_decoding(fast: MakeEngine) -> None:
    choices = [Settings.parse(fields) for name, fields in FETCH_ONLY.items() if name not in ("drafts", "formats")]
    still, moving = fast(Settings(cache_ratio=1.0), seed=2), fast(choices[0], seed=3)
    changed: list[int] = []

    def push(_: int) -> None:
        changed.append(len(changed))
        moving.apply(choices[len(changed) % len(choices)])

    expected = still.generate(PROMPT, 2 * TOKENS, stop=False).token_ids
    assert moving.generate(PROMPT, 2 * TOKENS, on_token=push, stop=False).token_ids == expected
    moving.brain.check_integrity()


@pytest.mark.integration
def test_a_copy_that_never_happens_shows(fast: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed slots hold NaN, so that the comparisons above can fail."""
    engine = fast(Settings(cache_ratio=0.0), poison=True)
    engine.generate(PROMPT, 3, stop=False)
    monkeypatch.setattr("ctypes.memmove", lambda *_: None)
    _, logits = decoded(engine)
    assert torch.isnan(logits[0]).all()


@pytest.mark.integration
@pytest.mark.parametrize("family", ["gpt-oss-20b", "deepseek-v2-lite", "olmoe-1b-7b", "glm-4.7-flash", "mixtral-8x7b"])
def test_families(family: str) -> None:
    """Windows, sinks, biases, latent attention, shared experts, dense layers, groups: all by the same pieces."""
    window = {"sliding_window": 6} if family.startswith("gpt") else {}
    model = Checkpoint.random(family, **SMALL, **BY_NAME.get(family, {}), **window)
    options = EngineOptions(context_tokens=CONTEXT)
    settings = Settings(cache_ratio=0.5)
    with Engine(model, options, settings) as plain:
        expected, slow = decoded(plain)
    engine = Engine(model, options, settings)
    device = accelerate(engine, 4)
    found, quick = decoded(engine)
    engine.close()
    device.close()
    assert found == expected
    for one, other in zip(quick, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.integration
def test_gates_with_a_correction_predict_with_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[int] = []
    original = TorchOps.top_k

    def spy(ops: TorchOps, *given: Any) -> None:
        assert given[6] is not None
        ranked.append(given[6].data_ptr())
        original(ops, *given)

    monkeypatch.setattr(TorchOps, "top_k", spy)
    model = Checkpoint.random("glm-4.7-flash", **SMALL, **BY_NAME["glm-4.7-flash"])
    options, settings = EngineOptions(context_tokens=CONTEXT), Settings(cache_ratio=0.25)
    with Engine(model, options, settings) as plain:
        expected, _ = decoded(plain)
    engine = Engine(model, options, settings.changed(predictor="gate", prefetch_depth=1))
    device = accelerate(engine, 7)
    ranked.clear()
    found, _ = decoded(engine)
    places = [layer.correction.data_ptr() for layer in engine.forward.decoder.layers if layer.correction is not None]
    prefetched = engine.brain.counters[DECODE, :, Counter.PREFETCHED].sum()
    engine.close()
    device.close()
    assert found == expected
    assert prefetched > 0
    assert len(places) == 2
    assert ranked[:3] == [places[0], places[1], places[1]]  # a layer, the next as predicted, and as it is


@pytest.mark.unit
def test_only_experts_that_are_there_are_taken() -> None:
    """Whatever reads memory behind the last one would not be seen to."""
    experts, counts, places = np.zeros(2, np.int32), np.zeros(2, np.int32), np.zeros(2, np.int64)
    scratch = np.zeros((2, 8), np.int32)
    for word, found in ((7, 2), (8, -1)):
        told = np.array([1, word], np.int32) | 5 << 16
        assert sort_demand(told, experts, counts, places, scratch[0]) == found
        for rows in (1, 2):
            assert merge_told(told, rows, np.zeros(8, np.int32), scratch) == found
    assert merge_told(np.array([1, 0xFFFF], np.int32), 1, np.zeros(8, np.int32), scratch) == 1


@pytest.mark.integration
def test_a_device_that_tells_of_other_experts_ends_the_step(fast: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fast(Settings(cache_ratio=0.5))
    publish = TorchOps.publish
    monkeypatch.setattr(TorchOps, "publish", lambda self, now, ids, *rest: publish(self, now, ids + 999, *rest))
    with pytest.raises(InternalError, match="told of experts that MoE layer 0"):
        engine.generate(PROMPT, 2, stop=False)


@pytest.mark.integration
def test_the_cpu_begins_before_predictions_are_there(fast: MakeEngine) -> None:
    fields = {"miss_action": "cpu", "cpu_threads": 1, "predictor": "gate", "prefetch_depth": 1, "admission": "none"}
    engine = fast(Settings.parse({"cache_ratio": 0.0, **fields}))
    engine.forward.marks = marks = Marks()
    engine.generate(PROMPT, 2, stop=False)
    spans = {(kind, layer): (since, until) for kind, layer, _, since, until in marks.spans if kind != "plan"}
    layers = engine.shape.n_moe_layers
    assert {layer for kind, layer in spans if kind == "predict"} == set(range(layers - 1))
    for layer in range(layers - 1):
        assert spans["route", layer][1] <= spans["submit", layer][0] < spans["submit", layer][1]
        assert spans["submit", layer][1] == spans["predict", layer][0] < spans["issue", layer][0]


@pytest.mark.integration
def test_a_device_that_never_tells_its_predictions(fast: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fast(Settings.parse({"cache_ratio": 0.25, "predictor": "gate", "prefetch_depth": 1}))
    monkeypatch.setattr(forward, "PATIENCE_NS", 1_000_000)
    monkeypatch.setattr(Pieces, "_predict", lambda self, at: None)
    with pytest.raises(InternalError, match="told the routing of MoE layer 0, but not its predictions"):
        engine.generate(PROMPT, 2, stop=False)
