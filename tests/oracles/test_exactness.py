"""Whatever the settings, the bundled model's greedy text is the reference's (fp32, CPU): drawn by hypothesis.

A difference is allowed at a tie alone: the reference's two best logits closer than `TIE`. Over several positions at
once matrix products round differently than over one, so such a tie may fall either way.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_greedy import Reference

from foreload.backend.engine import Engine
from foreload.settings import Settings

TOKENS, DRAWS = 16, 16


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
    depth = draw(st.integers(0, 2))
    prefetch = {"predictor": "gate", "prefetch_depth": depth, "prefetch_width": draw(st.integers(1, 8))}
    gamma = draw(st.sampled_from([0, 1, 2, 4, 7]))
    return Settings.parse(
        {
            **slots,
            **(prefetch if depth else {}),
            "eviction": draw(st.sampled_from(["lru", "lfu", "lfru"])),
            "admission": draw(st.sampled_from(["demand", "background", "none"])),
            "admit_per_step": draw(st.integers(1, 4)),
            "miss_action": draw(st.sampled_from(["fetch", "cpu", "split"])),
            "split_rule": draw(st.sampled_from(["makespan", "bandwidth"])),
            "cpu_threads": draw(st.integers(1, 2)),
            "draft": {"kind": "ngram" if gamma else "none", "gamma": gamma},
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
