"""Which tensors a decoder needs outside its routed experts, by our names, with their shapes."""

from __future__ import annotations

from foreload.shape import Latent, ModelShape

Sizes = dict[str, tuple[int, ...]]
FLOAT32 = ("correction",)
"""Tensors that are kept in float32 whatever the model runs in; the gate too where `router_float32` says so."""


def global_tensors(shape: ModelShape) -> Sizes:
    """Embedding, final norm and output head."""
    sizes: Sizes = {"embed": (shape.vocab, shape.hidden), "final_norm": (shape.hidden,)}
    return sizes if shape.tied_embeddings else {**sizes, "head": (shape.vocab, shape.hidden)}


def layer_tensors(shape: ModelShape, layer: int) -> Sizes:
    """All tensors of one layer but its routed experts."""
    block = _moe(shape) if layer in shape.moe_layers else _gated("dense", shape.dense_width, shape.hidden)
    attention = _grouped(shape) if shape.latent is None else _latent(shape, shape.latent)
    return {"input_norm": (shape.hidden,), **attention, "moe_norm": (shape.hidden,), **block}


def _grouped(shape: ModelShape) -> Sizes:
    q, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    sizes: Sizes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    if shape.qkv_bias:
        sizes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if shape.output_bias:
        sizes["o_bias"] = (hidden,)
    if shape.qk_norm == "head":
        sizes |= {"q_norm": (shape.head_dim,), "k_norm": (shape.head_dim,)}
    elif shape.qk_norm == "full":
        sizes |= {"q_norm": (q,), "k_norm": (kv,)}
    if shape.sinks:
        sizes["sinks"] = (shape.heads,)
    return sizes


def _latent(shape: ModelShape, latent: Latent) -> Sizes:
    q = shape.heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank:
        rank = latent.query_rank
        sizes: Sizes = {"q_a": (rank, shape.hidden), "q_a_norm": (rank,), "q_b": (q, rank)}
    else:
        sizes = {"q": (q, shape.hidden)}
    return {
        **sizes,
        "kv_a": (latent.row, shape.hidden),
        "kv_a_norm": (latent.rank,),
        "kv_b": (shape.heads * (latent.nope_dim + latent.value_dim), latent.rank),
        "o": (shape.hidden, shape.heads * latent.value_dim),
    }


def _moe(shape: ModelShape) -> Sizes:
    sizes: Sizes = {"gate": (shape.experts, shape.hidden)}
    if shape.router_bias:
        sizes["gate_bias"] = (shape.experts,)
    if shape.correction_bias:
        sizes["correction"] = (shape.experts,)
    if shape.shared_width:
        sizes |= _gated("shared", shape.shared_width, shape.hidden)
    if shape.shared_gate:
        sizes["shared_switch"] = (1, shape.hidden)
    return sizes


def _gated(name: str, width: int, hidden: int) -> Sizes:
    return {f"{name}_gate": (width, hidden), f"{name}_up": (width, hidden), f"{name}_down": (hidden, width)}
