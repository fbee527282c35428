"""Qwen3-MoE, Qwen2-MoE and OLMoE: softmax over all experts in fp32, then top-k (`Qwen3MoeForCausalLM` and others).

Qwen3 norms queries and keys per head, OLMoE over their full width, Qwen2 not at all; Qwen2 has a gated shared expert.
"""

from __future__ import annotations

from typing import Any

from foreload.backend.models.config import MOST_EXPERTS, MOST_LAYERS, ConfigFields
from foreload.backend.models.family import LAYER, Family
from foreload.backend.models.rope import read_rope
from foreload.shape import ModelShape


def common(config: ConfigFields) -> dict[str, Any]:
    """The fields that all MoE families with ordinary attention spell alike; FileError names one that cannot be run."""
    fields = attention_fields(config)
    moe_layers = tuple(range(fields["layers"]))
    return {**fields, "moe_layers": moe_layers, "top_k": config.count("num_experts_per_tok")}


def attention_fields(config: ConfigFields) -> dict[str, Any]:
    """The fields of a decoder with ordinary attention, whatever stands between; FileError as `common`."""
    config.only("hidden_act", ("silu",))
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", heads)
    head_dim = config.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of the {heads} attention heads is needed")
    if head_dim % 2:
        raise config.refuse("head_dim", "an even number is needed")
    rope = read_rope(config)
    return {
        "layers": config.count("num_hidden_layers", most=MOST_LAYERS),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab": config.count("vocab_size"),
        "rope_theta": rope.theta,
        "yarn": rope.yarn,
        "norm_eps": config.positive("rms_norm_eps"),
        "max_positions": config.count("max_position_embeddings"),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
    }


def expert_count(config: ConfigFields) -> int:
    """The number of experts, in either spelling; FileError if both are there and differ."""
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    counts = {config.count(name, most=MOST_EXPERTS) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise config.refuse("num_local_experts", f"num_experts says {config.count('num_experts')}")
    return counts.pop()


def _sparse_layers(config: ConfigFields, layers: int) -> tuple[int, ...]:
    """MoE layers by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(n) is int and 0 <= n < layers for n in dense):
        raise config.refuse("mlp_only_layers", f"a list of layers from 0 to {layers - 1} is needed")
    step = config.count("decoder_sparse_step", 1)
    found = tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0)
    if not found:
        raise config.refuse("decoder_sparse_step" if step > layers else "mlp_only_layers", "no MoE layer is left")
    return found


def _qwen(config: ConfigFields) -> dict[str, Any]:
    fields = common(config)
    if config.get("sliding_window") is not None and config.flag("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "false is needed")
    moe_layers = _sparse_layers(config, fields["layers"])
    dense = len(moe_layers) < fields["layers"]
    return {
        **fields,
        "moe_layers": moe_layers,
        "dense_width": config.count("intermediate_size") if dense else 0,
        "experts": expert_count(config),
        "expert_width": config.count("moe_intermediate_size"),
        "scoring": "softmax_topk",
        "normalise_weights": config.flag("norm_topk_prob", False),
    }


def qwen3_moe(config: ConfigFields) -> ModelShape:
    """The shape in a `qwen3_moe` config."""
    config.only("attention_bias", (False,))
    return ModelShape(family="qwen3_moe", **_qwen(config))


def qwen2_moe(config: ConfigFields) -> ModelShape:
    """The shape in a `qwen2_moe` config."""
    return ModelShape(
        family="qwen2_moe",
        **_qwen(config),
        qk_norm="none",
        qkv_bias=config.flag("qkv_bias", True),
        shared_experts=1,
        shared_width=config.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def olmoe(config: ConfigFields) -> ModelShape:
    """The shape in an `olmoe` config."""
    config.only("attention_bias", (False,))
    clip = config.get("clip_qkv")
    return ModelShape(
        family="olmoe",
        **common(config),
        experts=expert_count(config),
        expert_width=config.count("intermediate_size"),
        scoring="softmax_topk",
        normalise_weights=config.flag("norm_topk_prob", False),
        qk_norm="full",
        clip_qkv=0.0 if clip is None else config.positive("clip_qkv"),
    )


_SHARED = {f"shared_{name}": (f"{LAYER}mlp.shared_expert.{name}_proj.weight",) for name in ("gate", "up", "down")}

FAMILIES = (
    Family("qwen3_moe", qwen3_moe),
    Family("qwen2_moe", qwen2_moe, {**_SHARED, "shared_switch": (LAYER + "mlp.shared_expert_gate.weight",)}),
    Family("olmoe", olmoe),
)
