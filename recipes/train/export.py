"""Write a trained model as a Hugging Face folder and check it against `transformers`.

    python -m recipes.train.export --weights OUT/mini.pt --tokenizer foreload/assets/mini --out foreload/assets/mini

Weights are bf16, one tensor per expert and projection. The check loads the folder in `transformers` and compares
logits in fp32, both sides from the same bf16 weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .config import Config, ModelConfig
from .model import Model
from .train import load_model

TOLERANCE = 2e-3
END_ID = 0


def hf_config(c: ModelConfig) -> dict[str, Any]:
    """config.json of Qwen3-MoE or Qwen3."""
    common = {
        "hidden_size": c.hidden, "num_hidden_layers": c.layers, "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim, "vocab_size": c.vocabulary,
        "max_position_embeddings": c.max_positions, "rms_norm_eps": c.eps, "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": c.layers, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": END_ID,
        "dtype": "bfloat16", "torch_dtype": "bfloat16",
    }  # fmt: skip
    if not c.experts:
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": c.expert_width, **common,
            "layer_types": ["full_attention"] * c.layers,
        }  # fmt: skip
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **common,
        "intermediate_size": c.expert_width * c.top_k, "moe_intermediate_size": c.expert_width,
        "num_experts": c.experts, "num_experts_per_tok": c.top_k, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "output_router_logits": False, "router_aux_loss_coef": 0.001,
    }  # fmt: skip


def hf_tensors_by_name(model: Model) -> dict[str, Tensor]:
    """Views of the model's weights under their `transformers` names, (out, in)."""
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for number in range(model.c.layers):
        block: Any = model.blocks[number]
        at = f"model.layers.{number}."
        tensors[at + "input_layernorm.weight"] = block.attention_norm
        tensors[at + "post_attention_layernorm.weight"] = block.mlp_norm
        for name in ("q", "k", "v", "o"):
            tensors[f"{at}self_attn.{name}_proj.weight"] = getattr(block.attention, name)
        for name in ("q", "k"):
            tensors[f"{at}self_attn.{name}_norm.weight"] = getattr(block.attention, f"{name}_norm")
        if model.c.experts:
            tensors[at + "mlp.gate.weight"] = block.mlp.router
        for name in ("gate", "up", "down"):
            weight = getattr(block.mlp, name)
            if not model.c.experts:
                tensors[f"{at}mlp.{name}_proj.weight"] = weight
                continue
            for expert in range(model.c.experts):
                tensors[f"{at}mlp.experts.{expert}.{name}_proj.weight"] = weight[expert].T
    return {name: tensor.detach() for name, tensor in tensors.items()}


def export(config: Config, model: Model, tokenizer: Path, out: Path) -> None:
    """Write the folder."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.to(torch.bfloat16).cpu().contiguous() for k, v in hf_tensors_by_name(model).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(hf_config(config.model), indent=2) + "\n")
    generation = {"eos_token_id": END_ID, "pad_token_id": END_ID, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (tokenizer / name).resolve() != (out / name).resolve():
            shutil.copy(tokenizer / name, out / name)


def load_folder(config: Config, folder: Path) -> Model:
    """The inverse of `export`: this recipe's model, fp32 on the CPU, from an exported folder."""
    model = Model(config.model).requires_grad_(False)
    tensors = load_file(folder / "model.safetensors")
    for name, target in hf_tensors_by_name(model).items():
        target.copy_(tensors[name].float())
    return model


def round_to_bf16(model: Model) -> Model:
    """The same model with weights rounded as in the exported file, on the CPU."""
    model = model.cpu()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def check(model: Model, folder: Path) -> float:
    """Largest difference of logits between this model and `transformers`, fp32, on random tokens."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.randint(1, model.c.vocabulary, (2, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.logits(model(ids, torch.float32)[0], torch.float32)
        difference = float((ours - reference(ids).logits).abs().max())
    if difference > TOLERANCE:
        raise RuntimeError(f"{folder}: logits differ from transformers by {difference}, more than {TOLERANCE}")
    return difference


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config, model = load_model(args.weights, torch.device("cpu"))
    export(config, model, args.tokenizer, args.out)
    print(f"{args.out}: logits within {check(round_to_bf16(model), args.out):.2e} of transformers")


if __name__ == "__main__":
    main()
