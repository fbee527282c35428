"""Choosing the next token from logits: greedy, or temperature and top-p with a seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foreload.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; otherwise tokens are drawn from the smallest set with probability >= top_p."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise UsageError(f"temperature {self.temperature} must be from 0 (greedy) to 100")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p {self.top_p} must be above 0 and at most 1")


class Sampler:
    """Draws tokens; the same seed gives the same tokens on the same logits and drafts."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken; the lowest id among equals."""
        return self._sampling.temperature == 0

    def draw(self, logits: Tensor) -> int:
        """The next token from logits [vocab]."""
        return int(logits.argmax()) if self.greedy else self.choose(self.distribution(logits))

    def choose(self, probabilities: Tensor) -> int:
        """A token drawn from probabilities [vocab], which need not sum to 1."""
        cumulative = probabilities.cumsum(0)
        drawn = torch.searchsorted(cumulative, cumulative[-1:] * self.uniform(), right=True)
        return int(drawn.clamp(max=len(probabilities) - 1))

    def uniform(self) -> float:
        """A number drawn from [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def distribution(self, logits: Tensor) -> Tensor:
        """Probabilities [vocab] that `draw` draws from, in float64, where the logits are."""
        probabilities = (logits.double() / self._sampling.temperature).softmax(-1)
        if self._sampling.top_p < 1:
            ordered, index = probabilities.sort(descending=True)
            outside = ordered.cumsum(0) - ordered >= self._sampling.top_p
            probabilities = probabilities.index_fill(0, index[outside], 0.0)
            probabilities /= probabilities.sum()
        return probabilities
