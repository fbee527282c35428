"""Draft models: their text is that of `transformers`, what was rejected leaves nothing behind, others are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.assets import ASSETS
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.recorder import Prompt, record
from foreload.backend.sampling import Sampler, Sampling
from foreload.backend.speculate.model import ModelDrafter, draft_bytes, open_draft
from foreload.errors import FileError, MismatchError, SettingsError, UsageError
from foreload.settings import Settings
from foreload.traces.io import read_trace

CONTEXT, GREEDY = 128, Sampler(Sampling())
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}


def drafter(draft: Checkpoint, vocab: int) -> ModelDrafter:
    with torch.inference_mode():
        return ModelDrafter(draft, CPU, torch.float32, CONTEXT, vocab)


@pytest.fixture(scope="module")
def bundled() -> ModelDrafter:
    return drafter(Checkpoint.open_dense("draft"), 4096)


@pytest.fixture(scope="module")
def twin() -> Any:
    """The bundled draft model in `transformers`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSETS / "draft", dtype=torch.float32).eval()


def continued(model: Any, text: list[int], tokens: int) -> list[int]:
    """Greedy continuation by whole forwards."""
    found = list(text)
    with torch.inference_mode():
        for _ in range(tokens):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(text) :]


@pytest.mark.integration
def test_drafts_are_the_models_greedy_text(bundled: ModelDrafter, twin: Any, prompts: list[list[int]]) -> None:
    for prompt in prompts[:4]:
        with torch.inference_mode():
            bundled.start(prompt)
            assert bundled.propose(prompt, 6, GREEDY).tokens == continued(twin, prompt, 6)


@pytest.mark.integration
@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 4095)), min_size=1, max_size=6))
def test_rejected_drafts_are_rolled_back(bundled: ModelDrafter, steps: list[tuple[int, int, int]]) -> None:
    """After any course of windows, the next drafts are those of a model that has only seen the text."""
    text = [5, 17, 99, 5, 17]
    with torch.inference_mode():
        bundled.start(text)
        for gamma, accepted, token in steps:
            tokens = bundled.propose(text, gamma, GREEDY).tokens
            text = [*text, *tokens[:accepted], token]
        found = bundled.propose(text, 3, GREEDY).tokens
        bundled.start(text)
        assert found == bundled.propose(text, 3, GREEDY).tokens


@pytest.mark.integration
def test_drawn_drafts_come_with_their_distributions(bundled: ModelDrafter, prompts: list[list[int]]) -> None:
    sampler = Sampler(Sampling(temperature=0.9, top_p=0.9, seed=1))
    with torch.inference_mode():
        bundled.start(prompts[0])
        proposal = bundled.propose(prompts[0], 4, sampler)
    assert proposal.distributions is not None
    assert proposal.distributions.shape == (4, 4096)
    torch.testing.assert_close(proposal.distributions.sum(-1), torch.ones(4, dtype=torch.float64))
    assert all(row[token] > 0 for row, token in zip(proposal.distributions, proposal.tokens, strict=True))


