"""Dense decoders that may draft: Qwen3, Qwen2, Llama and Mistral (`Qwen3ForCausalLM` and others). No experts."""

from __future__ import annotations

from typing import Any

from foreload.backend.models.config import ConfigFields
from foreload.backend.models.family import Family
from foreload.backend.models.qwen import attention_fields
from foreload.shape import ModelShape


def _dense(config: ConfigFields, **fields: Any) -> ModelShape:
    """A shape without MoE layers; FileError names a field that cannot be run."""
    if config.get("sliding_window") is not None and config.flag("use_sliding_window", True):
        raise config.refuse("sliding_window", "null is needed")
    return ModelShape(
        **attention_fields(config),
        moe_layers=(),
        experts=0,
        top_k=0,
        expert_width=0,
        scoring="softmax_topk",
        normalise_weights=False,
        dense_width=config.count("intermediate_size"),
        **fields,
    )


def qwen3(config: ConfigFields) -> ModelShape:
    """The shape in a `qwen3` config."""
    config.only("attention_bias", (False,))
    return _dense(config, family="qwen3")


def qwen2(config: ConfigFields) -> ModelShape:
    """The shape in a `qwen2` config."""
    return _dense(config, family="qwen2", qk_norm="none", qkv_bias=True)


def llama(config: ConfigFields) -> ModelShape:
    """The shape in a `llama` config."""
    config.only("attention_bias", (False,))
    config.only("mlp_bias", (False,))
    return _dense(config, family="llama", qk_norm="none")


def mistral(config: ConfigFields) -> ModelShape:
    """The shape in a `mistral` config."""
    return _dense(config, family="mistral", qk_norm="none")


FAMILIES = (Family("qwen3", qwen3), Family("qwen2", qwen2), Family("llama", llama), Family("mistral", mistral))
