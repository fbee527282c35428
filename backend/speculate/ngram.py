"""`ngram`: what followed the same tokens earlier in the text (prompt look-up); no model, no device memory."""

from __future__ import annotations

from foreload.backend.sampling import Sampler
from foreload.backend.speculate.base import NOTHING, Drafter, Proposal

LONGEST, SHORTEST = 4, 2
"""Tokens that must match. A single one is right too rarely for the experts its drafts demand."""


class NgramDrafter(Drafter):
    """Continues the latest earlier occurrence of the longest end of the text that was seen before.

    Where the continuation runs into the end of the text it goes on periodically. Nothing is proposed without a match.
    """

    def __init__(self) -> None:
        self._ends: list[
            dict[tuple[int, ...], int]
        ] = []  # per size from SHORTEST on: n-gram -> where its latest occurrence ends
        self.start([])

    def start(self, text: list[int]) -> None:
        """Index the text."""
        self._ends = [{} for _ in range(SHORTEST, LONGEST + 1)]
        self._known = 0
        self._learn(text)

    def _learn(self, text: list[int]) -> None:
        """Index the n-grams that have a token after them."""
        for end in range(self._known + 1, len(text)):
            for size in range(SHORTEST, min(end, LONGEST) + 1):
                self._ends[size - SHORTEST][tuple(text[end - size : end])] = end
            self._known = end

    def propose(self, text: list[int], gamma: int, sampler: Sampler) -> Proposal:
        """`gamma` tokens, or none."""
        self._learn(text)
        for size in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            end = self._ends[size - SHORTEST].get(tuple(text[-size:]))
            if end is not None:
                period = len(text) - end
                return Proposal([text[end + n % period] for n in range(gamma)])
        return NOTHING
