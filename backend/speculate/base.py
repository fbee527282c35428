"""`Drafter`: something that proposes the next tokens of a text cheaply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from foreload.backend.sampling import Sampler


@dataclass(frozen=True)
class Proposal:
    """Draft tokens, and the distributions they were drawn from, [tokens, vocab] in float64 on the host.

    Without distributions each token was certain: q is a point mass on it.
    """

    tokens: list[int]
    distributions: Tensor | None = None


NOTHING = Proposal([])


class Drafter(ABC):
    """Proposes tokens for one text that grows; used by the decoding thread alone."""

    @abstractmethod
    def start(self, text: list[int]) -> None:
        """Begin with a text (a prompt, or a request that is already running); what was known of others is forgotten."""

    @abstractmethod
    def propose(self, text: list[int], gamma: int, sampler: Sampler) -> Proposal:
        """At most `gamma` (1 or more) tokens after `text`, which begins like the text of the call before."""
