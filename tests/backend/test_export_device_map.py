"""The device map, against models of transformers and the checks of accelerate."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from foreload.backend.export import Target, export
from foreload.backend.models.checkpoint import read_shape
from foreload.settings import Settings

SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
    "gpt_oss": ("GptOss", {"num_local_experts": 4, "head_dim": 8}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "first_k_dense_replace": 1, "q_lora_rank": None}),
    "deepseek_v3": (
        "DeepseekV3",
        {**LATENT, "first_k_dense_replace": 1, "q_lora_rank": 8, "n_group": 1, "topk_group": 1},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {"moe_intermediate_size": 16, "num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "glm4_moe_lite": ("Glm4MoeLite", {**LATENT, "q_lora_rank": 8}),
}


@pytest.mark.unit
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_covered_exactly_once(family: str) -> None:
    modeling = pytest.importorskip("accelerate.utils.modeling", reason="accelerate is not installed")
    name, fields = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    shape = read_shape(config.to_dict(), family)[1]
    settings = Settings(slots_per_layer=(shape.experts,) + (0,) * (shape.n_moe_layers - 1))
    made = export("device-map", Target(shape, settings, "m"))
    placed: dict[str, Any] = json.loads(made.files["device_map.json"])
    modeling.check_device_map(model, placed)
    modules = {module for module, _ in model.named_modules()}
    assert set(placed) <= modules
    on_cpu = set()
    for parameter, _ in (*model.named_parameters(), *model.named_buffers()):
        covering = [module for module in placed if parameter.startswith(f"{module}.")]
        assert len(covering) == 1, parameter
        if placed[covering[0]] == "cpu":
            on_cpu.add(parameter)
    experts = {n for n, _ in model.named_parameters() if ".mlp.experts." in n}
    first = f"model.layers.{shape.moe_layers[0]}."
    assert on_cpu == {n for n in experts if not n.startswith(first)}


@pytest.mark.integration
def test_transformers_loads_by_the_map(tmp_path: Any) -> None:
    """From a file on disk, with the GPU of the map replaced by the CPU: the same logits, no module left out."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    name, fields = FAMILIES["qwen3_moe"]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(tmp_path)
    shape = read_shape(config.to_dict(), "test")[1]
    made = export("device-map", Target(shape, Settings(cache_ratio=0.0), "m"))
    placed = dict.fromkeys(json.loads(made.files["device_map.json"]), "cpu")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map=placed, dtype="auto")
    tokens = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
