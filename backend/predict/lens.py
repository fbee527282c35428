"""A lens looks at every MoE layer of a prompt chunk, and may have another routing executed: calibration, quality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Seen:
    """One MoE layer (counted from 0) on n tokens, before its experts run."""

    at: int
    r: Tensor  # [n, hidden] residual stream after attention
    h: Tensor  # [n, hidden] the gate's input
    ids: Tensor  # [n, k] the true routing
    weights: Tensor  # [n, k] fp32


class Lens(Protocol):
    """Called layer by layer, in order."""

    def route(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """The ids and weights [n, k] to execute."""

    def ran(self, at: int, ids: Tensor, out: Tensor, shared: Tensor | None) -> None:
        """The executed experts' unweighted outputs [n, k, hidden], and what shared experts gave [n, hidden]."""
