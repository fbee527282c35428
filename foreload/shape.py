"""`ModelShape`: what Foreload knows about a model. Family files translate Hugging Face spellings into it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

Scoring = Literal["softmax_topk", "topk_softmax", "sigmoid_topk"]
"""softmax_topk: softmax over all experts in fp32, then top-k. topk_softmax: top-k of the logits, then softmax over
those. sigmoid_topk: sigmoid in fp32, top-k of the scores plus a correction bias, weights from the scores alone."""
Activation = Literal["silu", "swiglu_oai"]
"""silu: silu(gate) * up, gate rows before up rows. swiglu_oai: clamped, gate and up rows by turns (gpt-oss)."""
StoredExperts = Literal["float", "mxfp4", "fp8_tile"]
"""How the checkpoint holds its routed experts: as floats, or packed as `foreload.formats` says."""
QkNorm = Literal["none", "head", "full"]
"""RMS norm of queries and keys: none, over each head, or over all heads together."""

BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2}
RING_SLACK = 17
"""Positions a sliding window keeps beyond itself, so that a verify step of up to 17 tokens can be rolled back."""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): keys and values are kept as one latent row."""

    query_rank: int  # 0: queries are not compressed
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def row(self) -> int:
        """Numbers kept per position and layer: the latent and the rotated key."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary embeddings (arXiv 2309.00071), with its two factors worked out."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool  # round the corrected dimensions outward to whole ones
    rotary_scale: float  # multiplies cosine and sine
    score_scale: float  # multiplies the attention scores


@dataclass(frozen=True)
class ModelShape:
    """Sizes and routing rules of one Mixture-of-Experts decoder. All counts are per model unless named per layer.

    Fields with a default describe what only some families have; the default means "not there".
    """

    family: str
    layers: int
    moe_layers: tuple[int, ...]
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int
    top_k: int
    expert_width: int
    scoring: Scoring
    normalise_weights: bool
    rope_theta: float
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    # attention
    qk_norm: QkNorm = "head"
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float = 0.0  # queries, keys and values are clamped to +- this; 0: they are not
    sinks: bool = False  # a learnt logit per head that takes part in the softmax and has no value
    windows: tuple[int, ...] = ()  # per layer: positions a sliding window sees, 0: all; empty: all in every layer
    latent: Latent | None = None
    yarn: Yarn | None = None
    # experts and routing
    activation: Activation = "silu"
    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0
    expert_bias: bool = False
    stored_experts: StoredExperts = "float"
    expert_tile: int = 0  # columns that share a scale, of fp8_tile (0: all)
    router_bias: bool = False
    router_float32: bool = False  # the gate is kept and applied in float32
    correction_bias: bool = False
    groups: int = 1  # experts are chosen from the best `top_groups` of so many groups
    top_groups: int = 1
    routed_scale: float = 1.0  # multiplies the weights at the end
    # experts and blocks that every token passes
    shared_experts: int = 0
    shared_width: int = 0  # of all shared experts together
    shared_gate: bool = False  # the shared output is scaled by the sigmoid of one logit
    dense_width: int = 0  # of the layers without experts

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> ModelShape:
        """The shape whose `asdict`, perhaps by way of JSON, is `values`.

        Fields with a default may be missing; ValueError names those that are unknown, or missing without one.
        """
        known = {field.name for field in fields(cls)}
        wrong = sorted((set(values) - known) | (_required() - set(values)))
        if wrong:
            raise ValueError(f"shape: unknown or missing fields {', '.join(wrong)}")
        changed = dict(values)
        for name in ("moe_layers", "windows"):
            if name in changed:
                changed[name] = tuple(changed[name])
        for name, kind in (("latent", Latent), ("yarn", Yarn)):
            if changed.get(name) is not None:
                changed[name] = _part(kind, changed[name], name)
        return cls(**changed)

    @property
    def n_moe_layers(self) -> int:
        """Number of MoE layers."""
        return len(self.moe_layers)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down projection, and their biases if there are any."""
        bias = 2 * self.expert_width + self.hidden if self.expert_bias else 0
        return 3 * self.hidden * self.expert_width + bias

    def expert_bytes(self, dtype: str) -> int:
        """Bytes of one expert block in `dtype`."""
        return self.expert_weights * BYTES_PER_WEIGHT[dtype]

    @property
    def all_experts(self) -> int:
        """Number of routed experts in all layers."""
        return self.n_moe_layers * self.experts

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's attention block."""
        if self.latent is not None:
            return self._latent_weights(self.latent)
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norm = {"none": 0, "head": 2 * self.head_dim, "full": q + kv}[self.qk_norm]
        bias = (q + 2 * kv if self.qkv_bias else 0) + (self.hidden if self.output_bias else 0)
        return self.hidden * (2 * q + 2 * kv) + norm + bias + (self.heads if self.sinks else 0)

    def _latent_weights(self, latent: Latent) -> int:
        q = self.heads * (latent.nope_dim + latent.rope_dim)
        queries = self.hidden * q
        if latent.query_rank:
            queries = latent.query_rank * (self.hidden + 1 + q)
        expand = latent.rank * self.heads * (latent.nope_dim + latent.value_dim)
        output = self.heads * latent.value_dim * self.hidden
        return queries + self.hidden * latent.row + latent.rank + expand + output

    @property
    def router_weights(self) -> int:
        """Weights of one layer's gate, biases included."""
        return self.experts * (self.hidden + self.router_bias + self.correction_bias)

    @property
    def shared_weights(self) -> int:
        """Weights of one MoE layer's shared experts and their gate."""
        return 3 * self.hidden * self.shared_width + (self.hidden if self.shared_gate else 0)

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding and the output head, once if they are tied."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def dense_weights(self) -> int:
        """Weights that stay on the device: embeddings, attention, norms, gates, shared experts, dense layers."""
        dense_layers = (self.layers - self.n_moe_layers) * 3 * self.hidden * self.dense_width
        moe = self.n_moe_layers * (self.router_weights + self.shared_weights)
        per_layer = self.attention_weights + 2 * self.hidden
        return self.embedding_weights + self.layers * per_layer + moe + dense_layers + self.hidden

    def dense_bytes(self, dtype: str) -> int:
        """Bytes of the dense weights in `dtype`; what a family keeps in float32 counts as that."""
        full = self.router_weights if self.router_float32 else (self.experts if self.correction_bias else 0)
        size = BYTES_PER_WEIGHT[dtype]
        return self.dense_weights * size + self.n_moe_layers * full * (4 - size)

    @property
    def total_weights(self) -> int:
        """All weights of the model."""
        return self.dense_weights + self.all_experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Weights that one token's step uses: all but the experts it is not routed to."""
        return self.dense_weights + self.n_moe_layers * self.top_k * self.expert_weights

    @property
    def kv_row(self) -> int:
        """Numbers kept per position and layer."""
        return self.latent.row if self.latent is not None else 2 * self.kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """What attention scores are multiplied by: one over the root of a head's width, and YaRN's factor."""
        return (self.yarn.score_scale if self.yarn is not None else 1.0) / math.sqrt(self.head_dim)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one position over all layers, before any window is full."""
        return self.layers * self.kv_row * BYTES_PER_WEIGHT[dtype]

    def window(self, layer: int) -> int:
        """Positions that `layer` sees through a sliding window; 0: all."""
        return self.windows[layer] if self.windows else 0

    def kv_positions(self, layer: int, context_tokens: int) -> int:
        """Positions whose keys and values `layer` keeps for a context of `context_tokens`."""
        window = self.window(layer)
        return min(context_tokens, window + RING_SLACK) if window else context_tokens

    def kv_bytes(self, dtype: str, context_tokens: int) -> int:
        """Bytes of the keys and values of a context of `context_tokens` positions over all layers."""
        positions = sum(self.kv_positions(layer, context_tokens) for layer in range(self.layers))
        return positions * self.kv_row * BYTES_PER_WEIGHT[dtype]

    @property
    def named(self) -> str:
        """How errors name it: the hash, and what tells models apart at a glance."""
        layers = f"{self.n_moe_layers} MoE layer{'s' if self.n_moe_layers != 1 else ''}"
        return f"{self.hash} ({layers} of {self.experts} experts, top-{self.top_k})"

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that change with any field; a field at its default adds nothing."""
        plain = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        values = {name: value for name, value in asdict(self).items() if name not in plain or value != plain[name]}
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _required() -> set[str]:
    return {field.name for field in fields(ModelShape) if field.default is MISSING}


def _part(kind: type[Latent] | type[Yarn], values: Any, name: str) -> Latent | Yarn:
    expected = {field.name for field in fields(kind)}
    if not isinstance(values, Mapping) or set(values) != expected:
        raise ValueError(f"shape: {name} must have the fields {', '.join(sorted(expected))}")
    return kind(**values)
