"""gpt-oss: sinks, alternating sliding window, YaRN, clamped SwiGLU with biases, biased router (`GptOssForCausalLM`).

Experts are stacked on disk, either packed (MXFP4 blocks and scales, rows [out]) or as floats (transposed, [in, out]).
"""

from __future__ import annotations

from typing import Any

from foreload.backend.models.config import ConfigFields
from foreload.backend.models.family import LAYER, ExpertLayout, ExpertPart, Family
from foreload.backend.models.qwen import common, expert_count
from foreload.shape import ModelShape

LAYER_TYPES = ("sliding_attention", "full_attention")


def gpt_oss(config: ConfigFields) -> ModelShape:
    """The shape in a `gpt_oss` config."""
    fields = common(config)
    config.only("attention_bias", (True,))
    return ModelShape(
        family="gpt_oss",
        **fields,
        experts=expert_count(config),
        expert_width=config.count("intermediate_size"),
        scoring="topk_softmax",
        normalise_weights=True,
        qk_norm="none",
        qkv_bias=True,
        output_bias=True,
        sinks=True,
        windows=_windows(config, fields),
        activation="swiglu_oai",
        swiglu_alpha=config.positive("swiglu_alpha", 1.702),
        swiglu_limit=config.positive("swiglu_limit", 7.0),
        expert_bias=True,
        router_bias=True,
    )


def _windows(config: ConfigFields, fields: dict[str, Any]) -> tuple[int, ...]:
    layers = fields["layers"]
    types = config.get("layer_types")
    if types is None:
        types = [LAYER_TYPES[layer % 2] for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or not all(one in LAYER_TYPES for one in types):
        raise config.refuse("layer_types", f"{layers} of {' or '.join(LAYER_TYPES)} are needed")
    window = config.count("sliding_window") if LAYER_TYPES[0] in types else 0
    return tuple(window if one == LAYER_TYPES[0] else 0 for one in types)


_MATRICES: dict[ExpertPart, str] = {
    "gate_up": LAYER + "mlp.experts.gate_up_proj",
    "down": LAYER + "mlp.experts.down_proj",
}
_PARTS: dict[ExpertPart, str] = {
    **_MATRICES,
    "gate_up_bias": _MATRICES["gate_up"] + "_bias",
    "down_bias": _MATRICES["down"] + "_bias",
}

FAMILIES = (
    Family(
        "gpt_oss",
        gpt_oss,
        {"gate": (LAYER + "mlp.router.weight",), "gate_bias": (LAYER + "mlp.router.bias",)},
        (
            ExpertLayout(_PARTS, stacked=True, stored="mxfp4"),
            ExpertLayout(_PARTS, stacked=True, transposed=True),
        ),
        formats=("mxfp4",),
    ),
)
