"""The dense part of a decoder: embedding, attention, MoE norm and gate, output head. One sequence, static KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.models.checkpoint import Checkpoint
from foreload.shape import ModelShape


@dataclass(frozen=True)
class LayerWeights:
    """Device tensors of one layer."""

    input_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 kv_heads) head_dim, hidden]
    qk_norm: Tensor  # [heads + kv_heads, head_dim]
    o: Tensor  # [hidden, heads head_dim]
    moe_norm: Tensor  # [hidden]
    gate: Tensor  # [experts, hidden]


def _layer_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "input_norm": (shape.hidden,),
        "q": (q, shape.hidden),
        "k": (kv, shape.hidden),
        "v": (kv, shape.hidden),
        "o": (shape.hidden, q),
        "q_norm": (shape.head_dim,),
        "k_norm": (shape.head_dim,),
        "moe_norm": (shape.hidden,),
        "gate": (shape.experts, shape.hidden),
    }


class Decoder:
    """Dense weights on the device, the KV cache, and the blocks a step is made of.

    Activations are [n, hidden] in the weights' dtype; n = 1 in decode, a chunk in prefill.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, context_tokens: int) -> None:
        shape = checkpoint.shape
        self.shape = shape
        self.device = device
        family = checkpoint.family
        shapes = _layer_shapes(shape)
        wanted = {family.embed: (shape.vocab, shape.hidden), family.final_norm: (shape.hidden,)}
        if not shape.tied_embeddings:
            wanted[family.head] = (shape.vocab, shape.hidden)
        for layer in range(shape.layers):
            wanted |= {name.format(layer=layer): shapes[ours] for ours, name in family.layer.items()}
        loaded = {name: tensor.to(device, dtype) for name, tensor in checkpoint.read(wanted)}
        self.embedding = loaded[family.embed]
        self.final_norm = loaded[family.final_norm]
        self.head_weight = self.embedding if shape.tied_embeddings else loaded[family.head]
        self.layers = [
            self._layer({ours: loaded[name.format(layer=layer)] for ours, name in family.layer.items()})
            for layer in range(shape.layers)
        ]
        self.context_tokens = context_tokens
        self._keys = torch.zeros(
            shape.layers, shape.kv_heads, context_tokens, shape.head_dim, device=device, dtype=dtype
        )
        self._values = torch.zeros_like(self._keys)
        self._cos, self._sin = self._rotary(context_tokens, dtype)
        self._grouped = shape.heads != shape.kv_heads

    def _layer(self, w: dict[str, Tensor]) -> LayerWeights:
        qk_norm = torch.cat(
            [w["q_norm"].expand(self.shape.heads, -1), w["k_norm"].expand(self.shape.kv_heads, -1)]
        ).contiguous()
        qkv = torch.cat([w["q"], w["k"], w["v"]])
        return LayerWeights(w["input_norm"], qkv, qk_norm, w["o"], w["moe_norm"], w["gate"])

    def _rotary(self, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        dim = self.shape.head_dim
        inverse = 1.0 / self.shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        sin[..., : dim // 2] *= -1  # so that rotating is a roll by half
        return cos.to(self.device, dtype), sin.to(self.device, dtype)

    @property
    def dense_bytes(self) -> int:
        """Bytes of weights and KV cache on the device."""
        tensors = [self.embedding, self.final_norm, self._keys, self._values, self._cos, self._sin]
        if not self.shape.tied_embeddings:
            tensors.append(self.head_weight)
        for layer in self.layers:
            tensors += [layer.input_norm, layer.qkv, layer.qk_norm, layer.o, layer.moe_norm, layer.gate]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids [n] -> [n, hidden]."""
        return F.embedding(token_ids, self.embedding)

    def attend(self, layer: int, x: Tensor, position: int) -> Tensor:
        """Residual stream after attention, [n, hidden]; x holds positions `position`.. and their keys are stored."""
        shape, w = self.shape, self.layers[layer]
        n, end = x.shape[0], position + x.shape[0]
        split = shape.heads + shape.kv_heads
        h = F.rms_norm(x, (shape.hidden,), w.input_norm, shape.norm_eps)
        qkv = F.linear(h, w.qkv).view(n, split + shape.kv_heads, shape.head_dim)
        qk = F.rms_norm(qkv[:, :split], (shape.head_dim,), None, shape.norm_eps) * w.qk_norm
        qk = qk * self._cos[position:end] + qk.roll(shape.head_dim // 2, -1) * self._sin[position:end]
        qk = qk.transpose(0, 1)
        keys, values = self._keys[layer], self._values[layer]
        keys[:, position:end] = qk[shape.heads :]
        values[:, position:end] = qkv[:, split:].transpose(0, 1)
        mask = None
        if n > 1 and position > 0:
            mask = torch.ones(n, end, dtype=torch.bool, device=x.device).tril(position)
        out = F.scaled_dot_product_attention(
            qk[None, : shape.heads],
            keys[None, :, :end],
            values[None, :, :end],
            attn_mask=mask,
            is_causal=n > 1 and position == 0,
            enable_gqa=self._grouped,
        )
        return x + F.linear(out[0].transpose(0, 1).reshape(n, -1), w.o)

    def moe_input(self, layer: int, r: Tensor) -> Tensor:
        """The MoE norm of `layer` applied to a residual stream r [n, hidden]."""
        return F.rms_norm(r, (self.shape.hidden,), self.layers[layer].moe_norm, self.shape.norm_eps)

    def route(self, layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [n, k] in rank order and fp32 weights [n, k] of the experts of the normed input h [n, hidden]."""
        scores = F.linear(h, self.layers[layer].gate).softmax(dim=-1, dtype=torch.float32)
        weights, ids = torch.topk(scores, self.shape.top_k, dim=-1)
        if self.shape.normalise_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return ids, weights

    def logits(self, x: Tensor) -> Tensor:
        """Output logits [n, vocab] of the last layer's residual stream x [n, hidden]."""
        h = F.rms_norm(x, (self.shape.hidden,), self.final_norm, self.shape.norm_eps)
        return F.linear(h, self.head_weight)
