"""Routing and experts: tokens are sorted by expert, then all experts run as one grouped matrix product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ModelConfig


class Routing(NamedTuple):
    """What a layer's router did with a micro-batch of N tokens."""

    ids: Tensor  # (N, top_k) chosen experts
    counts: Tensor  # (experts,) choices that fell on each expert
    mean_probability: Tensor  # (experts,) mean router probability, carries the gradient
    z: Tensor  # mean squared log-sum-exp of the router scores


class _Permute(torch.autograd.Function):
    """Gather rows by `source`; the gradient is a gather by the inverse permutation and a sum, with no atomics."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[source]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        parts = grad[inverse].view(-1, ctx.top_k, grad.shape[-1])
        return parts.float().sum(1).to(grad.dtype), None, None, None


class _Reorder(torch.autograd.Function):
    """Gather by a permutation; the gradient is a gather by its inverse."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return y[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[ctx.saved_tensors[0]], None, None


class _Combine(torch.autograd.Function):
    """Sum of each token's `top_k` rows, added in fp32; the gradient is one gather, nothing of the rows is kept."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(source)
        return y[inverse].view(-1, top_k, y.shape[-1]).float().sum(1).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad[ctx.saved_tensors[0]], None, None, None


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of `x` up to ends[e] times weight[e] of (experts, in, out); a plain loop on the CPU."""
    if x.is_cuda:
        return torch._grouped_mm(x, weight, offs=ends)
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ w for a, b, w in zip(starts[:-1], starts[1:], weight, strict=True)])


class GroupedExperts(nn.Module):
    """Router and SwiGLU experts, stored stacked as (experts, in, out)."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        std = c.hidden**-0.5 / 2
        self.router = nn.Parameter(torch.randn(c.experts, c.hidden) * 0.02)
        self.gate = nn.Parameter(torch.randn(c.experts, c.hidden, c.expert_width) * std)
        self.up = nn.Parameter(torch.randn(c.experts, c.hidden, c.expert_width) * std)
        down_std = c.expert_width**-0.5 / (2 * c.layers) ** 0.5
        self.down = nn.Parameter(torch.randn(c.experts, c.expert_width, c.hidden) * down_std)

    def route(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Top-k of the softmax, in fp32: (weights (N, top_k), Routing)."""
        scores = functional.linear(x.float(), self.router)
        probability = scores.softmax(-1)
        weights, ids = probability.topk(self.c.top_k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        chosen = ids.reshape(-1, 1) == torch.arange(self.c.experts, device=x.device)
        z = torch.logsumexp(scores, -1).pow(2).mean()
        return weights, Routing(ids, chosen.sum(0), probability.mean(0), z)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """x: (tokens, hidden) in the compute dtype."""
        kind, k = x.dtype, self.c.top_k
        weights, routing = self.route(x)
        narrow = torch.uint8 if self.c.experts <= 256 else torch.int16  # a radix sort makes one pass per key byte
        order = routing.ids.reshape(-1).to(narrow).argsort(stable=True)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=x.device))
        ends = routing.counts.cumsum(0).to(torch.int32)
        source = order // k
        rows: Tensor = _Permute.apply(x, source, inverse, k)  # type: ignore[no-untyped-call]
        scale: Tensor = _Reorder.apply(weights.reshape(-1), order, inverse)  # type: ignore[no-untyped-call]
        both = grouped_matmul(rows, torch.cat([self.gate, self.up], -1).to(kind), ends)
        gate, up = both.chunk(2, -1)
        # The router weight scales the narrow inner activation: the down projection is linear.
        inner = (functional.silu(gate) * up * scale[:, None]).to(kind)
        out = grouped_matmul(inner, self.down.to(kind), ends)
        total: Tensor = _Combine.apply(out, source, inverse, k)  # type: ignore[no-untyped-call]
        return total, routing


def balance_loss(routings: list[Routing], experts: int, top_k: int) -> Tensor:
    """Sum over layers of experts * sum_e f_e P_e over the whole micro-batch; 1 per layer when balanced."""
    total = routings[0].z.new_zeros(())
    for r in routings:
        share = r.counts.float() / (r.ids.shape[0] * top_k)
        total = total + experts * (share * r.mean_probability).sum()
    return total
