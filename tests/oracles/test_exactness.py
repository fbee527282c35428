"""Whatever the settings, the bundled model's greedy text is the reference's (fp32, CPU): drawn by hypothesis.

A difference is allowed at a tie alone: the reference's two best logits closer than `TIE`. Over several positions at
once matrix products round differently than over one, so such a tie may fall either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_greedy import Reference

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import SplitCosts
from foreload.settings import NEXT_STEP, Settings

TOKENS, DRAWS = 16, 24


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The bundled model and its draft, counts to start from, and a link with time for the next step's prefetches."""
    checkpoint = Checkpoint.open("mini")
    warm = np.random.default_rng(0).integers(0, 9, (checkpoint.shape.n_moe_layers, checkpoint.shape.experts))

    def costs(chosen: Settings) -> SplitCosts:
        n = np.arange(33, dtype=np.int64)
        return SplitCosts(100, 10 * n, 100 * n, cpu_token_ns=30, dense_ns=150, layer_ns=400)

    options = EngineOptions(context_tokens=256)
    settings = Settings.parse({"cache_ratio": 0.25, "draft": {"model": "draft"}})
    with Engine(checkpoint, options, settings, costs, warm=warm) as engine:
        yield engine


@pytest.fixture(scope="module")
def oracle(reference: Any) -> Reference:
    return Reference(reference)


@st.composite
def exact_settings(draw: st.DrawFn) -> Settings:
    """Settings that must not change text."""
    slots = draw(
        st.one_of(
            st.fixed_dictionaries({"cache_ratio": st.sampled_from([0.0, 1 / 32, 0.1, 0.25, 0.5, 1.0])}),
            st.fixed_dictionaries({"slots_per_layer": st.lists(st.integers(0, 32), min_size=8, max_size=8)}),
        )
    )
    predictor = draw(st.sampled_from(["none", "gate", "gate", "previous_step", "utility"]))
    depth = draw(st.integers(1, 2)) if predictor == "gate" else 0
    prefetch = {"predictor": predictor, "prefetch_depth": depth, "prefetch_width": draw(st.integers(1, 8))}
    fixed = [] if predictor in NEXT_STEP else ["none"]
    gamma = draw(st.sampled_from([0, 1, 2, 4, 7]))
    return Settings.parse(
        {
            **slots,
            **prefetch,
            "pool": draw(st.sampled_from(["layer", "shared"])),
            "eviction": draw(st.sampled_from(["lru", "lfu", "lfru", "aged", "static", "utility", "random"])),
            "admission": draw(st.sampled_from(["demand", "background", *fixed])),
            "admit_per_step": draw(st.integers(1, 4)),
            "miss_action": draw(st.sampled_from(["fetch", "cpu", "split"])),
            "split_rule": draw(st.sampled_from(["makespan", "bandwidth", "tau", "per_expert"])),
            "utility": {
                "signal": draw(st.sampled_from(["delta", "level"])),
                "adapt": draw(st.sampled_from(["real", "floored", "off"])),
                "tau": draw(st.sampled_from(["auto", 1, 3, 5])),
                "reset_done": draw(st.booleans()),
            },
            "cpu_threads": draw(st.integers(1, 2)),
            "draft": {"kind": draw(st.sampled_from(["ngram", "model"])) if gamma else "none", "gamma": gamma},
            "prefill_chunk_tokens": draw(st.sampled_from([256, 40])),
        }
    )


@pytest.mark.integration
@settings(max_examples=DRAWS, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(drawn=exact_settings(), at=st.integers(0, 63))
def test_drawn_settings_give_the_references_text(
    engine: Engine, oracle: Reference, prompts: list[list[int]], drawn: Settings, at: int
) -> None:
    engine.apply(drawn)
    engine.reset_cache()
    generation = engine.generate(prompts[at], TOKENS, stop=False)
    assert len(generation.token_ids) == TOKENS
    oracle.ties(prompts[at], generation.token_ids)
    engine.brain.check_integrity()
