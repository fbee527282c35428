"""Experts computed on the host beside the device, out of the slab: in the native library, or with torch without it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.experts.blocks import ExpertViews
from foreload.backend.native import chosen_isa, load
from foreload.errors import InternalError, UsageError
from foreload.formats import BlockLayout
from foreload.settings import Settings
from foreload.shape import ModelShape

CpuSpan = tuple[int, int, int, int]
"""MoE layer, experts, begun, done; perf_counter nanoseconds."""


class ExpertBlocks(Protocol):
    """Packed experts in host memory."""

    shape: ModelShape
    dtype: torch.dtype

    def layout(self, layer: int) -> BlockLayout:
        """How the blocks of a layer are packed."""

    def addresses(self) -> NDArray[np.int64]:
        """Host addresses of all blocks, [MoE layers, experts]."""

    def views(self, layer: int, expert: int) -> ExpertViews:
        """One expert's tensors."""


class CpuExperts(ABC):
    """Worker threads that run whole experts. Used by one thread."""

    threads: int
    spans: list[CpuSpan] | None = None
    """What has run since this was made a list."""

    @abstractmethod
    def resize(self, threads: int) -> None:
        """Have `threads` workers; nothing may be running."""

    @abstractmethod
    def place(self, cores: Collection[int]) -> None:
        """Keep the workers on `cores`, where the system lets them be placed."""

    @abstractmethod
    def submit(self, layer: int, experts: list[int], x: Tensor, rows: Sequence[NDArray[np.int64]]) -> Tensor:
        """Start each expert on its rows of x [tokens, hidden] on the host.

        Returns the outputs [all rows, hidden], one expert's after the other's, filled when `join` returns.
        """

    def read_ahead(self, layer: int, expert: int) -> None:
        """Bring an expert that is likely needed next (-1: none) into the workers' caches, as long as these are idle."""
        raise InternalError("these workers do not read ahead")

    @abstractmethod
    def done(self) -> bool:
        """Whether nothing is running, without waiting."""

    @abstractmethod
    def drain(self) -> BaseException | None:
        """Wait for all submitted experts; returns the first error among them."""

    def join(self) -> None:
        """Wait for all submitted experts; InternalError if one failed."""
        error = self.drain()
        if error is not None:
            raise InternalError(f"a CPU expert failed: {error}") from error

    def close(self) -> None:
        """Stop the workers."""
        self.resize(0)


def check_read_ahead(settings: Settings) -> None:
    """UsageError if workers cannot read ahead as `settings` ask."""
    if settings.cpu_read_ahead and chosen_isa() is None:
        raise UsageError("cpu_read_ahead: workers of torch do not read ahead, those of the native library do")


def make_cpu_experts(slab: ExpertBlocks, threads: int) -> CpuExperts:
    """The native library's workers where it serves this machine, else torch's (`FORELOAD_CPU_ISA` overrides)."""
    from foreload.backend.experts.cpu_native import NativeExperts
    from foreload.backend.experts.cpu_torch import TorchExperts

    isa = chosen_isa()
    return TorchExperts(slab, threads) if isa is None else NativeExperts(slab, threads, load(), isa)
