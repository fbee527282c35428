"""Held-out text for recording and measuring: prompts, windows of fixed length, and the two splits by document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recipes.train.data import HeldOut, load_heldout
from recipes.train.export import END_ID

SUBJECTS = ("code", "manual", "dictionary", "kernel", "prose", "instructions")
TITLES = {"prose": "literature"}
SELECTION, REPORT = 0, 1


def title(kind: str) -> str:
    """How a kind of text is called in recordings and tables."""
    return TITLES.get(kind, kind)


class Texts:
    """Held-out documents by kind; every second document selects, the others report and open recordings."""

    def __init__(self, work: Path) -> None:
        self.documents: dict[str, list[HeldOut]] = {}
        for document in load_heldout(work):
            self.documents.setdefault(document.kind, []).append(document)

    def tokens_per_byte(self, kind: str) -> float:
        """Tokens per byte of a kind of text."""
        documents = self.documents[kind]
        return sum(len(d.ids) for d in documents) / sum(d.size_bytes for d in documents)

    def stream(self, kind: str, split: int) -> np.ndarray:
        """Ids of one split of a kind, each document led by <|endoftext|>."""
        parts = [np.concatenate([[END_ID], d.ids]) for d in self.documents[kind][split::2]]
        return np.concatenate(parts).astype(np.int64)

    def windows(self, kind: str, split: int, length: int, most: int) -> Tensor:
        """At most `most` windows [W, length] of one split, evenly spread."""
        ids = self.stream(kind, split)
        count = len(ids) // length
        chosen = np.unique(np.linspace(0, count - 1, min(most, count)).astype(int))
        return torch.from_numpy(np.stack([ids[i * length : (i + 1) * length] for i in chosen]))

    def openings(self, kind: str, length: int, count: int) -> Tensor:
        """<|endoftext|> and the beginnings of the `count` longest reporting documents, [count, length]."""
        documents = sorted(self.documents[kind][REPORT::2], key=lambda d: -len(d.ids))[:count]
        rows = [np.concatenate([[END_ID], d.ids[: length - 1]]).astype(np.int64) for d in documents]
        return torch.from_numpy(np.stack(rows))


def given_tokens(steps: int, openings: Sequence[Tensor], every: int) -> Tensor:
    """[steps + 1]: an opening at the start of every stretch of `every` tokens after the first; -1 elsewhere."""
    given = torch.full((steps + 1,), -1)
    for number, opening in enumerate(openings):
        begin = (number + 1) * every
        if begin < steps:
            part = opening[: steps - begin]
            given[begin : begin + len(part)] = part
    return given
