"""The engine as a whole on a tiny model: settings pushed into a running request, requests in order, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CONTEXT, VOCAB, edit_config, vram_for, words

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter, SplitCosts
from foreload.backend.policy.state import DECODE, KEPT
from foreload.backend.sampling import Sampling
from foreload.errors import BudgetError, SettingsError, UsageError
from foreload.settings import Settings, staging_slots

PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9]
TOKENS = 24
MakeEngine = Callable[..., Engine]
CYCLE = [
    Settings(cache_ratio=0.0),
    Settings(cache_ratio=1.0, eviction="lfu"),
    Settings(slots_per_layer=(0, 3, 8), predictor="gate", prefetch_depth=2),
    Settings(cache_ratio=0.25, miss_action="cpu", cpu_threads=2, admission="background"),
    Settings(cache_ratio=0.5, miss_action="split", admission="none"),
    Settings(cache_ratio=0.125, eviction="lfru", predictor="gate", prefetch_depth=1, prefetch_width=4),
]


def text(engine: Engine, **options: Any) -> list[int]:
    return engine.generate(PROMPT, TOKENS, stop=False, **options).token_ids


@pytest.mark.integration
def test_settings_change_between_tokens_and_the_text_does_not(make_engine: MakeEngine) -> None:
    expected = text(make_engine(Settings(cache_ratio=1.0)))
    engine = make_engine(Settings(cache_ratio=0.5))
    seen: list[tuple[bool, bool]] = []

    def push(_: int) -> None:
        chosen = CYCLE[len(seen) % len(CYCLE)]
        engine.apply(chosen)
        seen.append((engine.settings == chosen, len(engine.pool) >= engine.brain.slots))
        assert engine.capacity == tuple(engine.brain.state.capacity.tolist())
        engine.brain.check_integrity()

    assert text(engine, on_token=push) == expected
    assert seen == [(True, True)] * TOKENS


@pytest.mark.integration
@pytest.mark.parametrize("settings", CYCLE, ids=lambda s: s.describe())
def test_same_text_under_every_setting(make_engine: MakeEngine, settings: Settings) -> None:
    engine = make_engine(settings)
    assert text(engine) == text(make_engine(Settings(cache_ratio=1.0)))
    engine.brain.check_integrity()


@pytest.mark.integration
def test_every_layer_but_the_first_is_prefetched(make_engine: MakeEngine) -> None:
    """Also the last one, which is easily left out. With nothing kept only a prefetch makes hits, in time or late."""
    engine = make_engine(Settings(cache_ratio=0.0, predictor="gate", prefetch_depth=1))
    text(engine)
    found = engine.brain.counters[DECODE][:, [Counter.HITS, Counter.LATE]].sum(axis=1)
    assert found[0] == 0
    assert (found[1:] > 0).all()


@pytest.mark.integration
def test_pool_grows_and_shrinks_live(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.0))
    small = engine.pool.allocated_bytes
    assert small == staging_slots(engine.settings, engine.shape) * engine.expert_bytes
    expected = text(engine)
    engine.apply(Settings(cache_ratio=1.0))
    assert engine.pool.allocated_bytes == small + 24 * engine.expert_bytes
    assert text(engine) == expected
    assert int((engine.brain.state.status == KEPT).sum()) > 0
    engine.apply(Settings(cache_ratio=0.0))
    assert engine.pool.allocated_bytes == small
    assert text(engine) == expected


@pytest.mark.integration
def test_residents_survive_a_push(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.5))
    text(engine)
    before = engine.brain.state.status == KEPT
    engine.apply(Settings(cache_ratio=1.0))
    assert ((engine.brain.state.status == KEPT) == before).all()
    for layer, expert in zip(*before.nonzero(), strict=True):
        slot = engine.brain.slot(int(layer), int(expert))
        assert torch.equal(engine.pool.slot(slot), engine.slab.block(int(layer), int(expert)))


@pytest.mark.integration
def test_reset_cache_is_like_loading(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.5))
    first = engine.generate(PROMPT, TOKENS, stop=False)
    warm = engine.generate(PROMPT, TOKENS, stop=False)
    engine.reset_cache()
    assert int((engine.brain.state.status == KEPT).sum()) == 0
    again = engine.generate(PROMPT, TOKENS, stop=False)
    assert (again.counters == first.counters).all()
    assert (warm.counters != first.counters).any()
    assert engine.brain.counters[DECODE].sum() == sum(g.counters[DECODE].sum() for g in (first, warm, again))


@pytest.mark.integration
def test_two_threads_take_turns(make_engine: MakeEngine) -> None:
    engine, prompts = make_engine(Settings(cache_ratio=0.25)), [PROMPT, PROMPT[::-1]]
    expected = [make_engine(Settings(cache_ratio=1.0)).generate(p, TOKENS, stop=False).token_ids for p in prompts]
    running, overlaps, found = [0], [], {}

    def serve(number: int) -> None:
        for turn in range(3):
            count = [0]

            def on_token(_: int, count: list[int] = count) -> None:
                count[0] += 1
                running[0] += count[0] == 1
                overlaps.append(running[0])
                running[0] -= count[0] == TOKENS

            found[number, turn] = engine.generate(prompts[number], TOKENS, on_token=on_token, stop=False).token_ids

    threads = [threading.Thread(target=serve, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(n, turn): expected[n] for n in range(2) for turn in range(3)}
    assert set(overlaps) == {1}


@pytest.mark.integration
def test_sampling_is_reproducible(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.5))
    draws = [text(engine, sampling=Sampling(1.0, 0.9, seed)) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.integration
def test_end_token_stops(make_engine: MakeEngine, spoilt: Path) -> None:
    expected = text(make_engine(Settings(cache_ratio=1.0)))
    (spoilt / "generation_config.json").unlink()
    edit_config(spoilt, eos_token_id=[expected[5], VOCAB - 1])
    engine = make_engine(model=spoilt)
    at = expected.index(expected[5])
    assert engine.generate(PROMPT, TOKENS).token_ids == expected[: at + 1]
    assert engine.generate(PROMPT, TOKENS, stop=False).token_ids == expected


@pytest.mark.integration
def test_generation_counts_itself(make_engine: MakeEngine) -> None:
    engine = make_engine(Settings(cache_ratio=0.5))
    done = engine.generate(engine.tokenizer.encode(words(*PROMPT)), TOKENS, stop=False)
    assert done.prompt_tokens == len(PROMPT)
    assert len(done.steps) == TOKENS - 1
    demanded = done.counters[DECODE][:, [Counter.HITS, Counter.LATE, Counter.MISSES]].sum(axis=1)
    assert (demanded == 2 * (TOKENS - 1)).all()
    assert engine.generate(PROMPT, 1).steps == []
    assert str(engine.generate(PROMPT, 1).tpot_ms) == "nan"


# Errors


@pytest.mark.unit
@pytest.mark.parametrize(
    ("prompt", "tokens", "said"),
    [
        ([], 4, "the prompt is empty"),
        ([1], 0, "max_tokens 0 must be at least 1"),
        ([1, -1], 4, "prompt token ids must be from 0 to 63"),
        ([VOCAB], 4, "prompt token ids must be from 0 to 63"),
        ([1] * CONTEXT, 1, "exceed the context of 96 tokens by 1"),
        ([1], CONTEXT + 4, "1 prompt tokens and 100 new ones exceed the context of 96 tokens by 5"),
    ],
)
def test_impossible_requests(make_engine: MakeEngine, prompt: list[int], tokens: int, said: str) -> None:
    engine = make_engine()
    with pytest.raises(UsageError, match=said):
        engine.generate(prompt, tokens)
    assert len(engine.generate([1] * (CONTEXT - 2), 2, stop=False).token_ids) == 2


@pytest.mark.unit
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "float16"}, "dtype 'float16' is not known: float32 or bfloat16"),
        ({"context_tokens": 0}, "context_tokens 0 must be at least 1"),
        ({"context_tokens": 129}, "context_tokens 129 exceeds the model's 128 positions"),
    ],
)
def test_impossible_options(make_engine: MakeEngine, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_engine(**options)


@pytest.mark.unit
def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"device 'cuda' is not available.*use 'cpu'"):
        EngineOptions(device="cuda")


@pytest.mark.unit
def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(UsageError, match="link_bytes_per_s 0 must be at least 1"):
        EngineOptions(link_bytes_per_s=0)


@pytest.mark.integration
def test_throttle_slows_copies_and_changes_no_text(make_engine: MakeEngine) -> None:
    """Every copy takes at least what the rate says, from the next one on; without a rate nothing is held back."""
    engine = make_engine(Settings(cache_ratio=0.0))
    text = engine.generate(PROMPT, 4, stop=False).token_ids
    engine.throttle(engine.expert_bytes * 2000)
    engine.copies.spans = []
    assert engine.generate(PROMPT, 4, stop=False).token_ids == text
    spans, engine.copies.spans = engine.copies.spans, None
    assert len(spans) > 10
    assert all(span.landed_ns - span.issued_ns >= 500_000 for span in spans)
    assert engine.link_bytes_per_s == engine.expert_bytes * 2000
    engine.throttle(None)
    assert engine.generate(PROMPT, 4, stop=False).token_ids == text
    assert engine.link_bytes_per_s is None


@pytest.mark.integration
def test_split_needs_costs(make_engine: MakeEngine) -> None:
    split = Settings(cache_ratio=0.5, miss_action="split")
    with pytest.raises(SettingsError, match="needs measured costs: give a profile"):
        make_engine(split, costs=None)
    engine = make_engine(Settings(cache_ratio=0.5), costs=None)
    with pytest.raises(SettingsError, match="needs measured costs"):
        engine.apply(split)
    assert engine.settings == Settings(cache_ratio=0.5)
    assert len(text(engine)) == TOKENS


@pytest.mark.integration
def test_costs_are_asked_for_the_settings_pushed(make_engine: MakeEngine) -> None:
    asked: list[Settings] = []

    def costs(settings: Settings) -> SplitCosts:
        asked.append(settings)
        table = torch.arange(3).numpy()
        return SplitCosts(10**9, table, table)

    engine = make_engine(Settings(cache_ratio=0.0), costs=costs)
    split = Settings(cache_ratio=0.0, miss_action="split")
    assert asked == []
    engine.apply(split)
    assert asked == [split]
    counted = engine.generate(PROMPT, 4, stop=False).counters[DECODE]
    assert counted[:, Counter.FETCHED].sum() == 0 < counted[:, Counter.ON_CPU].sum()


# Budgets


@pytest.mark.integration
def test_a_setting_that_does_not_fit_changes_nothing(make_engine: MakeEngine, tiny: Path) -> None:
    shape = Checkpoint.open(str(tiny)).shape
    fits, too_big = Settings(slots_per_layer=(4, 4, 2)), Settings(slots_per_layer=(4, 4, 5))
    engine = make_engine(fits, vram_bytes=vram_for(shape, 10))
    expected, pool = text(engine), len(engine.pool)
    for wrong, short in ((too_big, 3), (fits.changed(predictor="gate", prefetch_depth=2), 4)):
        with pytest.raises(BudgetError, match=rf"\({short * engine.expert_bytes} bytes\) short") as caught:
            engine.apply(wrong)
        assert (caught.value.exit_code, caught.value.shortfall_bytes) == (3, short * engine.expert_bytes)
        assert (engine.settings, engine.capacity, len(engine.pool)) == (fits, (4, 4, 2), pool)
    assert text(engine) == expected


@pytest.mark.integration
def test_default_slots_are_the_largest_that_fit(make_engine: MakeEngine, tiny: Path) -> None:
    shape = Checkpoint.open(str(tiny)).shape
    assert make_engine(Settings(), vram_bytes=vram_for(shape, 11)).capacity == (3, 3, 3)
    assert make_engine(Settings(), vram_bytes=vram_for(shape, 12)).capacity == (4, 4, 4)
    assert make_engine(Settings(), vram_bytes=vram_for(shape, 100)).capacity == (8, 8, 8)


@pytest.mark.integration
def test_memory_too_small_for_staging(make_engine: MakeEngine, tiny: Path) -> None:
    """The shortfall is the smallest that would do."""
    shape, settings = Checkpoint.open(str(tiny)).shape, Settings(cache_ratio=0.0, headroom_bytes=1000)
    with pytest.raises(BudgetError, match=r"cannot hold .* staging slots") as caught:
        make_engine(settings, vram_bytes=50_000)
    assert caught.value.exit_code == 3
    enough = 50_000 + caught.value.shortfall_bytes
    assert enough == vram_for(shape, 0) + 1000
    assert make_engine(settings, vram_bytes=enough).capacity == (0, 0, 0)
    with pytest.raises(BudgetError):
        make_engine(settings, vram_bytes=enough - 1)


@pytest.mark.integration
def test_headroom_counts_when_pushed(make_engine: MakeEngine, tiny: Path) -> None:
    shape = Checkpoint.open(str(tiny)).shape
    engine = make_engine(Settings(), vram_bytes=vram_for(shape, 12))
    engine.apply(Settings(headroom_bytes=3 * engine.expert_bytes))
    assert engine.capacity == (3, 3, 3)
    with pytest.raises(BudgetError, match="short"):
        engine.apply(Settings(cache_ratio=0.5, headroom_bytes=1))
    engine.apply(Settings(cache_ratio=0.5))
    assert engine.capacity == (4, 4, 4)
