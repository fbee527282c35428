"""Optimiser: Muon for matrices (one batched orthogonalisation per shape), AdamW for everything else."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from .config import TrainConfig
from .model import Model


def orthogonalise(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards U V^T, over the last two axes (Jordan et al., 2024), in bf16."""
    transposed = x.shape[-2] > x.shape[-1]
    y: Tensor = x.bfloat16()
    y = y.mT if transposed else y
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    result: Tensor = y.mT if transposed else y
    return result


def muon_direction(gradient: Tensor, momentum: Tensor) -> Tensor:
    """Update `momentum` in place (Nesterov, 0.95); the returned step has the RMS of an AdamW step (factor 0.2)."""
    momentum.lerp_(gradient, 0.05)
    step = orthogonalise(gradient.lerp(momentum, 0.95))
    scaled: Tensor = step.float() * (0.2 * max(gradient.shape[-2:]) ** 0.5)
    return scaled


class Optimizer:
    """Both optimisers behind one `step(scale)`; `scale` multiplies the peak rates."""

    def __init__(self, model: Model, config: TrainConfig, fast: bool) -> None:
        self.config = config
        groups: dict[torch.Size, list[Tensor]] = defaultdict(list)
        others: list[Tensor] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim >= 2 and not name.endswith(("embedding", "router"))
            if is_matrix and config.optimizer == "muon":
                groups[parameter.shape].append(parameter)
            else:
                others.append(parameter)
        self.groups = list(groups.values())
        self.momenta = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]
        decay = [p for p in others if p.ndim >= 2]
        plain = [p for p in others if p.ndim < 2]
        self.adam = torch.optim.AdamW(
            [{"params": decay, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.adam_rate, betas=(0.9, 0.98), fused=fast,
        )  # fmt: skip
        self.direction = torch.compile(muon_direction, dynamic=False) if fast else muon_direction

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update from the gradients, which are then dropped."""
        for group in self.adam.param_groups:
            group["lr"] = self.config.adam_rate * scale
        self.adam.step()
        rate = self.config.matrix_rate * scale
        for parameters, momentum in zip(self.groups, self.momenta, strict=True):
            step = self.direction(torch.stack([p.grad for p in parameters]), momentum)  # type: ignore[misc]
            torch._foreach_mul_(parameters, 1 - rate * self.config.weight_decay)
            torch._foreach_add_(parameters, list(step.unbind(0)), alpha=-rate)
        self.zero()

    def zero(self) -> None:
        """Drop all gradients."""
        self.adam.zero_grad(set_to_none=True)
        for parameters in self.groups:
            for parameter in parameters:
                parameter.grad = None
