"""Greedy text of the engine equals that of `transformers`, token for token, wherever the experts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from foreload.backend.engine import Engine
from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE
from foreload.settings import Settings

TIE = 1e-4
RATIOS = {"none": 0.0, "one_slot": 1 / 32, "quarter": 0.25, "all": 1.0}
ACTIONS = ("fetch", "cpu", "split")


@dataclass
class Reference:
    """Compares generated tokens with the reference's best at each position; remembers texts it has seen."""

    model: Any
    seen: dict[tuple[int, ...], int] = field(default_factory=dict)

    def ties(self, prompt: list[int], generated: list[int]) -> int:
        """Tokens that differ within a tie of the two best logits; fails on any other difference."""
        key = (len(prompt), *prompt, *generated)
        if key not in self.seen:
            self.seen[key] = self._compare(prompt, generated)
        return self.seen[key]

    def _compare(self, prompt: list[int], generated: list[int]) -> int:
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2)
        found = torch.tensor(generated)
        differ = torch.nonzero(best.indices[:, 0] != found).flatten().tolist()
        for at in differ:
            gap = float(best.values[at, 0] - best.values[at, 1])
            assert gap < TIE, f"token {at}: {generated[at]}, transformers {int(best.indices[at, 0])}, ahead by {gap}"
            assert generated[at] == int(best.indices[at, 1]), f"token {at} is not among the two best"
        return len(differ)


@pytest.fixture(scope="module")
def oracle(reference: Any) -> Reference:
    return Reference(reference)


def compare(engine: Engine, oracle: Reference, prompts: Sequence[list[int]], tokens: int) -> int:
    """Ties over all prompts, from an empty cache."""
    engine.reset_cache()
    ties = 0
    for prompt in prompts:
        generation = engine.generate(prompt, tokens, stop=False)
        assert len(generation.token_ids) == tokens
        ties += oracle.ties(prompt, generation.token_ids)
    return ties


def run(
    engine: Engine, oracle: Reference, prompts: Sequence[list[int]], tokens: int, settings: Settings
) -> tuple[int, np.ndarray]:
    """Ties, and what each counter counted in decode."""
    engine.apply(settings)
    before = engine.brain.counters.copy()
    ties = compare(engine, oracle, prompts, tokens)
    return ties, (engine.brain.counters - before)[DECODE].sum(axis=0)


def check_paths(settings: Settings, counted: np.ndarray) -> None:
    """The setting really took the path it names."""
    fetched, on_cpu = int(counted[Counter.FETCHED]), int(counted[Counter.ON_CPU])
    assert counted[Counter.HITS] + counted[Counter.MISSES] == counted[: Counter.MISSES + 1].sum()
    assert fetched + on_cpu == counted[Counter.MISSES]
    if settings.miss_action == "fetch":
        assert on_cpu == 0
    if settings.miss_action == "cpu":
        assert fetched == 0
    if settings.cache_ratio is not None and settings.cache_ratio < 1:
        assert (fetched > 0, on_cpu > 0) == (settings.miss_action != "cpu", settings.miss_action != "fetch")
    assert (counted[Counter.HITS] > 0) == (settings.cache_ratio != 0)


def setting(ratio: str, action: str) -> Settings:
    return Settings.parse({"cache_ratio": RATIOS[ratio], "miss_action": action})


@pytest.mark.integration
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_same_text_in_every_setting(
    engine: Engine, oracle: Reference, prompts: list[list[int]], ratio: str, action: str
) -> None:
    settings = setting(ratio, action)
    ties, counted = run(engine, oracle, prompts[:8], 24, settings)
    check_paths(settings, counted)
    assert ties <= 1


@pytest.mark.integration
def test_same_text_for_every_prompt(engine: Engine, oracle: Reference, prompts: list[list[int]]) -> None:
    settings = setting("quarter", "split")
    ties, counted = run(engine, oracle, prompts, 24, settings)
    check_paths(settings, counted)
    assert ties <= 3


@pytest.mark.integration
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [1, 40])
def test_same_text_with_prefetch_and_prompt_chunks(
    engine: Engine, oracle: Reference, prompts: list[list[int]], depth: int, chunk: int
) -> None:
    settings = Settings(cache_ratio=0.1, predictor="gate", prefetch_depth=depth, prefill_chunk_tokens=chunk)
    ties, counted = run(engine, oracle, prompts[:3], 24, settings)
    assert counted[Counter.PREFETCHED] > 0
    assert ties <= 1


@pytest.mark.integration
@pytest.mark.parametrize(
    "ahead",
    [
        {"predictor": "quasi_hidden", "prefetch_depth": 2},
        {"predictor": "estimator", "prefetch_depth": 1, "prefetch_width": 8},
        {"predictor": "hybrid", "prefetch_depth": 4, "prefetch_rolled": True},
    ],
    ids=lambda value: value["predictor"],
)
def test_same_text_whatever_predicts(
    engine: Engine, oracle: Reference, prompts: list[list[int]], ahead: dict[str, Any]
) -> None:
    ties, counted = run(engine, oracle, prompts[:3], 24, Settings.parse({"cache_ratio": 0.1, **ahead}))
    assert counted[Counter.PREFETCHED] > 0
    assert ties <= 1


@pytest.mark.slow
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("ratio", RATIOS)
def test_same_text_at_length(
    engine: Engine,
    oracle: Reference,
    prompts: list[list[int]],
    ratio: str,
    action: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = setting(ratio, action)
    ties, counted = run(engine, oracle, prompts, 128, settings)
    check_paths(settings, counted)
    with capsys.disabled():
        print(f"\n{settings.describe()}: {len(prompts)} prompts x 128 tokens, {ties} ties within {TIE}")
    assert ties <= 0.001 * len(prompts) * 128
