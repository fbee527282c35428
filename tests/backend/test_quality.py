"""Quality of executed predictions: what the engine decodes, and the reference where nothing is predicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import words

from foreload.backend.engine import Engine
from foreload.backend.predict import PREDICTORS
from foreload.backend.predict.training import Watch
from foreload.backend.quality import Sizes, Speculating, Trial, presets, quality
from foreload.backend.recorder import Prompt
from foreload.backend.texts import Texts, read_texts, windows
from foreload.errors import FileError, UsageError
from foreload.quality import ALL, QualityReport
from foreload.settings import Settings

MakeEngine = Callable[..., Engine]
PROMPT = [3, 14, 15, 9, 26, 53, 58, 9, 7, 9]
TEXTS = Texts(
    [Prompt("one", words(*[(7 * n + n * n) % 64 for n in range(1, 90)])), Prompt("two", words(*range(60, 1, -1)))],
    ("made up",),
)
SIZES = Sizes(window=24, prompt_tokens=8, windows=3, greedy_prompts=2, greedy_tokens=12)


@pytest.fixture
def engine(make_engine: MakeEngine, calibration: Path) -> Engine:
    return make_engine(calibration=calibration)


@pytest.mark.integration
@pytest.mark.parametrize("name", PREDICTORS)
def test_one_forward_over_a_text_equals_decoding_it(engine: Engine, name: str) -> None:
    trial = Trial("t", name, (1, 2))
    engine.apply(trial.settings(Settings(cache_ratio=0.5)))
    decoded = engine.generate(PROMPT, 16, stop=False).token_ids
    lens = Speculating(engine.predictor(name), trial.layers, len(PROMPT))
    logits = engine.score(PROMPT + decoded[:-1], lens)
    assert logits.argmax(-1)[len(PROMPT) - 1 :].tolist() == decoded


@pytest.mark.integration
def test_the_exact_variant_is_the_reference(engine: Engine, tiny: Path) -> None:
    from transformers import AutoModelForCausalLM

    report = quality(engine, [Trial("t", "estimator", (1, 2))], TEXTS, SIZES)
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    nats = []
    for texts in TEXTS.by_subject().values():
        for ids in windows(texts, engine.tokenizer, SIZES.window, SIZES.windows):
            with torch.inference_mode():
                scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
            nats += [-float(scores[at - 1, ids[at]]) for at in range(SIZES.prompt_tokens, SIZES.window)]
    exact, trial = report.variants
    figures = exact.figures[ALL]
    assert figures.tokens == len(nats)
    assert figures.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
    assert (figures.kl, figures.top1_agreement, report.loss_pct(exact)) == (0.0, 1.0, 0.0)
    assert exact.greedy is not None
    assert (exact.greedy.identical, exact.greedy.agreement, exact.greedy.first_divergence) == (1.0, 1.0, 12.0)
    assert list(exact.figures) == ["one", "two", ALL]
    assert trial.figures[ALL].kl > 0
    assert trial.figures[ALL].top1_agreement < 1
    assert trial.greedy is not None
    assert trial.greedy.prompts == 4


@pytest.mark.integration
def test_speculation_on_prompts_is_another_thing(engine: Engine) -> None:
    before = engine.settings
    found = quality(engine, presets(3), TEXTS, SIZES).variants
    by_name = {variant.name: variant for variant in found}
    assert list(by_name) == ["exact", "router_pf", "est_pf", "hybrid_pf", "router_pf_prefill"]
    trap = by_name["router_pf_prefill"]
    assert trap.figures[ALL].kl != by_name["router_pf"].figures[ALL].kl
    assert trap.greedy is None
    assert engine.settings == before


@pytest.mark.integration
def test_without_layers_the_lens_changes_nothing(engine: Engine) -> None:
    ids = PROMPT * 2
    exact = engine.score(ids, Watch())
    assert torch.equal(engine.score(ids, Speculating(engine.predictor("estimator"), (), 0)), exact)
    assert torch.equal(engine.score(ids, Speculating(engine.predictor("estimator"), (1, 2), len(ids))), exact)
    assert engine.score(ids, Watch(), logits=False).shape[0] == 0


@pytest.mark.integration
def test_reports_say_what_settings_lose(engine: Engine, tmp_path: Path) -> None:
    report = quality(engine, [Trial("t", "gate", (1,)), Trial("p", "gate", (2,), in_prompts=True)], TEXTS, SIZES)
    report.save(tmp_path / "q.json")
    report = QualityReport.load(tmp_path / "q.json")
    shape, base = engine.shape, {"predictor": "gate", "prefetch_depth": 2}
    assert report.measured_loss_pct(Settings.parse(base), shape) == 0.0
    known = report.measured_loss_pct(Settings.parse({**base, "speculate_layers": [1]}), shape)
    assert known == report.loss_pct(report.variants[1])
    for layers in ([2], "all"):
        assert report.measured_loss_pct(Settings.parse({**base, "speculate_layers": layers}), shape) is None
    (tmp_path / "q.json").write_text('{"schema_version": 1}')
    with pytest.raises(FileError, match="field 'model' is missing"):
        QualityReport.load(tmp_path / "q.json")


@pytest.mark.integration
def test_other_formats_lose_beside_the_exact_model(make_engine: MakeEngine, calibration: Path) -> None:
    exact, chosen = make_engine(), Settings(cache_ratio=0.5, expert_format="int8")
    engine = make_engine(chosen, calibration=calibration)
    report = quality(engine, [Trial("settings", "none", ()), Trial("t", "gate", (1,))], TEXTS, SIZES, exact=exact)
    alone = quality(exact, [Trial("g", "gate", (1,))], TEXTS, SIZES)
    assert report.variants[0].figures == alone.variants[0].figures
    assert report.variants[0].greedy == alone.variants[0].greedy
    assert [v.expert_format for v in report.variants] == [None, "int8", "int8"]
    assert 0 < report.variants[1].figures[ALL].kl < report.variants[2].figures[ALL].kl
    assert report.measured_loss_pct(chosen, engine.shape) == report.loss_pct(report.variants[1])
    guessing = {"predictor": "gate", "prefetch_depth": 1, "speculate_layers": [1]}
    both = chosen.changed(**guessing)
    assert report.measured_loss_pct(both, engine.shape) == report.loss_pct(report.variants[2])
    assert report.measured_loss_pct(Settings.parse(guessing), engine.shape) is None
    assert report.measured_loss_pct(chosen.changed(expert_format="fp8"), engine.shape) is None


@pytest.mark.integration
def test_too_little_text(engine: Engine) -> None:
    with pytest.raises(UsageError, match="no subject of the text fills one window of 90 tokens"):
        quality(engine, presets(3), TEXTS, Sizes(window=90))
    with pytest.raises(UsageError, match="64 prompt tokens must be fewer than the 64 of a window"):
        quality(engine, presets(3), TEXTS, Sizes(window=64))
    with pytest.raises(UsageError, match="97 tokens at once exceed the context of 96 tokens"):
        engine.score([1] * 97, Watch())


@pytest.mark.unit
def test_text_files(tmp_path: Path) -> None:
    lines, plain = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text('{"text": "x", "kind": "k"}\n\n{"text": "y", "subject": "s"}\n')
    plain.write_text("one\n\ntwo\n")
    found = read_texts([lines, plain])
    assert found.by_subject() == {"k": ["x"], "s": ["y"], "b": ["one\n\ntwo\n"]}
    assert [source.split()[0] for source in found.sources] == ["a.jsonl", "b.txt"]
    shuffled = found.shuffled(1).documents
    assert sorted(shuffled, key=str) == sorted(found.documents, key=str)
    assert shuffled == found.shuffled(1).documents
    for name, text, said in (
        ("e.txt", " \n", "holds no text"),
        ("e.jsonl", "{", "line 1 is no JSON object"),
        ("e.jsonl", "\xff", "is not UTF-8"),
    ):
        (tmp_path / name).write_bytes(text.encode("latin-1"))
        with pytest.raises(FileError, match=said):
            read_texts([tmp_path / name])
