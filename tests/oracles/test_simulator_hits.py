"""Simulated counters equal the engine's, exactly, wherever nothing is decided by timing (prefetch depth 0)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.measure import Measured, measure
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE, PREFILL
from foreload.backend.recorder import Prompt, record
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.settings import Settings
from foreload.simulator import simulate, split_costs
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

REQUESTS, PROMPT_TOKENS, TOKENS = 3, 50, 16
DRAFT = {"kind": "ngram", "gamma": 4}
UNEVEN = (0, 1, 2, 4, 8, 16, 31, 32)
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing_kept": {"cache_ratio": 0.0},
    "one_slot": {"cache_ratio": 1 / 32},
    "lru": {"cache_ratio": 0.25},
    "lfu": {"cache_ratio": 0.25, "eviction": "lfu"},
    "lfru": {"cache_ratio": 0.25, "eviction": "lfru"},
    "half": {"cache_ratio": 0.5},
    "all": {"cache_ratio": 1.0},
    "uneven": {"slots_per_layer": UNEVEN, "eviction": "lfru"},
    "fixed": {"cache_ratio": 0.25, "admission": "none"},
    "background_without_cpu": {"cache_ratio": 0.25, "admission": "background", "admit_per_step": 3},
    "cpu": {"cache_ratio": 0.25, "miss_action": "cpu"},
    "cpu_uneven_small_chunks": {"slots_per_layer": UNEVEN, "miss_action": "cpu", "prefill_chunk_tokens": 7},
    "token_by_token_prompt": {"cache_ratio": 0.2, "eviction": "lfu", "prefill_chunk_tokens": 1},
    "two_chunks": {"cache_ratio": 0.4, "prefill_chunk_tokens": 32},
    "split": {"cache_ratio": 0.25, "miss_action": "split"},
    "split_uneven": {"slots_per_layer": UNEVEN, "miss_action": "split", "eviction": "lfu"},
    "random": {"cache_ratio": 0.25, "eviction": "random"},
    "utility": {"cache_ratio": 0.25, "eviction": "utility", "utility": {"signal": "level"}},
    "shared": {"cache_ratio": 0.2, "pool": "shared"},
    "shared_by_utility": {"cache_ratio": 0.2, "pool": "shared", "eviction": "utility", "prefill_chunk_tokens": 32},
    "split_by_utility": {"cache_ratio": 0.2, "miss_action": "split", "split_rule": "tau", "eviction": "utility"},
    "split_bandwidth": {"cache_ratio": 0.1, "miss_action": "split", "split_rule": "bandwidth"},
}


@pytest.fixture
def profile(make_profile: Callable[..., HardwareProfile]) -> HardwareProfile:
    """Made-up costs of the bundled model; what is counted must not depend on them, except in `split`.

    A copy takes about as long as an expert on the CPU, so that `split` shares out.
    """
    shape = Checkpoint.open("mini").shape
    size = shape.expert_bytes("float32")
    base = make_profile(shape=asdict(shape), shape_hash=shape.hash, expert_bytes=size)
    copies = [
        Measurement(probe=probe, at=at, p50_us=us, p95_us=us, repeats=1)
        for probe, at, us in (("copy", {"bytes": size, "pinned": 0}, 60.0), ("copy_beside_cpu", {"threads": 1}, 75.0))
    ]
    others = [m for m in base.measurements if m.probe not in ("copy", "copy_beside_cpu")]
    return HardwareProfile(meta=base.meta, measurements=(*others, *copies))


@pytest.fixture(scope="module")
def trace(engine: Engine, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    out = tmp_path_factory.mktemp("recording") / "trace.parquet"
    texts = [Prompt("", engine.tokenizer.decode(ids)) for ids in prompts[-REQUESTS:]]
    record(engine, texts, out, prompt_tokens=PROMPT_TOKENS, max_tokens=TOKENS, stop=False)
    return read_trace(out)


def measured(trace: Trace, profile: HardwareProfile, settings: Settings) -> Measured:
    """The recorded requests on a real engine, from an empty cache."""
    checkpoint = Checkpoint.open("mini")
    options = EngineOptions(context_tokens=128)

    def costs(chosen: Settings) -> Any:
        return split_costs(profile, checkpoint.shape, chosen)

    with Engine(checkpoint, options, Settings(cache_ratio=0.0), costs) as engine:
        return measure(engine, trace, trace.requests(), [settings], repeats=1)[0]


@pytest.mark.integration
@pytest.mark.parametrize("name", SETTINGS)
def test_counters_are_equal(trace: Trace, profile: HardwareProfile, name: str) -> None:
    settings = Settings.parse(SETTINGS[name])
    real = measured(trace, profile, settings)
    assert real.diverged == 0
    simulated = simulate(trace, profile, trace.meta.model_shape(), settings, real.capacity)
    for counter in Counter:
        both = simulated.counters[:2, :, counter], real.counters[:2, :, counter]
        assert np.array_equal(*both), f"{counter.name}: {both[0].tolist()} simulated, {both[1].tolist()} measured"
    check_demand(settings, real)


DRAFTED = ("lru", "uneven", "background_without_cpu", "cpu_uneven_small_chunks", "split")


@pytest.fixture(scope="module")
def windows(engine: Engine, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Verify windows of the same requests."""
    out = tmp_path_factory.mktemp("recording") / "windows.parquet"
    engine.apply(Settings.parse({"cache_ratio": 0.25, "draft": DRAFT}))
    texts = [Prompt("", engine.tokenizer.decode(ids)) for ids in prompts[-REQUESTS:]]
    record(engine, texts, out, prompt_tokens=PROMPT_TOKENS, max_tokens=2 * TOKENS, stop=False)
    return read_trace(out)


