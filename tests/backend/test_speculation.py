"""Speculated layers: what is executed, and that it depends on model, prompt, layers and predictor alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONTEXT, made_up_costs, words
from torch import Tensor

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.experts.blocks import run_expert
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.observe import Routed
from foreload.backend.predict import PREDICTORS, Predictor
from foreload.backend.recorder import Prompt, record
from foreload.errors import MismatchError, UsageError
from foreload.settings import Settings
from foreload.simulator.workload import load_requests
from foreload.traces.io import read_trace
from foreload.traces.schema import DECODE, PREFILL

PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9]
TOKENS = 14
LAYERS: tuple[Any, ...] = ("all", (1,), (2,))
MakeEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def engine(tiny: Path, calibration: Path) -> Iterator[Engine]:
    options = EngineOptions(context_tokens=CONTEXT, calibration=calibration, debug_seed=3, shadow=True)
    with Engine(Checkpoint.open(str(tiny)), options, Settings(cache_ratio=0.5), made_up_costs) as made:
        yield made


def text(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, TOKENS, stop=False).token_ids


class Log:
    """An observer that keeps everything."""

    width = 4
    predictors: tuple[tuple[Predictor, tuple[int, ...]], ...] = ()

    def __init__(self) -> None:
        self.forwards: list[Routed] = []

    def routed(self, routed: Routed) -> None:
        self.forwards.append(routed)


def reference(engine: Engine, name: str, layers: frozenset[int]) -> list[int]:
    """Greedy text by a plain loop over layers and experts, without cache or brain."""
    decoder, shape, slab = engine.forward.decoder, engine.shape, engine.slab
    predictor = engine.predictor(name) if name != "none" else None

    def experts(at: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for row in range(len(h)):
            for expert, weight in zip(ids[row].tolist(), weights[row], strict=True):
                out[row] += weight * run_expert(h[row : row + 1], *slab.views(at, expert))[0]
        return out

    def forward(tokens: list[int], position: int, guessing: bool) -> int:
        x = decoder.embed(torch.tensor(tokens))
        guess: tuple[Tensor, Tensor] | None = None
        for at in range(shape.n_moe_layers):
            r = decoder.attend(at, x, position)
            h = decoder.moe_input(at, r)
            ids, weights = guess or decoder.route(at, h)
            guess = None
            if guessing and predictor is not None and at + 1 in layers:
                guess = decoder.choose(at + 1, predictor.ahead(at, r, ids, weights, 1)[0][0])
            x = r + experts(at, h, ids, weights)
        return int(decoder.logits(x[-1:])[0].argmax())

    with torch.inference_mode():
        found = [forward(PROMPT, 0, False)]
        while len(found) < TOKENS:
            found.append(forward(found[-1:], len(PROMPT) + len(found) - 1, True))
    return found


@pytest.mark.integration
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("name", PREDICTORS)
def test_text_equals_a_plain_loop(engine: Engine, name: str, layers: Any) -> None:
    chosen = Settings(cache_ratio=0.25, predictor=name, prefetch_depth=1, speculate_layers=layers)
    engine.apply(chosen)
    assert text(engine) == reference(engine, name, frozenset(chosen.speculated(engine.shape)))


@pytest.mark.integration
def test_the_plain_loop_is_exact_without_speculation(engine: Engine) -> None:
    engine.apply(Settings(cache_ratio=1.0))
    exact = text(engine)
    assert reference(engine, "none", frozenset()) == exact
    engine.apply(Settings(cache_ratio=1.0, predictor="estimator", prefetch_depth=1, speculate_layers="all"))
    assert text(engine) != exact


def draws() -> st.SearchStrategy[dict[str, Any]]:
    """Everything that may change nothing, from the cache to drafts and the size of prompt chunks."""
    return st.fixed_dictionaries(
        {
            "slots_per_layer": st.tuples(*[st.integers(0, 8)] * 3),
            "pool": st.sampled_from(["layer", "shared"]),
            "eviction": st.sampled_from(["lru", "lfu", "lfru", "aged", "utility", "random"]),
            "admission": st.sampled_from(["demand", "background", "none"]),
            "miss_action": st.sampled_from(["fetch", "cpu", "split"]),
            "split_rule": st.sampled_from(["makespan", "tau", "bandwidth", "per_expert"]),
            "prefetch_depth": st.integers(1, 4),
            "prefetch_width": st.integers(1, 8),
            "prefetch_rolled": st.booleans(),
            "draft": st.sampled_from([{}, {"kind": "ngram", "gamma": 1}, {"kind": "ngram", "gamma": 4}]),
            "prefill_chunk_tokens": st.sampled_from([1, 4, 256]),
        }
    )


def valid(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "prefetch_rolled": value["prefetch_rolled"] and value["prefetch_depth"] > 1}


@pytest.mark.integration
@pytest.mark.parametrize("layers", ["exact", *LAYERS])
@pytest.mark.parametrize("name", PREDICTORS)
def test_text_depends_on_layers_and_predictor_alone(engine: Engine, name: str, layers: Any) -> None:
    fixed = {"predictor": name, "speculate_layers": () if layers == "exact" else layers}
    engine.apply(Settings.parse({"cache_ratio": 1.0, "prefetch_depth": 1, **fixed}))
    expected = text(engine)

    @settings(max_examples=4, deadline=None, database=None)
    @given(draws())
    def check(value: dict[str, Any]) -> None:
        engine.apply(Settings.parse({**valid(value), **fixed}))
        engine.reset_cache()
        assert text(engine) == expected
        engine.brain.check_integrity()

    check()


@pytest.mark.integration
def test_prompts_route_truly_and_speculated_layers_execute_predictions(
    make_engine: MakeEngine, calibration: Path
) -> None:
    exact, log = Log(), Log()
    make_engine().generate(PROMPT, 4, observer=exact, stop=False)
    guessing = Settings(cache_ratio=0.5, predictor="estimator", prefetch_depth=1, speculate_layers="all")
    engine = make_engine(guessing, calibration=calibration)
    log.predictors = ((engine.predictor("estimator"), (1,)),)
    engine.generate(PROMPT, 4, observer=log, stop=False)
    assert log.forwards[0].phase == PREFILL
    assert np.array_equal(log.forwards[0].experts, exact.forwards[0].experts)
    for step in log.forwards[1:]:
        predicted = step.predicted["estimator", 1][:, 1:, :2]
        assert np.array_equal(step.experts[:, 1:], predicted)
    assert not np.array_equal(log.forwards[1].experts, exact.forwards[1].experts)


@pytest.mark.integration
def test_shadow_measures_and_changes_nothing(make_engine: MakeEngine, calibration: Path) -> None:
    guessing = Settings(cache_ratio=0.5, predictor="quasi_hidden", prefetch_depth=1, speculate_layers=(2,))
    plain = make_engine(guessing, calibration=calibration)
    shadowed = make_engine(guessing, calibration=calibration, shadow=True)
    assert text(plain) == text(shadowed)
    assert plain.true_recall == {}
    assert list(shadowed.true_recall) == [2]
    assert 0 < shadowed.true_recall[2] < 1


@pytest.mark.integration
def test_windows_execute_what_single_tokens_do(make_engine: MakeEngine, calibration: Path) -> None:
    """A step over several positions predicts for each of them what a step over that one does."""
    guessing = Settings(cache_ratio=0.5, predictor="hybrid", prefetch_depth=2, speculate_layers="all")
    engine, window = make_engine(guessing, calibration=calibration), [5, 6, 7]
    single, wide = Log(), Log()
    with torch.inference_mode():
        for log, parts in ((single, [[5], [6], [7]]), (wide, [window])):
            engine.forward.prefill(PROMPT, 0, True)
            with engine.forward.watched(log):
                for at, part in enumerate(parts):
                    engine.forward.decode(part, len(PROMPT) + at)
                    engine.forward.report(part, len(PROMPT) + at, len(part), verify=False)
    one = np.concatenate([step.experts for step in single.forwards])
    assert np.array_equal(one, wide.forwards[0].experts)


GUESSING = Settings(cache_ratio=0.5, predictor="estimator", prefetch_depth=1, speculate_layers="all")


@pytest.mark.integration
def test_recordings_say_what_was_executed(make_engine: MakeEngine, calibration: Path, tmp_path: Path) -> None:
    engine = make_engine(GUESSING, calibration=calibration)
    texts = [Prompt("", words(*PROMPT)), Prompt("", words(*PROMPT[::-1]))]
    record(engine, texts, tmp_path / "t.parquet", max_tokens=6, rolled=True, depth=2, stop=False)
    trace = read_trace(tmp_path / "t.parquet")
    assert (trace.meta.speculated, trace.meta.speculated_by) == ((1, 2), "estimator")
    decode = trace.phase == DECODE
    assert np.array_equal(trace.experts[decode, 1:], trace.predictions["estimator", 1][decode, 1:, :2])
    names = {(p.predictor, p.depth) for p in trace.meta.predictions}
    assert names == {
        *((name, depth) for name in PREDICTORS for depth in (1, 2)),
        *((f"{name}_rolled", 2) for name in PREDICTORS),
    }
    requests = load_requests(trace, engine.shape, GUESSING)
    assert not any(request.assumed for request in requests)
    with pytest.raises(MismatchError, match="record again"):
        load_requests(trace, engine.shape, GUESSING.changed(speculate_layers=(1,)))
    with pytest.raises(UsageError, match="predictor 'oracle' cannot be recorded: gate, quasi_hidden"):
        record(engine, texts, tmp_path / "u.parquet", predictors=["oracle"])
