"""transformers and accelerate: a `device_map` by module, each layer's experts on a GPU or the CPU.

Transformers 5 holds a layer's experts in one fused module, so whole layers move. Every module is named once, and no
entry is the parent of another.
"""

from __future__ import annotations

import json

from foreload.backend.export.base import CPU, Exported, Exporter, Placement, Target, unexpressed
from foreload.backend.export.placement import whole_layers
from foreload.backend.export.vllm import ends
from foreload.shape import ModelShape

NAME = "device-map"
CHECKED = "transformers 5.24 and accelerate 1.15: every parameter of each family's model is covered exactly once"
EXPRESSES = frozenset({"slots_per_layer", "cache_ratio", "headroom_bytes"})
FILE = "device_map.json"
ROUTERS = {"gpt_oss": "mlp.router"}


def device_map(shape: ModelShape, placement: Placement) -> dict[str, int | str]:
    """Module name -> device number or `cpu`."""
    last = placement.dense[-1]
    found: dict[str, int | str] = {"model.embed_tokens": placement.dense[0], "model.rotary_emb": placement.dense[0]}
    experts = dict(zip(shape.moe_layers, placement.experts, strict=True))
    for layer, device in enumerate(placement.dense):
        prefix = f"model.layers.{layer}."
        for module in ("input_layernorm", "self_attn", "post_attention_layernorm"):
            found[prefix + module] = device
        if layer not in experts:
            found[f"{prefix}mlp"] = device
            continue
        for module in _around_experts(shape):
            found[prefix + module] = device
        found[f"{prefix}mlp.experts"] = "cpu" if experts[layer] == CPU else experts[layer]
    return {**found, "model.norm": last, "lm_head": last}


def _around_experts(shape: ModelShape) -> list[str]:
    modules = [ROUTERS.get(shape.family, "mlp.gate")]
    if shape.shared_width:
        modules += ["mlp.shared_expert", "mlp.shared_expert_gate"] if shape.shared_gate else ["mlp.shared_experts"]
    return modules


def make(target: Target) -> Exported:
    """The map as JSON; BudgetError if the devices cannot hold the settings."""
    placement = whole_layers(target, ends(target.shape))
    content = json.dumps(device_map(target.shape, placement), indent=1) + "\n"
    notes = [*unexpressed(target.settings, EXPRESSES, NAME)]
    notes.append(
        "load it with AutoModelForCausalLM.from_pretrained(MODEL, dtype='auto', "
        "device_map=json.load(open('device_map.json')))"
    )
    if CPU in placement.experts:
        notes.append("all experts of a layer on the CPU are copied to the GPU in every step: there is no cache")
        if target.shape.family == "gpt_oss":
            notes.append(
                "4-bit experts are stored as bfloat16 as soon as one module is on the CPU: 3.8 times the memory"
            )
    return Exported(NAME, CHECKED, files={FILE: content.encode()}, notes=tuple(notes), placement=placement)


EXPORTER = Exporter(NAME, CHECKED, EXPRESSES, make, several_gpus=True)