@pytest.mark.integration
@pytest.mark.parametrize("name", DRAFTED)
def test_counters_of_windows_are_equal(windows: Trace, profile: HardwareProfile, name: str) -> None:
    """With drafts too: rejected ones are demand like any other token."""
    assert not windows.accepted.all()
    settings = Settings.parse({**SETTINGS[name], "draft": DRAFT})
    real = measured(windows, profile, settings)
    assert real.diverged == 0
    simulated = simulate(windows, profile, windows.meta.model_shape(), settings, real.capacity)
    assert simulated.tokens == real.tokens == REQUESTS * (2 * TOKENS - 1)
    assert simulated.tokens_per_step > 1
    for counter in Counter:
        both = simulated.counters[:, :, counter], real.counters[:, :, counter]
        assert np.array_equal(*both), f"{counter.name}: {both[0].tolist()} simulated, {both[1].tolist()} measured"


def check_demand(settings: Settings, real: Measured) -> None:
    """All demand is accounted for, and the setting took the paths it names."""
    decode, prompt = real.counters[DECODE], real.counters[PREFILL]
    demanded = decode[:, [Counter.HITS, Counter.LATE, Counter.MISSES]].sum(axis=1)
    assert (demanded == 4 * REQUESTS * (TOKENS - 1)).all()
    assert (decode[:, Counter.FETCHED] + decode[:, Counter.ON_CPU] == decode[:, Counter.MISSES]).all()
    used = prompt[:, Counter.FETCHED] + prompt[:, Counter.PREFETCHED] - prompt[:, Counter.WASTED]
    assert (used == prompt[:, Counter.MISSES]).all()
    assert (decode[:, Counter.ON_CPU].sum() > 0) == (settings.miss_action != "fetch")
    if settings.miss_action == "split":
        assert real.count(Counter.FETCHED) > 0
    assert (real.count(Counter.HITS) > 0) == (real.capacity != (0,) * 8 and settings.admission != "none")


@pytest.mark.integration
def test_order_of_requests_counts(trace: Trace, profile: HardwareProfile) -> None:
    """The cache lives through the requests, in both bodies alike."""
    settings = Settings(cache_ratio=0.25)
    shape, backwards = trace.meta.model_shape(), trace.requests()[::-1]
    with Engine(Checkpoint.open("mini"), EngineOptions(context_tokens=128), settings) as engine:
        real = measure(engine, trace, backwards, [settings], repeats=1)[0]
    simulated = simulate(trace, profile, shape, settings, real.capacity, requests=backwards)
    forwards = simulate(trace, profile, shape, settings, real.capacity)
    assert np.array_equal(simulated.counters, real.counters)
    assert not np.array_equal(forwards.counters, real.counters)
