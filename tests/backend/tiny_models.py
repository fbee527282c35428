"""Tiny random checkpoints, saved by `transformers`, with a tokenizer of one token per word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import SplitCosts
from foreload.backend.predict.calibration import Calibration, CalibrationMeta
from foreload.backend.predict.network import Estimator
from foreload.budget import fixed_bytes
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape

VOCAB = 64
CONTEXT = 96
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}


def save_tiny(folder: Path, shard_size: str = "1GB", **fields: Any) -> Path:
    """A random `Qwen3MoeForCausalLM` in `folder`; `fields` replace those of the configuration."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**FIELDS, **fields}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(torch.rand_like(weight) + 0.5)
    model.save_pretrained(folder, max_shard_size=shard_size)
    vocabulary = {f"w{n}": n for n in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def edit_config(folder: Path, **fields: Any) -> Path:
    """Change fields of `config.json` (None: remove); returns its path."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return path


def edit_weights(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """Replace (None: remove) tensors whose names end in the given ones, dots as `__`; returns the weight file."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for suffix, tensor in tensors.items():
        [name] = [name for name in weights if name.endswith(suffix.replace("__", "."))]
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path)
    return path


def save_calibration(folder: Path, model: Path, seed: int = 0, **meta: Any) -> Path:
    """A made-up calibration of a tiny model in `folder`, whose every predictor says something else."""
    checkpoint = Checkpoint.open(str(model))
    layers, experts, hidden = checkpoint.shape.n_moe_layers, checkpoint.shape.experts, checkpoint.shape.hidden
    torch.manual_seed(seed)
    estimator = Estimator(hidden, experts, layers)
    names: list[Any] = ["quasi_hidden", "estimator", "gate"]
    hybrid = tuple(
        tuple(None if layer <= depth else names[(layer + depth) % 3] for layer in range(layers)) for depth in range(4)
    )
    fields: dict[str, Any] = {
        "model": checkpoint.name, "weights_hash": checkpoint.weights_hash, "moe_layers": layers, "experts": experts,
        "hidden": hidden, "texts": ("made up",), "tokens": {"train": 1}, "seed": seed, "unseen_experts": 0,
        "estimator": {}, "hybrid": hybrid, "recall": {}, "software": {},
    }  # fmt: skip
    made = CalibrationMeta(**{**fields, **meta})
    dv, shared = torch.randn(layers, experts, hidden), torch.randn(layers, hidden) / 4
    Calibration(made, dv, shared, estimator).save(folder)
    return folder


def made_up_costs(settings: Settings) -> SplitCosts:
    """A copy takes as long as an expert on the CPU: of two absent experts one is fetched."""
    n = np.arange(3, dtype=np.int64)
    return SplitCosts(io_ns=100, gpu_ns=10 * n, cpu_ns=100 * n)


def vram_for(shape: ModelShape, slots: int, settings: Settings | None = None, context: int = CONTEXT) -> int:
    """Device bytes that hold exactly `slots` persistent slots beside the staging of `settings`, in float32."""
    held = slots + staging_slots(settings or Settings(), shape)
    return fixed_bytes(shape, "float32", context) + held * shape.expert_bytes("float32")


def words(*ids: int) -> str:
    """The text of token ids."""
    return " ".join(f"w{n}" for n in ids)
