"""DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash: latent attention, shared experts, dense first layers, grouped routing.

V2 chooses by softmax (groups by their best expert), V3 and GLM by sigmoid plus a correction bias (groups by the sum of
their two best); layers beyond `num_hidden_layers` (multi-token prediction) are not read.
"""

from __future__ import annotations

from typing import Any

from foreload.backend.models.config import MOST_EXPERTS, MOST_LAYERS, ConfigFields
from foreload.backend.models.family import LAYER, Family
from foreload.backend.models.rope import read_rope
from foreload.shape import Latent, ModelShape, Scoring


def _latent(config: ConfigFields) -> Latent:
    config.only("attention_bias", (False,))
    config.only("rope_interleave", (True,))
    rope_dim = config.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise config.refuse("qk_rope_head_dim", "an even number is needed")
    return Latent(
        0 if config.get("q_lora_rank") is None else config.count("q_lora_rank"),
        config.count("kv_lora_rank"),
        config.count("qk_nope_head_dim"),
        rope_dim,
        config.count("v_head_dim"),
    )


def _groups(config: ConfigFields, experts: int, top_k: int, smallest: int) -> dict[str, int]:
    groups, used = config.count("n_group", 1), config.count("topk_group", 1)
    if experts % groups or experts // groups < smallest:
        raise config.refuse("n_group", f"a divisor of the {experts} experts that leaves {smallest} or more is needed")
    if used > groups or used * (experts // groups) < top_k:
        raise config.refuse("topk_group", f"up to {groups} groups that hold {top_k} experts are needed")
    return {"groups": groups, "top_groups": used} if used < groups else {}


def _moe_layers(config: ConfigFields, layers: int) -> tuple[int, ...]:
    config.only("moe_layer_freq", (1,))
    types = config.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != layers or not all(one in ("dense", "sparse") for one in types):
            raise config.refuse("mlp_layer_types", f"{layers} of dense or sparse are needed")
        found = tuple(layer for layer, kind in enumerate(types) if kind == "sparse")
    else:
        found = tuple(range(config.count("first_k_dense_replace", least=0), layers))
    if not found:
        raise config.refuse("mlp_layer_types" if types is not None else "first_k_dense_replace", "no MoE layer is left")
    return found


def _shape(config: ConfigFields, family: str, scoring: Scoring, **more: Any) -> ModelShape:
    config.only("hidden_act", ("silu",))
    layers, latent, rope = (
        config.count("num_hidden_layers", most=MOST_LAYERS),
        _latent(config),
        read_rope(config, latent=True),
    )
    moe_layers, heads = _moe_layers(config, layers), config.count("num_attention_heads")
    experts, top_k = config.count("n_routed_experts", most=MOST_EXPERTS), config.count("num_experts_per_tok")
    expert_width, shared = config.count("moe_intermediate_size"), config.count("n_shared_experts")
    return ModelShape(
        family=family,
        layers=layers,
        moe_layers=moe_layers,
        hidden=config.count("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=latent.nope_dim + latent.rope_dim,
        vocab=config.count("vocab_size"),
        experts=experts,
        top_k=top_k,
        expert_width=expert_width,
        scoring=scoring,
        rope_theta=rope.theta,
        norm_eps=config.positive("rms_norm_eps"),
        max_positions=config.count("max_position_embeddings"),
        tied_embeddings=config.flag("tie_word_embeddings", False),
        qk_norm="none",
        latent=latent,
        yarn=rope.yarn,
        router_float32=True,
        routed_scale=config.positive("routed_scaling_factor"),
        shared_experts=shared,
        shared_width=shared * expert_width,
        dense_width=config.count("intermediate_size") if len(moe_layers) < layers else 0,
        **more,
    )


def deepseek_v2(config: ConfigFields) -> ModelShape:
    """The shape in a `deepseek_v2` config."""
    config.only("scoring_func", ("softmax",))
    config.only("mlp_bias", (False,))
    config.only("norm_topk_prob", (False,), "implementations of this family differ in what true does: ")
    config.only("topk_method", ("greedy", "group_limited_greedy"))
    experts, top_k = config.count("n_routed_experts", most=MOST_EXPERTS), config.count("num_experts_per_tok")
    grouped = config.get("topk_method") == "group_limited_greedy"
    groups = _groups(config, experts, top_k, 1) if grouped else {}
    return _shape(config, "deepseek_v2", "softmax_topk", normalise_weights=False, **groups)


def _biased(config: ConfigFields, family: str) -> ModelShape:
    config.only("scoring_func", ("sigmoid",))
    config.only("topk_method", ("noaux_tc",))
    experts, top_k = config.count("n_routed_experts", most=MOST_EXPERTS), config.count("num_experts_per_tok")
    return _shape(
        config,
        family,
        "sigmoid_topk",
        normalise_weights=config.flag("norm_topk_prob"),
        correction_bias=True,
        **_groups(config, experts, top_k, 2),
    )


def deepseek_v3(config: ConfigFields) -> ModelShape:
    """The shape in a `deepseek_v3` config."""
    return _biased(config, "deepseek_v3")


def glm4_moe_lite(config: ConfigFields) -> ModelShape:
    """The shape in a `glm4_moe_lite` config."""
    return _biased(config, "glm4_moe_lite")


_NAMES = {
    "correction": (LAYER + "mlp.gate.e_score_correction_bias",),
    **{f"shared_{name}": (f"{LAYER}mlp.shared_experts.{name}_proj.weight",) for name in ("gate", "up", "down")},
}

FAMILIES = (
    Family("deepseek_v2", deepseek_v2, _NAMES),
    Family("deepseek_v3", deepseek_v3, _NAMES, formats=("fp8",)),
    Family("glm4_moe_lite", glm4_moe_lite, _NAMES),
)
