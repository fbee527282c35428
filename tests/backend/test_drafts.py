"""Speculative decoding on an engine: the text stays, windows are recorded and run again, settings change meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import CONTEXT, words

from foreload.backend.engine import Engine
from foreload.backend.generation import DecodeStep, Generation
from foreload.backend.measure import measure
from foreload.backend.policy import Counter
from foreload.backend.recorder import Prompt, record
from foreload.backend.sampling import Sampling
from foreload.errors import SettingsError
from foreload.settings import Draft, Settings, staging_slots, step_experts
from foreload.shape import ModelShape
from foreload.traces.io import read_trace
from foreload.traces.schema import DRAFT_VERIFY, PREFILL, Trace

PROMPT = [3, 14, 15, 9, 26, 3, 14, 15, 9, 26, 3, 14]
TOKENS = 40
MakeEngine = Callable[..., Engine]


def drafting(gamma: int, **fields: Any) -> Settings:
    return Settings.parse({"cache_ratio": 0.25, "draft": {"kind": "ngram", "gamma": gamma}, **fields})


@pytest.mark.integration
@pytest.mark.parametrize("gamma", [1, 3, 16])
@pytest.mark.parametrize("miss_action", ["fetch", "split"])
def test_drafts_change_no_text(make_engine: MakeEngine, gamma: int, miss_action: str) -> None:
    plain = make_engine().generate(PROMPT, TOKENS, stop=False)
    engine = make_engine(drafting(gamma, miss_action=miss_action), debug_seed=gamma)
    found = engine.generate(PROMPT, TOKENS, stop=False)
    assert found.token_ids == plain.token_ids
    assert len(found.steps) < len(plain.steps)  # some drafts were right
    assert any(step.emitted <= step.drafted for step in found.steps)  # and some were wrong
    assert found.decode_tokens == plain.decode_tokens == TOKENS - 1
    assert max(step.drafted for step in found.steps) == min(gamma, TOKENS - 2)
    engine.brain.check_integrity()


@pytest.mark.integration
def test_sampled_drafts_repeat_with_the_seed(make_engine: MakeEngine) -> None:
    engine, sampling = make_engine(drafting(3)), Sampling(temperature=0.3, seed=5)
    one, two = (engine.generate(PROMPT, TOKENS, sampling, stop=False) for _ in range(2))
    other = engine.generate(PROMPT, TOKENS, Sampling(temperature=0.3, seed=6), stop=False)
    assert one.token_ids == two.token_ids != other.token_ids
    assert [step.emitted for step in one.steps] == [step.emitted for step in two.steps]


@pytest.mark.integration
def test_kind_and_gamma_change_between_tokens(make_engine: MakeEngine) -> None:
    plain = make_engine().generate(PROMPT, TOKENS, stop=False)
    engine = make_engine(drafting(2))
    choices = [Settings(cache_ratio=0.25), drafting(5), drafting(1, cache_ratio=0.5), drafting(3, eviction="lfu")]
    seen: list[int] = []

    def push(token: int) -> None:
        seen.append(token)
        engine.apply(choices[len(seen) % len(choices)])

    found = engine.generate(PROMPT, TOKENS, on_token=push, stop=False)
    assert found.token_ids == seen == plain.token_ids
    assert {step.drafted for step in found.steps} >= {0, 1, 5}
    engine.brain.check_integrity()


@pytest.mark.integration
def test_a_request_ends_at_the_end_token_within_a_window(make_engine: MakeEngine) -> None:
    plain = make_engine().generate(PROMPT, TOKENS, stop=False).token_ids
    for at in range(1, 12):
        engine = make_engine(drafting(6))
        engine.tokenizer.stop_ids = frozenset([plain[at]])
        ended = engine.generate(PROMPT, TOKENS)
        assert ended.token_ids == plain[: plain.index(plain[at]) + 1]
        assert ended.decode_tokens == len(ended.token_ids) - 1


# Recordings


def recorded(engine: Engine, path: Path, **options: Any) -> tuple[Trace, list[Generation]]:
    prompts = [Prompt("", words(*PROMPT)), Prompt("", words(*PROMPT[::-1]))]
    done = record(engine, prompts, path, max_tokens=20, **{"stop": False, **options})
    return read_trace(path), done


@pytest.mark.integration
def test_windows_are_recorded_with_rejected_drafts(make_engine: MakeEngine, tmp_path: Path) -> None:
    trace, done = recorded(make_engine(drafting(4)), tmp_path / "t.parquet", depth=1)
    assert {key: trace.meta.sampling[key] for key in ("draft", "gamma", "temperature")} == {
        "draft": "ngram", "gamma": 4, "temperature": 0.0
    }  # fmt: skip
    for number, generation in enumerate(done):
        rows = trace.select([number])
        rows = rows.take(rows.phase != PREFILL)  # type: ignore[arg-type]
        assert (rows.phase == DRAFT_VERIFY).all()
        assert rows.token_id[rows.accepted].tolist() == generation.token_ids[:-1]
        assert rows.position[rows.accepted].tolist() == list(range(12, 12 + len(generation.token_ids) - 1))
        assert (rows.predictions["gate", 1][:, 1:] >= 0).all()
        starts = rows.step_starts()
        for step, first, last in zip(generation.steps, starts[:-1], starts[1:], strict=True):
            assert last - first == step.drafted + 1
            assert rows.accepted[first:last].tolist() == [n < step.emitted for n in range(last - first)]
            assert (np.diff(rows.position[first:last]) == 1).all()
    assert not trace.accepted.all()


@pytest.mark.integration
def test_accepted_rows_are_routed_as_in_plain_decoding(make_engine: MakeEngine, tmp_path: Path) -> None:
    windows, _ = recorded(make_engine(drafting(4)), tmp_path / "w.parquet")
    plain, _ = recorded(make_engine(), tmp_path / "p.parquet")
    kept = windows.take(windows.accepted)  # type: ignore[arg-type]
    assert "draft" not in plain.meta.sampling
    assert np.array_equal(kept.token_id, plain.token_id)
    assert np.array_equal(kept.experts, plain.experts)


@pytest.mark.integration
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_recorded_windows_are_run_again(make_engine: MakeEngine, tmp_path: Path, temperature: float) -> None:
    settings, sampling = drafting(3), Sampling(temperature=temperature, seed=2)
    engine = make_engine(settings)
    trace, done = recorded(engine, tmp_path / "t.parquet", sampling=sampling)
    chosen = [settings, drafting(3, miss_action="cpu")]
    if temperature == 0:
        chosen += [Settings(cache_ratio=0.0), drafting(2)]
    for again in measure(engine, trace, [0, 1], chosen, 1):
        assert again.diverged == 0
        assert again.tokens == sum(generation.decode_tokens for generation in done)


# Figures and settings


@pytest.mark.unit
def test_statistics_of_a_generation() -> None:
    steps = [DecodeStep(6_000_000, 3, 4), DecodeStep(3_000_000, 3, 1), DecodeStep(3_000_000, 1, 1)]
    counters = np.zeros((2, 2, len(Counter)), np.int64)
    counters[0, :, [Counter.HITS, Counter.LATE, Counter.MISSES]] = [[5, 6], [1, 2], [3, 1]]
    done = Generation(4, list(range(7)), 10, steps, counters)
    assert (done.decode_ns, done.decode_tokens, done.tpot_ms, done.tokens_per_step) == (12_000_000, 6, 2.0, 2.0)
    assert done.acceptance == [1 / 3, 0.5, 0.5]
    assert done.experts_per_layer_step == 3.0
    empty = Generation(4, [1], 10, [], np.zeros((2, 2, len(Counter)), np.int64))
    assert np.isnan([empty.tpot_ms, empty.tokens_per_step, empty.experts_per_layer_step]).all()
    assert empty.acceptance == []


@pytest.mark.unit
def test_windows_are_in_the_staging_budget(shape: ModelShape) -> None:
    four = drafting(3)
    assert (step_experts(Settings(), shape), step_experts(four, shape), step_experts(drafting(1), shape)) == (2, 8, 4)
    ahead = drafting(3, predictor="gate", prefetch_depth=2, prefetch_width=1, admission="background")
    assert staging_slots(ahead, shape) == 8 + 2 * 4 + 2


@pytest.mark.unit
@pytest.mark.parametrize("name", ["s.json", "s.toml"])
def test_drafts_in_settings_files(tmp_path: Path, name: str) -> None:
    settings = Settings.parse({"draft": {"kind": "model", "gamma": 8, "model": "some/folder"}})
    settings.save(tmp_path / name)
    assert Settings.load(tmp_path / name) == settings
    assert settings.describe() == "draft.kind=model draft.gamma=8 draft.model=some/folder"
    assert Draft(kind="model", gamma=1).model_name == "draft"
    assert Draft(model="x").model_name == "x"
    assert Draft(kind="ngram", gamma=1).model_name is None


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "ngram"}, "gamma 0 does not go with kind 'ngram': 0 goes with 'none', 1 or more with"),
        ({"gamma": 2}, "gamma 2 does not go with kind 'none'"),
        ({"kind": "ngram", "gamma": 17}, "'draft.gamma' is 17"),
        ({"kind": "tree", "gamma": 2}, "'draft.kind' is 'tree'"),
        ({"kind": "ngram", "gamma": 2, "tree": 1}, "draft.tree"),
    ],
)
def test_wrong_drafts(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.parse({"draft": fields})
    assert said in str(caught.value)


@pytest.mark.integration
def test_a_window_longer_than_the_context_is_refused(
    make_engine: MakeEngine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(context_tokens=8)
    with pytest.raises(SettingsError, match=r"draft\.gamma 8 exceeds the context: a verify step of 9 tokens"):
        engine.apply(drafting(8))
    assert engine.settings == Settings(cache_ratio=0.5)
    engine.apply(drafting(7))
    monkeypatch.setattr("foreload.backend.engine.Decoder", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(SettingsError, match="does not fit in context_tokens 8"):
        make_engine(drafting(8), context_tokens=8)


@pytest.mark.integration
def test_windows_up_to_the_end_of_the_context(make_engine: MakeEngine) -> None:
    plain = make_engine().generate(PROMPT, CONTEXT - len(PROMPT), stop=False)
    found = make_engine(drafting(16)).generate(PROMPT, CONTEXT - len(PROMPT), stop=False)
    assert found.token_ids == plain.token_ids
