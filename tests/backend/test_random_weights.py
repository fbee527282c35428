"""`shape:NAME`: random weights that are always the same, and that an engine runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.published import published_names
from foreload.budget import fixed_bytes
from foreload.errors import UsageError
from foreload.settings import Settings

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
BY_NAME: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"head_dim": 16, "moe_intermediate_size": 32},
    "gpt-oss-20b": {"head_dim": 16},
    "gpt-oss-120b": {"head_dim": 16},
    "glm-4.7-flash": {"moe_intermediate_size": 32, **LATENT},
    "deepseek-v2-lite": {"moe_intermediate_size": 32, **LATENT, "q_lora_rank": None},
}


def toy(name: str) -> Checkpoint:
    """The published shape with smaller sizes, all else as published."""
    return Checkpoint.random(name, **SMALL, **BY_NAME.get(name, {}))


@pytest.mark.integration
@pytest.mark.parametrize("name", published_names())
def test_an_engine_runs_on_it(name: str) -> None:
    checkpoint = toy(name)
    with Engine(checkpoint, EngineOptions(context_tokens=64), Settings(cache_ratio=0.25)) as engine:
        prompt = engine.tokenizer.encode("random weights")
        one = engine.generate(prompt, 6).token_ids
        assert engine.generate(prompt, 6).token_ids == one
        assert len(one) == 6
        counted = engine.brain.counters.sum()
        assert engine.forward.decoder.dense_bytes == fixed_bytes(checkpoint.shape, "float32", 64)
    assert counted > 0
    with Engine(checkpoint, EngineOptions(context_tokens=64), Settings(cache_ratio=1.0)) as engine:
        assert engine.generate(prompt, 6).token_ids == one
        slab = engine.slab
        for layer in range(slab.shape.n_moe_layers):
            assert all(torch.isfinite(part).all() for part in slab.views(layer, 1)[:2])


@pytest.mark.unit
def test_tensors_do_not_depend_on_the_order_they_are_made_in() -> None:
    one = {(at, expert, part): t for at, expert, part, t in toy("olmoe-1b-7b").read_experts()}
    checkpoint = toy("olmoe-1b-7b")
    dense = {(layer, name): t for layer, name, t in checkpoint.read_dense()}
    two = {(at, expert, part): t for at, expert, part, t in checkpoint.read_experts()}
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert len({float(t.flatten()[0]) for t in one.values()}) > len(one) // 2
    assert {float(t.float().std()) for (_, name), t in dense.items() if "norm" in name} == {0.0}


@pytest.mark.unit
def test_hash_tells_shapes_apart() -> None:
    assert toy("olmoe-1b-7b").weights_hash == toy("olmoe-1b-7b").weights_hash
    assert toy("gpt-oss-20b").weights_hash != toy("gpt-oss-120b").weights_hash


@pytest.mark.unit
def test_unknown_shape_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"shape 'gpt-5' is not known: known are deepseek-v2-lite, glm"):
        Checkpoint.open("shape:gpt-5")


@pytest.mark.unit
def test_text_is_bytes_and_back() -> None:
    tokenizer = Checkpoint.open("shape:olmoe-1b-7b").tokenizer()
    assert tokenizer.decode(tokenizer.encode("Foreload ü")) == "Foreload ü"
    assert tokenizer.decode([72, 50_000]) == "H<50000>"
    assert max(toy("olmoe-1b-7b").tokenizer().encode("ü" * 300)) < SMALL["vocab_size"]
