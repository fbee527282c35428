"""With freed slots poisoned and copies delayed at random, every fetch-only setting gives the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE, N_FREE, PREFILL
from foreload.backend.recorder import read_prompts
from foreload.settings import Settings

PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9, 32, 38, 46]
TOKENS = 10
GATE1: dict[str, Any] = {"predictor": "gate", "prefetch_depth": 1}
GATE2: dict[str, Any] = {"predictor": "gate", "prefetch_depth": 2}
FETCH_ONLY: dict[str, dict[str, Any]] = {
    "nothing_kept": {"cache_ratio": 0.0},
    "one_slot": {"cache_ratio": 0.125},
    "half_lfu": {"cache_ratio": 0.5, "eviction": "lfu"},
    "fixed": {"cache_ratio": 0.5, "admission": "none"},
    "uneven": {"slots_per_layer": (0, 8, 3), "eviction": "lfru"},
    "depth_1": {"cache_ratio": 0.0, **GATE1},
    "depth_1_wide": {"cache_ratio": 0.25, **GATE1, "prefetch_width": 5},
    "depth_2": {"cache_ratio": 0.25, **GATE2},
    "depth_2_narrow_background": {"cache_ratio": 0.5, **GATE2, "prefetch_width": 1, "admission": "background"},
}
MakeEngine = Callable[..., Engine]


def watch(engine: Engine) -> list[torch.Tensor]:
    """The logits of every forward from now on."""
    seen: list[torch.Tensor] = []
    for name in ("prefill", "decode"):
        original = getattr(engine.forward, name)

        def run(*arguments: Any, original: Callable[..., torch.Tensor] = original) -> torch.Tensor:
            seen.append(original(*arguments).clone())
            return seen[-1]

        setattr(engine.forward, name, run)
    return seen


def logits_of(engine: Engine) -> list[torch.Tensor]:
    """The logits of every forward of two requests; the texts follow from them."""
    seen = watch(engine)
    for n in range(2):
        engine.generate(PROMPT[n:], TOKENS, stop=False)
    return seen


def check_same(found: list[torch.Tensor], resident: list[torch.Tensor]) -> None:
    assert len(found) == len(resident) > 0
    different = [at for at, both in enumerate(zip(found, resident, strict=True)) if not torch.equal(*both)]
    assert not different, f"forwards {different[:5]} of {len(found)} differ"
    assert all(torch.isfinite(logits).all() for logits in found)


@pytest.mark.integration
@pytest.mark.parametrize("chunk", [256, 5])
@pytest.mark.parametrize("name", FETCH_ONLY)
def test_bit_identical_to_fully_resident(make_engine: MakeEngine, name: str, chunk: int) -> None:
    base = {"prefill_chunk_tokens": chunk}
    resident = logits_of(make_engine(Settings.parse({"cache_ratio": 1.0, **base})))
    assert len(resident) == (2 if chunk == 256 else 3 + 3) + 2 * (TOKENS - 1)
    engine = make_engine(Settings.parse({**FETCH_ONLY[name], **base}), debug_seed=len(name))
    check_same(logits_of(engine), resident)
    engine.brain.check_integrity()
    counted = engine.brain.counters.sum(axis=1)
    assert counted[PREFILL, Counter.FETCHED] > 0
    assert (counted[DECODE, Counter.PREFETCHED] > 0) == (engine.settings.prefetch_depth > 0)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(3))
def test_bit_identical_while_settings_change(make_engine: MakeEngine, seed: int) -> None:
    resident = make_engine(Settings(cache_ratio=1.0))
    engine, choices = make_engine(Settings(cache_ratio=0.0), debug_seed=seed), list(FETCH_ONLY.values())
    expected, found = watch(resident), watch(engine)

    def push(_: int) -> None:
        engine.apply(Settings.parse(choices[(seed + len(found)) % len(choices)]))

    resident.generate(PROMPT, 2 * TOKENS, stop=False)
    engine.generate(PROMPT, 2 * TOKENS, on_token=push, stop=False)
    check_same(found, expected)


@pytest.mark.integration
def test_poison_is_there(make_engine: MakeEngine) -> None:
    """The debug mode that the other tests rely on does fill free slots."""
    engine = make_engine(Settings(cache_ratio=0.25), debug_seed=1)
    engine.generate(PROMPT, 4, stop=False)
    state = engine.brain.state
    free = state.free[: state.scalars[N_FREE]].tolist()
    held = sorted(set(range(engine.brain.slots)) - set(free))
    assert held
    poisoned = {slot: torch.isnan(engine.pool.views(slot, 0).gate_up) for slot in (*free, *held)}
    assert all(poisoned[slot].all() for slot in free)
    assert not any(poisoned[slot].any() for slot in held)


@pytest.mark.integration
def test_poison_would_show(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that never happen leave NaN behind, so the comparison can fail."""
    engine = make_engine(Settings(cache_ratio=0.0), debug_seed=1)
    engine.generate(PROMPT, 4, stop=False)
    monkeypatch.setattr(engine.pool, "slot", lambda _: torch.empty(engine.expert_bytes, dtype=torch.uint8))
    seen = watch(engine)
    engine.generate(PROMPT, 2, stop=False)
    assert torch.isnan(seen[0]).all()


# The same on a GPU, on the bundled model


def gpu_engine(dtype: str, seed: int | None) -> Engine:
    options = EngineOptions(device="cuda", dtype=dtype, context_tokens=256, debug_seed=seed)
    return Engine(Checkpoint.open("mini"), options, Settings(cache_ratio=1.0))


def gpu_logits(engine: Engine, settings: Settings) -> list[torch.Tensor]:
    """The logits of every forward of two requests from an empty cache."""
    engine.apply(settings)
    engine.reset_cache()
    prompts = [engine.tokenizer.encode(prompt.text)[:96] for prompt in read_prompts()[:2]]
    seen = watch(engine)
    for prompt in prompts:
        engine.generate(prompt, 32, stop=False)
    del engine.forward.prefill, engine.forward.decode  # type: ignore[method-assign]
    engine.brain.check_integrity()
    return [logits.cpu() for logits in seen]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [256, 40])
def test_bit_identical_on_a_gpu(dtype: str, chunk: int) -> None:
    base = {"prefill_chunk_tokens": chunk}
    with gpu_engine(dtype, None) as engine:
        resident = gpu_logits(engine, Settings.parse({"cache_ratio": 1.0, **base}))
    assert len(resident) == 2 * (31 + -(-96 // chunk))
    with gpu_engine(dtype, chunk) as engine:
        for name, fields in FETCH_ONLY.items():
            uneven = {"slots_per_layer": (0, 32, 3, 1, 16, 8, 2, 31)} if name == "uneven" else {}
            check_same(gpu_logits(engine, Settings.parse({**fields, **uneven, **base})), resident)


@pytest.mark.gpu
def test_graphs_are_made_anew_for_wider_steps() -> None:
    """More rows a step need other static memory: all graphs are dropped, and captured again."""
    with gpu_engine("bfloat16", None) as engine:
        prompt = engine.tokenizer.encode(next(iter(read_prompts())).text)[:96]
        plain = engine.generate(prompt, 48, stop=False).token_ids
        for gamma in (2, 8):
            engine.apply(Settings.parse({"cache_ratio": 0.25, "draft": {"kind": "ngram", "gamma": gamma}}))
            assert engine.path == "graphs"
            assert engine.generate(prompt, 48, stop=False).token_ids == plain
