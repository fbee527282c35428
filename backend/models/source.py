"""Where tensors come from: the files of a folder, or random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from foreload.backend.models.family import Stored


@dataclass(frozen=True)
class Wanted:
    """One tensor to read, as a float tensor of `size`; `tag` comes back with it.

    With `index` (i, n) it is entry i of a tensor that stacks n. Stored as mxfp4, `name` is followed by `_blocks` and
    `_scales`.
    """

    name: str
    size: tuple[int, ...]
    tag: Any
    index: tuple[int, int] | None = None
    stored: Stored = "float"


class WeightSource(Protocol):
    """Tensors by their names on disk."""

    @property
    def where(self) -> str:
        """The place that errors name."""

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""

    def read(self, wanted: Sequence[Wanted], device: torch.device | None) -> Iterator[tuple[Wanted, Tensor]]:
        """The wanted tensors as floats, in any order; FileError for one that is missing, odd or corrupt."""

    def files(self) -> list[Path]:
        """The files read from, sorted."""

    def hash(self) -> str:
        """Sixteen hex digits that change with any weight."""
