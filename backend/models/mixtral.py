"""Mixtral: softmax over all experts, then top-k, always normalised (`MixtralForCausalLM`)."""

from __future__ import annotations

from foreload.backend.models.config import ConfigFields
from foreload.backend.models.family import LAYER, STACKED, ExpertLayout, Family
from foreload.backend.models.qwen import common, expert_count
from foreload.shape import ModelShape


def mixtral(config: ConfigFields) -> ModelShape:
    """The shape in a `mixtral` config."""
    fields = common(config)
    window = config.get("sliding_window")
    windows = () if window is None else (config.count("sliding_window"),) * fields["layers"]
    return ModelShape(
        family="mixtral",
        **fields,
        experts=expert_count(config),
        expert_width=config.count("intermediate_size"),
        scoring="softmax_topk",
        normalise_weights=True,
        qk_norm="none",
        windows=windows,
    )


_EXPERT = LAYER + "block_sparse_moe.experts.{expert}."

FAMILIES = (
    Family(
        "mixtral",
        mixtral,
        {"gate": (LAYER + "block_sparse_moe.gate.weight", LAYER + "mlp.gate.weight")},
        (
            ExpertLayout({"gate": _EXPERT + "w1.weight", "up": _EXPERT + "w3.weight", "down": _EXPERT + "w2.weight"}),
            STACKED,
        ),
    ),
)
