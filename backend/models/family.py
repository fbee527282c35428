"""What a model family is: how its configuration becomes a `ModelShape` and how its tensors are called.

One file per family, or group of families, knows the Hugging Face spellings; everything after sees `ModelShape`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from foreload.backend.models.config import ConfigFields
from foreload.shape import ModelShape

ExpertPart = Literal["gate", "up", "gate_up", "down", "gate_up_bias", "down_bias"]
Stored = Literal["float", "mxfp4", "fp8_tile"]

LAYER = "model.layers.{layer}."
_ATTENTION = LAYER + "self_attn."

STANDARD: Mapping[str, tuple[str, ...]] = {
    "embed": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
    "input_norm": (LAYER + "input_layernorm.weight",),
    "moe_norm": (LAYER + "post_attention_layernorm.weight",),
    **{name: (f"{_ATTENTION}{name}_proj.weight",) for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")},
    **{f"{name}_bias": (f"{_ATTENTION}{name}_proj.bias",) for name in ("q", "k", "v", "o")},
    "q_norm": (_ATTENTION + "q_norm.weight",),
    "k_norm": (_ATTENTION + "k_norm.weight",),
    "sinks": (_ATTENTION + "sinks",),
    "q_a_norm": (_ATTENTION + "q_a_layernorm.weight",),
    "kv_a": (_ATTENTION + "kv_a_proj_with_mqa.weight",),
    "kv_a_norm": (_ATTENTION + "kv_a_layernorm.weight",),
    "gate": (LAYER + "mlp.gate.weight",),
    **{f"dense_{name}": (f"{LAYER}mlp.{name}_proj.weight",) for name in ("gate", "up", "down")},
}
"""Our name of each tensor outside the experts -> its spellings, most common first. Names are formatted with `layer`."""


@dataclass(frozen=True)
class ExpertLayout:
    """One way experts are laid out on disk; names are formatted with `layer` and, if they are per expert, `expert`.

    Stacked tensors hold all experts of a layer along their first axis; `transposed` ones are [in, out]. `mxfp4` names
    are followed by `_blocks` and `_scales`, biases are plain.
    """

    parts: Mapping[ExpertPart, str]
    stacked: bool = False
    transposed: bool = False
    stored: Stored = "float"

    def first(self, layer: int) -> str:
        """A tensor whose presence tells this layout."""
        name = next(iter(self.parts.values())).format(layer=layer, expert=0)
        return name + ("_blocks" if self.stored == "mxfp4" else "")


PER_EXPERT = ExpertLayout(
    {name: f"{LAYER}mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down")}
)
STACKED = ExpertLayout(
    {"gate_up": LAYER + "mlp.experts.gate_up_proj", "down": LAYER + "mlp.experts.down_proj"}, stacked=True
)


@dataclass(frozen=True)
class Family:
    """How one `model_type` is read. `names` adds to, or replaces, those of `STANDARD`."""

    model_type: str
    shape: Callable[[ConfigFields], ModelShape]
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layouts: tuple[ExpertLayout, ...] = (PER_EXPERT, STACKED)
    formats: tuple[str, ...] = ()
    """Values of `quantization_config.quant_method` that can be read."""

    def spellings(self, name: str, layer: int | None) -> list[str]:
        """The possible names on disk of our tensor `name`."""
        known = self.names.get(name) or STANDARD[name]
        return [spelling.format(layer=layer) for spelling in known]
