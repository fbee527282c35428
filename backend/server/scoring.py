"""Log-probabilities of tokens as the model gives them, before temperature and top-p."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from foreload.backend.server.job import TokenScore


class Scorer:
    """Pairs rows of logits with the tokens that follow them, in order."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._rows: deque[Tensor] = deque()

    def add(self, logits: Tensor) -> None:
        """Rows [n, vocab] for the next n tokens."""
        self._rows.extend(logits.float().log_softmax(-1))

    def take(self, tokens: Sequence[int]) -> list[TokenScore]:
        """The scores of the next tokens, each of which has its row."""
        if not tokens:
            return []
        rows = torch.stack([self._rows.popleft() for _ in tokens])
        chosen = rows.gather(1, torch.tensor(tokens, device=rows.device)[:, None])[:, 0].tolist()
        values, ids = (part.tolist() for part in rows.topk(min(self._top, rows.shape[1]), -1))
        return [
            TokenScore(token, logprob, tuple(zip(best, scores, strict=True)))
            for token, logprob, best, scores in zip(tokens, chosen, ids, values, strict=True)
        ]
