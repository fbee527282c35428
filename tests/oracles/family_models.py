"""Tiny random checkpoints of every family, made and saved by `transformers` in the layouts that people download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCAB, HIDDEN, TILE = 80, 64, 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
QWEN: dict[str, Any] = {**COMMON, "intermediate_size": 48, "moe_intermediate_size": 32, "num_experts": 8}
LATENT: dict[str, Any] = {
    **COMMON,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "norm_topk_prob": True,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Tiny:
    """A configuration class of `transformers` and the fields of a tiny model."""

    config: str
    fields: dict[str, Any]

    def make(self) -> Any:
        """The random model, norms and biases random too."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.fields)
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith("norm.weight"):
                    tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
                elif name.endswith(("bias", "sinks")):
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
        return model


TINY: dict[str, Tiny] = {
    "qwen3": Tiny("Qwen3MoeConfig", {**QWEN, "head_dim": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "qwen3_dense_between": Tiny(
        "Qwen3MoeConfig", {**QWEN, "head_dim": 20, "num_experts_per_tok": 1, "mlp_only_layers": [1, 3]}
    ),
    "qwen2": Tiny("Qwen2MoeConfig", {**QWEN, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}),
    "qwen2_every_other": Tiny(
        "Qwen2MoeConfig",
        {**QWEN, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    ),
    "olmoe": Tiny("OlmoeConfig", {**COMMON, "intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe_clipped": Tiny(
        "OlmoeConfig",
        {**COMMON, "intermediate_size": 32, "num_experts": 8, "clip_qkv": 0.8, "norm_topk_prob": True},
    ),
    "mixtral": Tiny("MixtralConfig", {**COMMON, "intermediate_size": 32, "num_local_experts": 4}),
    "mixtral_window": Tiny(
        "MixtralConfig", {**COMMON, "intermediate_size": 32, "num_local_experts": 4, "sliding_window": 9}
    ),
    "gpt_oss": Tiny(
        "GptOssConfig",
        {
            **COMMON,
            "head_dim": 16,
            "intermediate_size": 32,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek_v2": Tiny(
        "DeepseekV2Config",
        {
            **LATENT,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
            "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek_v2_grouped": Tiny(
        "DeepseekV2Config",
        {
            **LATENT,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3Config",
        {
            **LATENT,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe_lite": Tiny("Glm4MoeLiteConfig", {**LATENT, "n_shared_experts": 1, "rms_norm_eps": 1e-5}),
}


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Save with `transformers`; `save_original_format=False` keeps its stacked experts."""
    model.save_pretrained(folder, **options)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token per word w0, w1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def _edit(folder: Path, tensors: dict[str, Tensor], quantised: dict[str, Any]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantised}))
    return folder


def save_mxfp4(model: Any, folder: Path) -> Path:
    """Random MXFP4 experts on disk; the model gets what `transformers` reads them as."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    packed: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inside, out = weight.shape
        blocks = torch.randint(256, (experts, out, inside // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 125, (experts, out, inside // 32), generator=generator, dtype=torch.uint8)
        weight.data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save(model, folder)
    kept = {name: t for name, t in load_file(folder / "model.safetensors").items() if f"{name}_blocks" not in packed}
    return _edit(folder, {**kept, **packed}, {"quant_method": "mxfp4"})


def save_fp8(model: Any, folder: Path) -> Path:
    """All matrices but gate, embedding and head as fp8, with a scale per tile."""
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj" in name]:
        weight = tensors[name]
        rows, columns = weight.shape
        tiles = torch.nn.functional.pad(weight, (0, -columns % TILE, 0, -rows % TILE))
        tiles = tiles.unflatten(0, (-1, TILE)).unflatten(2, (-1, TILE))
        scale = tiles.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(TILE, 0)[:rows].repeat_interleave(TILE, 1)[:, :columns]
        packed = (weight / spread).to(torch.float8_e4m3fn)
        tensors |= {name: packed, name + "_scale_inv": scale}
    return _edit(folder, tensors, {"quant_method": "fp8", "weight_block_size": [TILE, TILE]})


def fp8_reference(folder: Path, into: Path) -> Any:
    """The reference model of an fp8 folder, its values worked out tile by tile."""
    from transformers import AutoModelForCausalLM

    into.mkdir()
    tensors = load_file(folder / "model.safetensors")
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        values = tensor.float()
        if name + "_scale_inv" in tensors:
            scales = tensors[name + "_scale_inv"]
            for row in range(scales.shape[0]):
                for column in range(scales.shape[1]):
                    part = values[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
                    part *= scales[row, column]
        plain[name] = values
    save_file(plain, into / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (into / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32, attn_implementation="eager").eval()
