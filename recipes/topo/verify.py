"""Speculative decoding of several sequences in step: drafts, one verify forward, acceptance.

The target's token of every position is its first choice (greedy) or, at a temperature, its draw by the Gumbel rule
with noise fixed per position: either way a draft is accepted if it is that token, so the text does not depend on
drafts, and acceptance of these drafts (which propose one token, not a distribution) follows the rejection rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from recipes.train.export import END_ID
from recipes.train.model import Model

from .decode import Decoder, Kept
from .live import Live

DRAFT_WINDOW = 128


class Draft(Protocol):
    """Proposes `gamma` tokens after each of some sequences."""

    def propose(self, histories: list[list[int]], gamma: int) -> list[list[int]]:
        """One list of `gamma` tokens per history."""
        ...


def ngram(history: list[int], gamma: int, longest: int = 4, shortest: int = 1) -> list[int]:
    """Prompt look-up: what followed the latest earlier occurrence of the longest matching end; else the last token."""
    for size in range(longest, shortest - 1, -1):
        tail = history[-size:]
        for at in range(len(history) - size - 1, -1, -1):
            if history[at : at + size] == tail:
                found = history[at + size : at + size + gamma]
                while len(found) < gamma:  # the match runs into the end: continue periodically
                    found.append(found[len(found) - (len(history) - at - size)])
                return found
    return [history[-1]] * gamma


class NgramDraft:
    """The n-gram draft: no model."""

    def propose(self, histories: list[list[int]], gamma: int) -> list[list[int]]:
        """Look-up in each sequence's own tokens."""
        return [ngram(history, gamma) for history in histories]


class ModelDraft:
    """A small dense model, greedy, on the last tokens of each sequence."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model.to(device)
        self.device = device

    @torch.no_grad()
    def propose(self, histories: list[list[int]], gamma: int) -> list[list[int]]:
        """All sequences at once; the host waits once."""
        window = min(DRAFT_WINDOW, *(len(h) for h in histories))
        ids = torch.tensor([h[-window:] for h in histories], device=self.device)
        for _ in range(gamma):
            hidden = self.model(ids[:, -window:], torch.float32)[0][:, -1]
            ids = torch.cat([ids, self.model.logits(hidden, torch.float32).argmax(-1, keepdim=True)], 1)
        return [[int(token) for token in row] for row in ids[:, window:].tolist()]


@dataclass(frozen=True)
class Verified:
    """Verify windows of B sequences and how many drafts of each window were accepted."""

    prompt_ids: Tensor  # [L, B, P, k]
    kept: Kept
    accepted: Tensor  # [S, B] drafts accepted, 0..gamma

    def flags(self, row: int, step: int) -> list[bool]:
        """`accepted` of a window's rows: the token fed in first is always the target's own."""
        count, width = int(self.accepted[step, row]), self.kept.tokens.shape[-1]
        return [place <= count for place in range(width)]

    def distinct(self, row: int, size: int = 8) -> float:
        """Share of distinct runs of `size` tokens in the emitted text: near 0 where it repeats itself."""
        text: list[int] = []
        for step, count in enumerate(self.accepted[:, row].tolist()):
            text += self.kept.tokens[step, row, : count + 1].tolist()
        runs = [tuple(text[i : i + size]) for i in range(len(text) - size + 1)]
        return round(len(set(runs)) / max(1, len(runs)), 3)


class _Target:
    """The target's token after each position."""

    def __init__(self, live: Live, rows: int, length: int, temperature: float, seeds: list[int]) -> None:
        self.temperature, self.noise = temperature, None
        self.row = torch.arange(rows, device=live.device)[:, None]
        if temperature > 0:
            noise = torch.empty(rows, length + 1, live.c.vocabulary)
            for row, seed in enumerate(seeds):
                noise[row] = torch.rand(noise.shape[1:], generator=torch.Generator().manual_seed(seed))
            self.noise = noise.to(live.device).clamp_(1e-20, 1 - 1e-7).log_().neg_().log_().neg_()

    def __call__(self, logits: Tensor, positions: Tensor) -> list[list[int]]:
        """Tokens [B, n] from logits [B, n, V] of positions [B, n]."""
        if self.noise is not None:
            logits = logits / self.temperature + self.noise[self.row, positions + 1]
            logits[..., END_ID] = float("-inf")
        tokens: list[list[int]] = logits.argmax(-1).tolist()
        return tokens


@torch.no_grad()
def verify(
    live: Live, prompts: Tensor, drafts: list[Draft], gamma: int, steps: int, length: int, temperature: float = 0.0,
    seeds: list[int] | None = None,
) -> Verified:  # fmt: skip
    """Speculative decoding: `steps` verify windows of gamma + 1 tokens after prompts [B, P]; temperature 0: greedy."""
    rows, prompt = prompts.shape
    decoder = Decoder(live, rows, gamma + 1, length, steps)
    logits, prompt_ids, _ = decoder.prefill(prompts.to(live.device))
    decoder.capture()
    histories = [list(map(int, row)) for row in prompts.tolist()]
    target = _Target(live, rows, length, temperature, seeds or list(range(rows)))
    last = torch.full((rows, 1), prompt - 1, device=live.device)
    pending = [tokens[0] for tokens in target(logits[:, None], last)]
    accepted = torch.zeros(steps, rows, dtype=torch.long)
    span = torch.arange(gamma + 1)
    for step in range(steps):
        for history, token in zip(histories, pending, strict=True):
            history.append(token)
        proposals: list[list[int]] = [[] for _ in range(rows)]
        for draft in dict.fromkeys(drafts):  # one call per kind of draft
            of = [row for row in range(rows) if drafts[row] is draft]
            for row, proposal in zip(of, draft.propose([histories[row] for row in of], gamma), strict=True):
                proposals[row] = proposal
        fed = torch.tensor([[history[-1], *p] for history, p in zip(histories, proposals, strict=True)])
        starts = torch.tensor([len(history) - 1 for history in histories])
        decoder.tokens.copy_(fed)
        decoder.positions.copy_(starts[:, None] + span)
        decoder.step()
        targets = target(decoder.logits, decoder.positions)
        for row in range(rows):
            count = 0
            while count < gamma and targets[row][count] == proposals[row][count]:
                count += 1
            accepted[step, row] = count
            histories[row] += proposals[row][:count]
            pending[row] = int(targets[row][count])
    if max(len(history) for history in histories) + 1 > length - gamma:
        raise RuntimeError(f"a sequence outgrew the cache of {length} tokens")
    return Verified(prompt_ids.cpu(), decoder.kept(steps), accepted)
