"""Packed token ids: random windows for training, documents for evaluation."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def load_ids(path: Path) -> np.ndarray:
    """uint16 ids of an xz-compressed file written by `recipes.corpus.tokenizer`."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


class Windows:
    """Random windows of the training stream, drawn on the device: each epoch visits every window of a fresh offset."""

    def __init__(self, ids: np.ndarray, device: torch.device, seed: int) -> None:
        self.ids = torch.from_numpy(ids.astype(np.int16)).to(device)
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device
        self._starts = torch.empty(0, dtype=torch.long)
        self._length = 0

    def batch(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both (rows, length) int64."""
        if self._length != length or len(self._starts) < rows:
            self._shuffle(length)
        starts, self._starts = self._starts[:rows], self._starts[rows:]
        window = self.ids[starts[:, None] + torch.arange(length + 1, device=self.device)].long()
        return window[:, :-1], window[:, 1:]

    def _shuffle(self, length: int) -> None:
        offset = int(torch.randint(length, (1,), generator=self.generator))
        count = (len(self.ids) - offset - 1) // length
        self._starts = (torch.randperm(count, generator=self.generator) * length + offset).to(self.device)
        self._length = length


@dataclass(frozen=True)
class HeldOut:
    """One held-out document."""

    kind: str
    size_bytes: int
    ids: np.ndarray


def load_heldout(work: Path) -> list[HeldOut]:
    """Held-out documents in hash order."""
    ids = load_ids(work / "heldout.bin.xz")
    rows = json.loads((work / "heldout.meta.json").read_text())
    return [HeldOut(r["kind"], r["bytes"], ids[r["begin"] : r["end"]]) for r in rows]
