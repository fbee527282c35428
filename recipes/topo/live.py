"""The trained model for inference: layers in parts (attention, norm, router, experts) that others can step into."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from recipes.train.config import ModelConfig
from recipes.train.grouped import GroupedExperts, grouped_matmul
from recipes.train.model import Block, Model, rms_norm, rotary_tables, rotate

GATHER_ROWS = 2048  # up to so many (token, expert) pairs, expert weights are gathered: no host synchronisation


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; matrices in the compute dtype, norms and router in fp32."""

    attention_norm: Tensor
    mlp_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    router: Tensor
    gate_up: Tensor  # [experts, hidden, 2 width]
    down: Tensor  # [experts, width, hidden]


@dataclass(frozen=True)
class State:
    """What happens at one MoE layer, for N tokens; `ids` and `weights` are those executed."""

    layer: int
    r: Tensor  # [N, hidden] fp32, residual stream after attention
    h: Tensor  # [N, hidden] fp32, the router's input
    scores: Tensor  # [N, experts] fp32, of the layer's own router
    ids: Tensor  # [N, top_k]
    weights: Tensor  # [N, top_k] fp32


Attend = Callable[[int, Tensor], Tensor]
Visit = Callable[[State], None]
Choose = Callable[[State], tuple[Tensor, Tensor]]


class Live:
    """A trained model with its weights as exported (bf16), computing in `kind`."""

    def __init__(self, model: Model, device: torch.device, kind: torch.dtype) -> None:
        self.c: ModelConfig = model.c
        self.device, self.kind = device, kind
        self.embedding = self._rounded(model.embedding)
        self.norm = self._rounded(model.norm)
        self.head = self.embedding.to(kind)
        self.layers = [self._layer(block) for block in model.blocks if isinstance(block, Block)]
        self.tables = rotary_tables(self.c, self.c.max_positions, device)

    def _rounded(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device).bfloat16().float()

    def _layer(self, block: Block) -> Layer:
        a, mlp = block.attention, block.mlp
        assert isinstance(mlp, GroupedExperts)
        qkv = torch.cat([self._rounded(w) for w in (a.q, a.k, a.v)]).to(self.kind)
        gate_up = torch.cat([self._rounded(mlp.gate), self._rounded(mlp.up)], -1).to(self.kind)
        return Layer(
            self._rounded(block.attention_norm), self._rounded(block.mlp_norm), qkv, self._rounded(a.q_norm),
            self._rounded(a.k_norm), self._rounded(a.o).to(self.kind), self._rounded(mlp.router), gate_up,
            self._rounded(mlp.down).to(self.kind),
        )  # fmt: skip

    def project(self, n: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, T, head_dim] of x [B, T, hidden]."""
        c, w = self.c, self.layers[n]
        h = rms_norm(x, w.attention_norm, c.eps).to(self.kind)
        qkv = functional.linear(h, w.qkv).view(*x.shape[:2], -1, c.head_dim).transpose(1, 2)
        q, k, v = qkv.split([c.heads, c.kv_heads, c.kv_heads], 1)
        q = rotate(rms_norm(q, w.q_norm, c.eps), cos, sin).to(self.kind)
        k = rotate(rms_norm(k, w.k_norm, c.eps), cos, sin).to(self.kind)
        return q, k, v

    def merge(self, n: int, x: Tensor, heads: Tensor) -> Tensor:
        """Residual stream after attention: x + output projection of heads [B, heads, T, head_dim]."""
        flat = heads.transpose(1, 2).reshape(*x.shape[:2], -1)
        return x + functional.linear(flat, self.layers[n].o).float()

    def attend(self, n: int, x: Tensor) -> Tensor:
        """Causal attention within x [B, T, hidden], positions from 0."""
        cos, sin = (t[: x.shape[1]] for t in self.tables)
        q, k, v = self.project(n, x, cos, sin)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.merge(n, x, out)

    def moe_input(self, n: int, r: Tensor) -> Tensor:
        """MoE norm of layer n on a residual stream, rounded to the compute dtype, as fp32."""
        return rms_norm(r, self.layers[n].mlp_norm, self.c.eps).to(self.kind).float()

    def scores(self, n: int, h: Tensor) -> Tensor:
        """Router scores of layer n."""
        return functional.linear(h, self.layers[n].router)

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax, top-k, renormalised: (ids, weights), best first."""
        weights, ids = scores.softmax(-1).topk(self.c.top_k, -1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def expert_rows(self, n: int, h: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Unweighted expert outputs sorted by expert [N k, hidden], and the order: row i serves pair order[i]."""
        w = self.layers[n]
        keys, order = ids.reshape(-1).to(torch.int16).sort(stable=True)
        every = torch.arange(self.c.experts, device=ids.device, dtype=torch.int16)
        ends = torch.searchsorted(keys, every, right=True, out_int32=True)
        rows = h.to(self.kind)[order // ids.shape[1]]
        gate, up = grouped_matmul(rows, w.gate_up, ends).chunk(2, -1)
        return grouped_matmul(functional.silu(gate) * up, w.down, ends), order

    def experts(self, n: int, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts, [N, hidden] fp32."""
        w = self.layers[n]
        if ids.numel() <= GATHER_ROWS:
            inner = h.to(self.kind)[:, None, None] @ w.gate_up[ids]
            gate, up = inner.chunk(2, -1)
            out = ((functional.silu(gate) * up) @ w.down[ids]).squeeze(-2)
        else:
            rows, order = self.expert_rows(n, h, ids)
            out = torch.empty_like(rows).index_copy_(0, order, rows).view(*ids.shape, -1)
        return (out.float() * weights[..., None]).sum(1)

    def forward(
        self, tokens: Tensor, attend: Attend | None = None, visit: Visit | None = None, choose: Choose | None = None
    ) -> Tensor:
        """Final hidden states [B, T, hidden] of tokens [B, T].

        `choose` replaces the routing that is executed; `visit` sees every layer's state before its experts run.
        """
        attend = attend or self.attend
        x = functional.embedding(tokens, self.embedding)
        for n in range(self.c.layers):
            after = attend(n, x)
            r = after.reshape(-1, self.c.hidden)
            h = self.moe_input(n, r)
            scores = self.scores(n, h)
            state = State(n, r, h, scores, *self.route(scores))
            if choose is not None:
                ids, weights = choose(state)
                state = replace(state, ids=ids, weights=weights)
            if visit is not None:
                visit(state)
            x = after + self.experts(n, h, state.ids, state.weights).view_as(after)
        return rms_norm(x, self.norm, self.c.eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, fp32."""
        return functional.linear(hidden.to(self.kind), self.head).float()
