"""Qwen3-MoE and dense Qwen3 for training: fp32 master weights, bf16 matrix work, experts as one grouped product.

The forward follows `transformers`' Qwen3MoeForCausalLM and Qwen3ForCausalLM (pre-norm RMSNorm, RMSNorm of every query
and key head, rotary positions, grouped-query attention, SwiGLU, softmax-then-top-k routing with renormalised weights,
tied embeddings); `export.py` checks that the two agree.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelConfig
from .grouped import GroupedExperts, Routing


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis in fp32; the result keeps fp32."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotary_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(cos, sin) of shape (length, head_dim), halves repeated as in `transformers`."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    angles = torch.arange(length, device=device, dtype=torch.float32)[:, None] * config.rope_theta**-exponent
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to (batch, heads, length, head_dim)."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def matrix(*shape: int, std: float) -> nn.Parameter:
    """A normally initialised weight in (out, in) order."""
    return nn.Parameter(torch.randn(*shape) * std)


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        std = c.hidden**-0.5 / 2
        self.q = matrix(c.heads * c.head_dim, c.hidden, std=std)
        self.k = matrix(c.kv_heads * c.head_dim, c.hidden, std=std)
        self.v = matrix(c.kv_heads * c.head_dim, c.hidden, std=std)
        self.o = matrix(c.hidden, c.heads * c.head_dim, std=std / (2 * c.layers) ** 0.5)
        self.q_norm = nn.Parameter(torch.ones(c.head_dim))
        self.k_norm = nn.Parameter(torch.ones(c.head_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, length, hidden) in the compute dtype."""
        batch, length, _ = x.shape
        kind = x.dtype

        weight = torch.cat([self.q, self.k, self.v]).to(kind)  # one product: x is read once
        qkv = functional.linear(x, weight).view(batch, length, -1, self.c.head_dim).transpose(1, 2)
        q, k, v = qkv.split([self.c.heads, self.c.kv_heads, self.c.kv_heads], 1)
        q = rotate(rms_norm(q, self.q_norm, self.c.eps), cos, sin).to(kind)
        k = rotate(rms_norm(k, self.k_norm, self.c.eps), cos, sin).to(kind)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return functional.linear(out.transpose(1, 2).reshape(batch, length, -1), self.o.to(kind))


class DenseMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        std = c.hidden**-0.5 / 2
        self.gate = matrix(c.expert_width, c.hidden, std=std)
        self.up = matrix(c.expert_width, c.hidden, std=std)
        self.down = matrix(c.hidden, c.expert_width, std=c.expert_width**-0.5 / (2 * c.layers) ** 0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing | None]:
        """x: (tokens, hidden)."""
        kind = x.dtype
        inner = functional.silu(functional.linear(x, self.gate.to(kind))) * functional.linear(x, self.up.to(kind))
        return functional.linear(inner, self.down.to(kind)), None


class Block(nn.Module):
    """One decoder layer on an fp32 residual stream."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.attention_norm = nn.Parameter(torch.ones(c.hidden))
        self.mlp_norm = nn.Parameter(torch.ones(c.hidden))
        self.attention = Attention(c)
        self.mlp: nn.Module = GroupedExperts(c) if c.experts else DenseMlp(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kind: torch.dtype) -> tuple[Tensor, Routing | None]:
        """x: (batch, length, hidden) fp32; `kind` is the dtype of the matrix work."""
        normed = rms_norm(x, self.attention_norm, self.c.eps).to(kind)
        x = x + self.attention(normed, cos, sin).float()
        flat = rms_norm(x, self.mlp_norm, self.c.eps).to(kind).view(-1, self.c.hidden)
        out, routing = self.mlp(flat)
        return x + out.float().view_as(x), routing


class Model(nn.Module):
    """The whole model; `forward` returns the final hidden state, `logits` applies the tied head."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.embedding = matrix(c.vocabulary, c.hidden, std=0.02)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.Parameter(torch.ones(c.hidden))

    def compile_blocks(self) -> None:
        """Compile every block (they share one graph)."""
        for block in self.blocks:
            block.compile(dynamic=False)

    def forward(self, ids: Tensor, kind: torch.dtype = torch.bfloat16) -> tuple[Tensor, list[Routing]]:
        """ids: (batch, length). Returns (batch, length, hidden) fp32 and the routing of every MoE layer."""
        cos, sin = rotary_tables(self.c, ids.shape[1], ids.device)
        x = functional.embedding(ids, self.embedding)
        routings = []
        for block in self.blocks:
            x, routing = block(x, cos, sin, kind)
            if routing is not None:
                routings.append(routing)
        return rms_norm(x, self.norm, self.c.eps), routings

    def logits(self, hidden: Tensor, kind: torch.dtype = torch.bfloat16) -> Tensor:
        """Scores over the vocabulary."""
        return functional.linear(hidden.to(kind), self.embedding.to(kind))
