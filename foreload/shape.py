"""`ModelShape`: what Foreload knows about a model. Family files translate Hugging Face spellings into it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

Scoring = Literal["softmax_topk"]
"""softmax_topk: softmax over all experts in fp32, then top-k."""

BYTES_PER_WEIGHT = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ModelShape:
    """Sizes and routing rules of one Mixture-of-Experts decoder. All counts are per model unless named per layer."""

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

    @property
    def n_moe_layers(self) -> int:
        """Number of MoE layers."""
        return len(self.moe_layers)

    @property
    def expert_weights(self) -> int:
        """Weights of one expert: gate, up and down projection."""
        return 3 * self.hidden * self.expert_width

    def expert_bytes(self, dtype: str) -> int:
        """Bytes of one expert block in `dtype`."""
        return self.expert_weights * BYTES_PER_WEIGHT[dtype]

    @property
    def dense_weights(self) -> int:
        """Weights that stay on the device: embeddings, attention, norms, gates."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads) + 2 * self.head_dim
        per_layer = attention + 2 * self.hidden
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return embeddings + self.layers * per_layer + self.n_moe_layers * self.experts * self.hidden + self.hidden

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of keys and values of one position over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_WEIGHT[dtype]

    @cached_property
    def hash(self) -> str:
        """Twelve hex digits that change with any field."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
