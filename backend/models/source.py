"""Where tensors come from: the files of a folder, or random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foreload.backend.models.family import Stored
from foreload.backend.models.packed import Fp8Tiles, Mxfp4


@dataclass(frozen=True)
class Wanted:
    """One tensor of `size` to read; `tag` comes back with it.

    With `index` (i, n) it is entry i of a tensor that stacks n. Stored as mxfp4, `name` is followed by `_blocks` and
    `_scales`, and it comes packed; as fp8_tile it comes packed too.
    """

    name: str
    size: tuple[int, ...]
    tag: Any
    index: tuple[int, int] | None = None
    stored: Stored = "float"


Found = Tensor | Mxfp4 | Fp8Tiles
"""A tensor of floats, or packed as it is stored."""


class WeightSource(Protocol):
    """Tensors by their names on disk."""

    @property
    def where(self) -> str:
        """The place that errors name."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def read(self, wanted: Sequence[Wanted], device: torch.device | None) -> Iterator[tuple[Wanted, Found]]:
        """The wanted tensors as floats, or packed, in any order; FileError for one that is missing, odd or corrupt."""

    def files(self) -> list[Path]:
        """The files read from, sorted."""

    def hash(self) -> str:
        """Sixteen hex digits that change with any weight."""
