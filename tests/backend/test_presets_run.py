"""Every preset decodes on the bundled model: exact ones keep its text, the others depend on what they execute alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter, SplitCosts
from foreload.backend.policy.state import DECODE
from foreload.presets import PRESETS, preset_settings
from foreload.settings import Settings

TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The bundled model with its draft beside it, costs by which a copy is as dear as an expert on the CPU, counts."""
    start = Settings.parse({"cache_ratio": 1.0, "draft": {"model": "draft"}})
    with Engine(Checkpoint.open("mini"), EngineOptions(context_tokens=128), start) as made:
        n = np.arange(made.shape.experts + 1, dtype=np.int64)
        made.use_costs(lambda _: SplitCosts(io_ns=100, gpu_ns=10 * n, cpu_ns=100 * n, dense_ns=500, layer_ns=600))
        made.warm_by(np.random.default_rng(0).integers(0, 99, (made.shape.n_moe_layers, made.shape.experts)))
        yield made


def decoded(engine: Engine, settings: Settings) -> tuple[list[int], np.ndarray]:
    """The text after a prompt, and what decode counted."""
    engine.apply(settings)
    engine.reset_cache()
    done = engine.generate(engine.tokenizer.encode("The kernel reads a page from the disk and"), TOKENS, stop=False)
    engine.brain.check_integrity()
    return done.token_ids, done.counters[DECODE].sum(axis=0)


@pytest.mark.integration
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_decodes(engine: Engine, name: str) -> None:
    settings = preset_settings(name, engine.shape, 1, cache_ratio=0.4)
    tokens, counted = decoded(engine, settings)
    same = Settings.parse({"cache_ratio": 1.0})
    if settings.speculate_layers:
        same = same.changed(predictor=settings.predictor, prefetch_depth=1, speculate_layers="all")
    expected, resident = decoded(engine, same)
    assert tokens == expected
    assert resident[Counter.MISSES] == 0 < counted[Counter.MISSES]
    fetched, on_cpu = counted[Counter.FETCHED], counted[Counter.ON_CPU]
    assert (fetched > 0, on_cpu > 0) in {
        "fetch": [(True, False)], "cpu": [(False, True)], "split": [(True, True), (False, True), (True, False)],
    }[settings.miss_action]  # fmt: skip
