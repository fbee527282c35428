"""Prompt chunks on the fast path: several experts in one launch, whatever number of tokens each has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.cuda.buffers import host_tensor
from foreload.backend.cuda.kernels.layout import ENTRY, BlockLayout
from foreload.backend.cuda.kernels.ops import TOKENS, Ops
from foreload.backend.experts.batch import Chunk

ENTRIES = 1 << 14
"""Plan entries that are in use before the host waits for the device to be done with them: dozens of layers."""


class ChunkPlans:
    """Plans in host memory and on the device. Each launch has entries of its own, until all have been used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._make(ENTRIES)

    def _make(self, entries: int) -> None:
        with torch.inference_mode(False):
            self._host = host_tensor((entries, ENTRY), torch.int64, self._device)
            self._there = torch.zeros(entries, ENTRY, dtype=torch.int64, device=self._device)
        self._words, self._used = self._host.numpy(), 0

    def _start_anew(self, entries: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._used = 0
        if entries > len(self._words):
            self._make(entries)

    def add(
        self, ops: Ops, addresses: NDArray[np.int64], firsts: NDArray[np.int64], counts: NDArray[np.int64]
    ) -> Tensor:
        """Entries on the device, [tiles, ENTRY], for experts with so many items from `firsts` on."""
        tiles = -(-counts // TOKENS)
        total = int(tiles.sum())
        if self._used + total > len(self._words):
            self._start_anew(total)
        mine = slice(self._used, self._used + total)
        self._used += total
        expert = np.repeat(np.arange(len(tiles)), tiles)
        before = TOKENS * (np.arange(total) - np.repeat(np.cumsum(tiles) - tiles, tiles))
        words = self._words[mine]
        words[:, 0], words[:, 1] = addresses[expert], firsts[expert] + before
        words[:, 2] = np.minimum(TOKENS, counts[expert] - before)
        ops.bring(self._host[mine], self._there[mine])
        return self._there[mine]


class GroupedChunk(Chunk):
    """A chunk whose experts run in slots, several in one launch."""

    grouped = True

    def __init__(
        self,
        h: Tensor,
        ids: Tensor,
        experts: int,
        ops: Ops,
        layout: BlockLayout,
        plans: ChunkPlans,
        targets: NDArray[np.int64],
    ) -> None:
        """`targets` [slots]: device addresses."""
        super().__init__(h, ids, experts)
        self._ops, self._layout, self._plans, self._targets = ops, layout, plans, targets
        items = ids.numel()
        self._mid = torch.empty(items, layout.width, device=h.device, dtype=h.dtype)
        self._out = torch.empty(items, layout.hidden, device=h.device, dtype=h.dtype)

    def run(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """See `Chunk.run`."""
        if not experts:
            return
        which, there = np.asarray(experts), self._targets[np.asarray(slots)]
        firsts = self._starts[which]
        plan = self._plans.add(self._ops, there, firsts, self._starts[which + 1] - firsts)
        self._ops.chunk_experts(self._layout, self._top_k, self._h, plan, self._places, self._mid, self._out)

    def add_to(self, r: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """See `Chunk.add_to`."""
        x = torch.empty_like(r)
        self._ops.weigh(r if shared is None else r + shared, weights, self._out, x)
        return x

    @property
    def outputs(self) -> Tensor:
        """See `Chunk.outputs`."""
        return self._out.view(-1, self._top_k, self._layout.hidden)
