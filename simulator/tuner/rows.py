"""The integer program of a tune: what every choice of a layer costs, and what it takes of every budget.

A choice is a slot count, or a slot count in one of several expert formats, whose sizes differ. Rows: `vram` in slots,
`ram` and `pinned` in bytes of host memory for experts, `link` in nanoseconds of a step in which copies keep the link
busy, `quality` in millionths of a per cent of perplexity: a format's loss is taken to be shared evenly by the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.solver import Problem

LOSS_UNITS = 1_000_000
"""Of the quality row per per cent."""


@dataclass(frozen=True)
class Limits:
    """Budgets beside the slots; None: as much as it takes."""

    ram_bytes: int | None = None  # host memory for all experts
    pinned_bytes: int | None = None  # of it that may be pinned
    link_ns: int | None = None  # time per step that copies may keep the link busy
    loss_pct: float | None = None  # rise in perplexity


NO_LIMITS = Limits()


@dataclass(frozen=True)
class InFormat:
    """What the layers' steps cost with all of them in one expert format."""

    costs_ns: NDArray[np.float64]  # [L, E + 1] at every slot count
    link_ns: NDArray[np.float64]  # [L, E + 1] that copies keep the link busy
    layer_bytes: tuple[int, ...]  # [L] of one expert
    name: str = ""  # of the format; empty where there is no choice
    loss_pct: float = 0.0


def most_loss_pct(limits: Limits, layers: int) -> float:
    """What may be lost: the limit, and a unit of the quality row for each layer, whose share is rounded up."""
    return (limits.loss_pct or 0.0) + layers / LOSS_UNITS


def program(tables: Sequence[InFormat], slots: int, limits: Limits) -> Problem:
    """One choice per layer of `tables` (one format after the other, each at every slot count) within all budgets.

    `slots` of the size of the largest format, as device memory has them.
    """
    layers, counts = tables[0].costs_ns.shape

    def row(of: Callable[[InFormat], NDArray[np.int64]]) -> NDArray[np.int64]:
        return np.concatenate([np.broadcast_to(of(table), (layers, counts)) for table in tables], axis=1)

    use, limit = {"vram": row(lambda _: np.arange(counts))}, {"vram": slots}
    for name, most in (("ram", limits.ram_bytes), ("pinned", limits.pinned_bytes)):
        if most is not None:
            use[name] = row(lambda table: (counts - 1) * np.array(table.layer_bytes, np.int64)[:, None])
            limit[name] = most
    if limits.link_ns is not None:
        use["link"] = row(lambda table: np.ceil(table.link_ns).astype(np.int64))
        limit["link"] = limits.link_ns
    if limits.loss_pct is not None:
        shares = [-(-round(table.loss_pct * LOSS_UNITS) // layers) for table in tables]
        use["quality"] = np.tile(np.repeat(np.array(shares, np.int64), counts), (layers, 1))
        limit["quality"] = round(most_loss_pct(limits, layers) * LOSS_UNITS)
    return Problem(np.concatenate([table.costs_ns for table in tables], axis=1), use, limit)


def planned(settings: Settings, choice: Sequence[int], tables: Sequence[InFormat], shape: ModelShape) -> Settings:
    """`settings` with what a plan of `program` chose for each layer."""
    counts = shape.experts + 1
    slots = tuple(at % counts for at in choice)
    if len(tables) == 1:
        return settings.changed(slots_per_layer=slots, cache_ratio=None)
    formats = tuple(tables[at // counts].name for at in choice)
    chosen = formats[0] if len(set(formats)) == 1 else formats
    return settings.changed(slots_per_layer=slots, cache_ratio=None, expert_format=chosen)
