"""Qwen3-MoE: pre-norm decoder, per-head q/k norm, softmax over all experts then top-k (`Qwen3MoeForCausalLM`)."""

from __future__ import annotations

from foreload.backend.models.family import ConfigFields, Family
from foreload.shape import ModelShape


def _rope_theta(config: ConfigFields) -> float:
    rope = config.get("rope_parameters") or {}
    if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
        raise config.refuse("rope_parameters", "only the default rotary embedding is known for qwen3_moe")
    if config.get("rope_scaling") not in (None, {}):
        raise config.refuse("rope_scaling", "scaled rotary embeddings are not known for qwen3_moe: null is needed")
    if isinstance(rope, dict) and isinstance(rope.get("rope_theta"), int | float):
        return float(rope["rope_theta"])
    return float(config.number("rope_theta"))


def shape(config: ConfigFields) -> ModelShape:
    """The shape in a `qwen3_moe` config; FileError names a field that is missing or cannot be run."""
    layers = config.count("num_hidden_layers")
    if config.get("mlp_only_layers") or config.count("decoder_sparse_step", 1) != 1:
        raise config.refuse(
            "mlp_only_layers", "dense layers between MoE layers are not known for qwen3_moe: [] is needed"
        )
    if config.get("hidden_act") not in (None, "silu"):
        raise config.refuse("hidden_act", "silu is needed")
    if config.flag("attention_bias", False):
        raise config.refuse("attention_bias", "false is needed")
    if config.get("sliding_window") is not None and config.flag("use_sliding_window", False):
        raise config.refuse("use_sliding_window", "false is needed")
    heads = config.count("num_attention_heads")
    hidden = config.count("hidden_size")
    kv_heads, head_dim = config.count("num_key_value_heads"), config.count("head_dim", hidden // heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"a divisor of the {heads} attention heads is needed")
    if head_dim % 2:
        raise config.refuse("head_dim", "an even number is needed")
    return ModelShape(
        family="qwen3_moe",
        layers=layers,
        moe_layers=tuple(range(layers)),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=config.count("vocab_size"),
        experts=config.count("num_experts" if config.get("num_local_experts") is None else "num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        expert_width=config.count("moe_intermediate_size"),
        scoring="softmax_topk",
        normalise_weights=config.flag("norm_topk_prob", False),
        rope_theta=_rope_theta(config),
        norm_eps=config.number("rms_norm_eps"),
        max_positions=config.count("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
    )


_LAYER = "model.layers.{layer}."

FAMILY = Family(
    model_type="qwen3_moe",
    shape=shape,
    embed="model.embed_tokens.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
    layer={
        "input_norm": _LAYER + "input_layernorm.weight",
        "q": _LAYER + "self_attn.q_proj.weight",
        "k": _LAYER + "self_attn.k_proj.weight",
        "v": _LAYER + "self_attn.v_proj.weight",
        "o": _LAYER + "self_attn.o_proj.weight",
        "q_norm": _LAYER + "self_attn.q_norm.weight",
        "k_norm": _LAYER + "self_attn.k_norm.weight",
        "moe_norm": _LAYER + "post_attention_layernorm.weight",
        "gate": _LAYER + "mlp.gate.weight",
    },
    expert=(
        _LAYER + "mlp.experts.{expert}.gate_proj.weight",
        _LAYER + "mlp.experts.{expert}.up_proj.weight",
        _LAYER + "mlp.experts.{expert}.down_proj.weight",
    ),
)
