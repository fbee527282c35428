"""The tensors of a model as engines name them, with their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreload.shape import Latent, ModelShape

Role = Literal["embedding", "attention", "norm", "gate", "experts", "shared", "dense", "output"]
Parts = list[tuple[str, Role, int]]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the model in a file's naming; `layer` is -1 outside the decoder's layers."""

    name: str
    layer: int
    role: Role
    weights: int


def gguf_tensors(shape: ModelShape) -> list[Tensor]:
    """The tensors of a GGUF file, routed experts as one tensor per layer and projection.

    Biases and norms inside attention are counted with the tensor they belong to.
    """
    head = shape.vocab * shape.hidden
    found = [Tensor("token_embd.weight", -1, "embedding", head)]
    for layer in range(shape.layers):
        parts = _feed_forward(shape, layer)
        named = [
            ("attn_norm.weight", "norm", shape.hidden),
            *_attention(shape),
            ("ffn_norm.weight", "norm", shape.hidden),
        ]
        found += [Tensor(f"blk.{layer}.{name}", layer, role, size) for name, role, size in [*named, *parts]]
    found.append(Tensor("output_norm.weight", -1, "norm", shape.hidden))
    if not shape.tied_embeddings:
        found.append(Tensor("output.weight", -1, "output", head))
    return found


def _attention(shape: ModelShape) -> Parts:
    """One layer's attention; what is neither query, key, value nor output is counted with the queries."""
    if shape.latent is not None:
        return _latent(shape, shape.latent)
    query, key = shape.heads * shape.head_dim * shape.hidden, shape.kv_heads * shape.head_dim * shape.hidden
    rest = shape.attention_weights - 2 * query - 2 * key
    sizes = {"attn_q": query + rest, "attn_k": key, "attn_v": key, "attn_output": query}
    return [(f"{name}.weight", "attention", size) for name, size in sizes.items()]


def _latent(shape: ModelShape, latent: Latent) -> Parts:
    down = shape.hidden * latent.row
    expand = latent.rank * shape.heads
    sizes = {
        "attn_kv_a_mqa": down + latent.rank,
        "attn_k_b": expand * latent.nope_dim,
        "attn_v_b": expand * latent.value_dim,
        "attn_output": shape.heads * latent.value_dim * shape.hidden,
    }
    rest = shape.attention_weights - sum(sizes.values())
    if latent.query_rank:
        compress = latent.query_rank * (shape.hidden + 1)
        sizes = {"attn_q_a": compress, "attn_q_b": rest - compress, **sizes}
    else:
        sizes = {"attn_q": rest, **sizes}
    return [(f"{name}.weight", "attention", size) for name, size in sizes.items()]


def _feed_forward(shape: ModelShape, layer: int) -> Parts:
    each: tuple[str, ...] = ("gate", "up", "down")
    if layer not in shape.moe_layers:
        return [(f"ffn_{name}.weight", "dense", shape.hidden * shape.dense_width) for name in each]
    router = shape.experts * (shape.hidden + shape.router_bias)
    parts: Parts = [("ffn_gate_inp.weight", "gate", router)]
    if shape.correction_bias:
        parts.append(("exp_probs_b.bias", "gate", shape.experts))
    matrix = shape.experts * shape.hidden * shape.expert_width
    parts += [(f"ffn_{name}_exps.weight", "experts", matrix) for name in each]
    if shape.expert_bias:
        widths = zip(each, (shape.expert_width, shape.expert_width, shape.hidden), strict=True)
        parts += [(f"ffn_{name}_exps.bias", "experts", shape.experts * width) for name, width in widths]
    if shape.shared_width:
        parts += [(f"ffn_{name}_shexp.weight", "shared", shape.hidden * shape.shared_width) for name in each]
    if shape.shared_gate:
        parts.append(("ffn_gate_inp_shexp.weight", "shared", shape.hidden))
    return parts


def expert_variants(layer: int) -> list[str]:
    """Every GGUF name that may hold routed experts of a layer: fused, channel-wise, scales and biases too."""
    return [
        f"blk.{layer}.ffn_{name}_{kind}exps.{suffix}"
        for kind in ("", "ch")
        for suffix in ("weight", "scale", "bias")
        for name in ("gate", "up", "down", "gate_up")
    ]


def dense_weights(shape: ModelShape) -> list[int]:
    """Weights of each decoder layer without routed experts."""
    total = [0] * shape.layers
    for tensor in gguf_tensors(shape):
        if tensor.layer >= 0 and tensor.role != "experts":
            total[tensor.layer] += tensor.weights
    return total
