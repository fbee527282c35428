"""Attention blocks of one layer, each with its weights and its keys and values. One sequence, positions in order.

A block may be asked again from an earlier position: what it kept for later ones is overwritten (roll-back), which a
sliding window allows for up to `RING_SLACK` positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.budget import SCORE_NUMBERS
from foreload.shape import Latent, ModelShape

WINDOW_ROWS = 256
"""Positions of a shorter window that are worked out at a time, over the keys that any of them sees."""
LATENT_EPS = 1e-6
"""Epsilon of the norms inside latent attention, whatever `rms_norm_eps` says (`DeepseekV3RMSNorm`'s default)."""

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine [context, 1, rotated dimensions] (`rope.rotary_tables`)."""


class Attention(ABC):
    """One layer's attention from its normed input to what is added to the residual stream."""

    @abstractmethod
    def attend(self, h: Tensor, position: int) -> Tensor:
        """h [n, hidden] at positions `position`.. -> [n, hidden]; keys and values are kept."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All device tensors, weights and cache."""


def rotate(x: Tensor, rotary: Rotary, position: int) -> Tensor:
    """x [n, heads, dim] rotated for positions `position`.. ."""
    cos, sin = (table[position : position + x.shape[0]] for table in rotary)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax in fp32 over scores [heads, n, keys]; `sinks` [heads] take their share of it and are dropped."""
    scores = scores.float()
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float()[:, None, None]
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (sink - top).exp())


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, first: int, position: int, window: int, scale: float, sinks: Tensor | None
) -> Tensor:
    """Causal attention of q [heads, n, d] at `position`.. over k, v [kv heads, keys, d] at positions `first`.. .

    Query heads share key heads in order; `window` 0 means all positions. Returns [n, heads, d of v].
    """
    heads, n = q.shape[0], q.shape[1]
    shared = heads // k.shape[0]
    most = max(window, WINDOW_ROWS) if window else n
    rows = max(1, min(most, SCORE_NUMBERS // (heads * min(k.shape[1], most + window or k.shape[1]))))
    out = []
    for begin in range(0, n, rows):
        part = q[:, begin : begin + rows]
        count = part.shape[1]
        own = range(position + begin, position + begin + count)
        low = max(first, own[0] - window + 1) if window else first
        seen, keys = slice(low - first, own[-1] + 1 - first), own[-1] + 1 - low
        grouped = part.reshape(k.shape[0], shared * count, -1)
        scores = (grouped @ k[:, seen].transpose(1, 2) * scale).view(heads, count, keys)
        if count > 1:
            scores = scores.masked_fill(_unseen(low, keys, own, window, q.device), float("-inf"))
        weights = softmax_with_sinks(scores, sinks).to(v.dtype)
        mixed = weights.view(k.shape[0], shared * count, keys) @ v[:, seen]
        out.append(mixed.view(heads, count, -1).transpose(0, 1))
    return torch.cat(out) if len(out) > 1 else out[0]


def _unseen(first: int, keys: int, own: range, window: int, device: torch.device) -> Tensor:
    """Which of the `keys` positions from `first` on a query at each position of `own` does not see, [own, keys]."""
    at = torch.arange(first, first + keys, device=device)
    rows = torch.arange(own[0], own[-1] + 1, device=device)[:, None]
    return (at > rows) | (at <= rows - window) if window else at > rows


def can_flash(q: Tensor) -> bool:
    """Whether `flash_attention` takes queries like q [heads, n, d]."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] % 8 == 0 and q.shape[2] <= 256


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention of q [heads, n, d], the last n of the positions of k, v [kv heads, keys, d], without a mask.

    Returns [heads, n, d] and, fp32 [heads, n], the logarithm of the sum that a position's scores were divided by. The
    operator aligns to the lower right, as `torch.nn.attention.bias.causal_lower_right` relies on; given a mask instead,
    attention would hold all scores.
    """
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        q[None], k[None], v[None], 0.0, is_causal=True, return_debug_mask=False, scale=scale
    )
    return found[0][0], found[1][0, :, : q.shape[1]]


class GroupedAttention(Attention):
    """Multi-head attention with shared key heads; optional norms, biases, clipping, sinks and a sliding window."""

    def __init__(self, shape: ModelShape, layer: int, w: dict[str, Tensor], context: int, rotary: Rotary) -> None:
        """`w` holds the layer's tensors by our names (`tensors.layer_tensors`)."""
        self.shape, self.rotary = shape, rotary
        self.window = shape.window(layer)
        self.qkv = torch.cat([w["q"], w["k"], w["v"]])
        self.qkv_bias = torch.cat([w["q_bias"], w["k_bias"], w["v_bias"]]) if shape.qkv_bias else None
        self.o, self.o_bias, self.sinks = w["o"], w.get("o_bias"), w.get("sinks")
        self.qk_norm = self._norms(w)
        size = (shape.kv_heads, shape.kv_positions(layer, context), shape.head_dim)
        self.keys = torch.zeros(size, device=self.o.device, dtype=self.o.dtype)
        self.values = torch.zeros_like(self.keys)

    def _norms(self, w: dict[str, Tensor]) -> Tensor | None:
        """Per head, repeated [heads + kv heads, head_dim]; or full, [(heads + kv heads) head_dim]."""
        if self.shape.qk_norm == "none":
            return None
        if self.shape.qk_norm == "full":
            return torch.cat([w["q_norm"], w["k_norm"]])
        return torch.cat(
            [w["q_norm"].expand(self.shape.heads, -1), w["k_norm"].expand(self.shape.kv_heads, -1)]
        ).contiguous()

    def tensors(self) -> list[Tensor]:
        """All device tensors, weights and cache."""
        some = (self.qkv, self.qkv_bias, self.o, self.o_bias, self.sinks, self.qk_norm, self.keys, self.values)
        return [tensor for tensor in some if tensor is not None]

    def attend(self, h: Tensor, position: int) -> Tensor:
        """h [n, hidden] at positions `position`.. -> [n, hidden]; keys and values are kept."""
        heads, n = self.shape.heads, h.shape[0]
        both, v = self.project(h)
        both = rotate(both, self.rotary, position).transpose(0, 1)
        q, k, v = both[:heads], both[heads:], v.transpose(0, 1)
        if self.window:
            out = self._windowed(q, k, v, position)
        else:
            self.keys[:, position : position + n] = k
            self.values[:, position : position + n] = v
            out = self._full(q, position, position + n)
        return F.linear(out.reshape(n, -1), self.o, self.o_bias)

    def project(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys before rotation [n, heads + kv heads, head_dim], and values [n, kv heads, head_dim]."""
        shape, n = self.shape, h.shape[0]
        qkv = F.linear(h, self.qkv, self.qkv_bias)
        if shape.qk_norm == "full" and self.qk_norm is not None:
            qkv = self._norm_full(qkv, self.qk_norm)
        if shape.clip_qkv:
            qkv = qkv.clamp(-shape.clip_qkv, shape.clip_qkv)
        heads = qkv.view(n, -1, shape.head_dim)
        both, v = heads[:, : shape.heads + shape.kv_heads], heads[:, shape.heads + shape.kv_heads :]
        if shape.qk_norm == "head" and self.qk_norm is not None:
            both = F.rms_norm(both, (shape.head_dim,), None, shape.norm_eps) * self.qk_norm
        return both, v

    def _norm_full(self, qkv: Tensor, weight: Tensor) -> Tensor:
        shape = self.shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q_weight, k_weight = weight.split([q, kv])
        queries, keys, values = qkv.split([q, kv, kv], 1)
        queries = F.rms_norm(queries, (q,), q_weight, shape.norm_eps)
        return torch.cat([queries, F.rms_norm(keys, (kv,), k_weight, shape.norm_eps), values], 1)

    def _full(self, q: Tensor, position: int, end: int) -> Tensor:
        """Attention over all kept positions up to `end` -> [n, heads, head_dim]."""
        n = q.shape[1]
        keys, values = self.keys[:, :end], self.values[:, :end]
        if n > 1 and can_flash(q):
            out, log_sum = flash_attention(q, keys, values, self.shape.score_scale)
            if self.sinks is not None:  # a sink takes its share of the sum
                out = out * torch.sigmoid(log_sum - self.sinks.float()[:, None])[..., None].to(out.dtype)
            return out.transpose(0, 1)
        if self.sinks is not None or (n > 1 and q.is_cuda):
            return masked_attention(q, keys, values, 0, position, 0, self.shape.score_scale, self.sinks)
        mask = None
        if n > 1 and position > 0:
            mask = torch.ones(n, end, dtype=torch.bool, device=q.device).tril(position)
        out = F.scaled_dot_product_attention(
            q[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=n > 1 and position == 0,
            enable_gqa=self.shape.heads != self.shape.kv_heads,
            scale=self.shape.score_scale,
        )
        return out[0].transpose(0, 1)

    def _windowed(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Attention over the window before `position` and the n new positions; the ring then holds the newest."""
        n, ring = k.shape[1], self.keys.shape[1]
        first = max(0, position - self.window + 1)
        past = torch.arange(first, position, device=q.device) % ring
        keys = torch.cat([self.keys[:, past], k], 1)
        values = torch.cat([self.values[:, past], v], 1)
        out = masked_attention(q, keys, values, first, position, self.window, self.shape.score_scale, self.sinks)
        kept = min(n, ring)
        places = torch.arange(position + n - kept, position + n, device=q.device) % ring
        self.keys[:, places], self.values[:, places] = k[:, n - kept :], v[:, n - kept :]
        return out


class LatentAttention(Attention):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): one latent row per position serves all heads.

    The key and value expansions are folded into the query and the output, so that only rows of `Latent.row` numbers
    are kept and read.
    """

    def __init__(self, shape: ModelShape, latent: Latent, w: dict[str, Tensor], context: int, rotary: Rotary) -> None:
        """`w` holds the layer's tensors by our names (`tensors.layer_tensors`)."""
        self.shape, self.latent, self.rotary = shape, latent, rotary
        key = latent.nope_dim + latent.rope_dim
        by_head = w["q_b" if latent.query_rank else "q"].unflatten(0, (shape.heads, key))
        halves = _halves(latent.rope_dim)
        q = torch.cat([by_head[:, : latent.nope_dim], by_head[:, latent.nope_dim :][:, halves]], 1).flatten(0, 1)
        self.q_a_norm, self.q_b = w.get("q_a_norm"), q if latent.query_rank else None
        q = w["q_a"] if latent.query_rank else q
        self.down = torch.cat([q, w["kv_a"][: latent.rank], w["kv_a"][latent.rank :][halves]])  # all that h goes into
        self.q, self.kv_a = self.down.split([len(q), latent.row])
        self.kv_a_norm, self.o = w["kv_a_norm"], w["o"]
        expand = w["kv_b"].unflatten(0, (shape.heads, latent.nope_dim + latent.value_dim))
        self.key_up = expand[:, : latent.nope_dim].contiguous()  # [heads, nope, rank]
        self.value_up = expand[:, latent.nope_dim :].contiguous()  # [heads, value, rank]
        self.rows = torch.zeros(context, latent.row, device=self.o.device, dtype=self.o.dtype)

    def tensors(self) -> list[Tensor]:
        """All device tensors, weights and cache."""
        some = (
            self.down,
            self.q_a_norm,
            self.q_b,
            self.kv_a_norm,
            self.o,
            self.key_up,
            self.value_up,
            self.rows,
        )
        return [tensor for tensor in some if tensor is not None]

    def attend(self, h: Tensor, position: int) -> Tensor:
        """h [n, hidden] at positions `position`.. -> [n, hidden]; latent rows are kept."""
        shape, latent, n = self.shape, self.latent, h.shape[0]
        self.rows[position : position + n] = self._row(h, position)
        rows = self.rows[: position + n]
        out = masked_attention(
            self._queries(h, position),
            rows[None],
            rows[None, :, : latent.rank],
            0,
            position,
            0,
            shape.score_scale,
            None,
        )
        mixed = torch.einsum("nhr,hvr->nhv", out, self.value_up)
        return F.linear(mixed.reshape(n, -1), self.o)

    def _row(self, h: Tensor, position: int) -> Tensor:
        """What is kept of h [n, hidden]: the normed latent and the rotated key, [n, row]."""
        latent = self.latent
        kept, key = F.linear(h, self.kv_a).split([latent.rank, latent.rope_dim], 1)
        kept = F.rms_norm(kept, (latent.rank,), self.kv_a_norm, LATENT_EPS)
        return torch.cat([kept, rotate(key[:, None], self.rotary, position)[:, 0]], 1)

    def _queries(self, h: Tensor, position: int) -> Tensor:
        """Queries against latent rows, [heads, n, row]."""
        latent = self.latent
        q = F.linear(h, self.q)
        if self.q_b is not None:
            q = F.linear(F.rms_norm(q, (latent.query_rank,), self.q_a_norm, LATENT_EPS), self.q_b)
        q = q.view(h.shape[0], self.shape.heads, -1)
        nope, rope = q.split([latent.nope_dim, latent.rope_dim], 2)
        folded = torch.einsum("nhd,hdr->nhr", nope, self.key_up)
        return torch.cat([folded, rotate(rope, self.rotary, position)], 2).transpose(0, 1)


def _halves(dim: int) -> Tensor:
    """Order that puts the first of each rotated pair before all the second: checkpoints hold pairs side by side."""
    return torch.arange(dim).view(-1, 2).T.reshape(-1)