@pytest.mark.integration
@pytest.mark.parametrize("family", ["Qwen3", "Qwen2", "Llama", "Mistral"])
def test_dense_families(family: str, tmp_path: Path) -> None:
    import transformers

    extra = {"Qwen3": {"head_dim": 8}, "Mistral": {"sliding_window": None}}.get(family, {})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**TINY, **extra))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
    model.eval().save_pretrained(tmp_path)
    text = [3, 1, 4, 1, 5, 9, 2, 6]
    ours = drafter(Checkpoint.open_dense(str(tmp_path)), 64)
    with torch.inference_mode():
        ours.start(text)
        found = ours._logits(torch.tensor(text[-1:]), len(text) - 1)
        torch.testing.assert_close(found, model(torch.tensor([text])).logits[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.integration
def test_tokens_outside_either_vocabulary_are_not_proposed() -> None:
    for vocab in (50, 5000):
        small = drafter(Checkpoint.open_dense("draft"), vocab)
        with torch.inference_mode():
            small.start([1, 2, 3])
            proposal = small.propose([1, 2, 3], 5, Sampler(Sampling(temperature=1.0)))
        assert proposal.distributions is not None
        assert proposal.distributions.shape == (5, vocab)
        assert max(proposal.tokens) < min(vocab, 4096)


# On an engine


@pytest.mark.integration
def test_a_model_drafts_and_changes_no_text(engine: Engine, prompts: list[list[int]], tmp_path: Path) -> None:
    engine.apply(Settings(cache_ratio=0.25))
    plain = engine.generate(prompts[1], 32, stop=False)
    engine.apply(Settings.parse({"cache_ratio": 0.25, "draft": {"kind": "model", "gamma": 3}}))
    texts = [Prompt("", engine.tokenizer.decode(prompts[1]))]
    [drafted] = record(engine, texts, tmp_path / "t.parquet", prompt_tokens=96, max_tokens=32, stop=False)
    assert drafted.token_ids == plain.token_ids
    assert 1 < drafted.tokens_per_step < 4
    held = read_trace(tmp_path / "t.parquet").meta.sampling
    assert (held["draft"], held["gamma"], held["draft_model"]) == ("model", 3, "draft")


@pytest.mark.integration
def test_another_draft_model_needs_a_reload(engine: Engine) -> None:
    before = engine.settings
    with pytest.raises(
        SettingsError, match=r"draft\.model 'elsewhere' needs a reload of the engine: 'draft' is loaded"
    ):
        engine.apply(Settings.parse({"draft": {"kind": "model", "gamma": 2, "model": "elsewhere"}}))
    assert engine.settings == before
    with Engine.load("mini", EngineOptions(context_tokens=64), Settings(cache_ratio=0.0)) as bare:
        with pytest.raises(SettingsError, match="'draft' needs a reload of the engine: none is loaded"):
            bare.apply(Settings.parse({"cache_ratio": 0.0, "draft": {"kind": "model", "gamma": 2}}))
        assert bare.drafts.model is None


@pytest.mark.integration
def test_a_draft_models_bytes_are_in_the_budget(engine: Engine) -> None:
    assert engine.drafts.model is not None
    size = draft_bytes(Checkpoint.open_dense("draft"), "float32", 256)
    assert engine.drafts.model.decoder.dense_bytes == size
    options = EngineOptions(context_tokens=256, vram_bytes=64 << 20)
    limits = []
    for draft in (None, "draft"):
        with Engine.load("mini", options, Settings.parse({"cache_ratio": 0.0, "draft": {"model": draft}})) as one:
            limits.append(one.slot_limit)
    assert (limits[0] - limits[1]) * engine.expert_bytes == pytest.approx(size, abs=engine.expert_bytes)


# Refused before anything is loaded


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the bundled draft model to spoil, where loading a weight fails the test."""
    monkeypatch.setattr("foreload.backend.models.folder.WeightFolder.read", lambda *_: pytest.fail("weights were read"))
    return shutil.copytree(ASSETS / "draft", tmp_path / "other")


def refused(folder: Path) -> str:
    chosen = Settings.parse({"cache_ratio": 0.0, "draft": {"kind": "model", "gamma": 2, "model": str(folder)}})
    with pytest.raises((MismatchError, UsageError)) as caught:
        Engine.load("mini", EngineOptions(context_tokens=256), chosen)
    return str(caught.value)


def changed(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.integration
def test_a_draft_with_another_tokenizer_is_refused(other: Path) -> None:
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "draft model 'other': its tokenizer (" in refused(other)


@pytest.mark.integration
def test_a_tokenizer_that_is_only_written_differently_is_the_same(other: Path) -> None:
    path = other / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=3))
    target = Checkpoint.open("mini")
    assert open_draft(str(other), target, 256).tokenizer_hash != target.tokenizer_hash


@pytest.mark.integration
def test_draft_models_that_cannot_serve_are_refused(other: Path) -> None:
    assert "is no folder here: give a Hugging Face folder or draft" in refused(other / "nothing")
    changed(other / "config.json", max_position_embeddings=64)
    assert "draft model 'other': holds 64 positions, context_tokens is 256" in refused(other)
    changed(other / "config.json", model_type="qwen3_moe")
    assert "model_type 'qwen3_moe' is not known: known are qwen3, qwen2, llama, mistral" in refused(other)
    changed(other / "config.json", model_type="llama", mlp_bias=True)
    with pytest.raises(FileError, match="mlp_bias"):
        Checkpoint.open_dense(str(other))
