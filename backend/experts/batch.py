"""The inputs and outputs of one layer-step's experts: which tokens each expert sees and where its results go.

Every output has its own place by token and rank, so where and when an expert ran changes no bit of the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.experts.blocks import ExpertViews, run_expert
from foreload.backend.policy.window import Demand
from foreload.budget import AT_ONCE


class Batch:
    """A decode step: tokens h [n, hidden] on the device and the outputs [n k, hidden] of their experts."""

    def __init__(self, h: Tensor, demand: Demand) -> None:
        self._h, self._n = h, h.shape[0]
        self._starts = demand.starts()
        self._places = demand.places
        self._top_k = len(demand.places) // self._n
        self._out = torch.empty(len(demand.places), h.shape[1], device=h.device, dtype=h.dtype)
        if self._n > 1:
            self._to = torch.from_numpy(demand.places).to(h.device, non_blocking=True)
            self._rows = self._to // self._top_k

    def input(self, i: int) -> Tensor:
        """The tokens of the i-th expert, [its tokens, hidden]."""
        return self._h if self._n == 1 else self._h[self._rows[self._starts[i] : self._starts[i + 1]]]

    def store(self, i: int, output: Tensor) -> None:
        """Keep the i-th expert's output [its tokens, hidden]."""
        if self._n == 1:
            self._out[int(self._places[i])].copy_(output[0])
        else:
            self._out[self._to[self._starts[i] : self._starts[i + 1]]] = output

    def host_input(self) -> Tensor:
        """All tokens [n, hidden], on the host."""
        return self._h.cpu()

    def rows(self, which: list[int]) -> list[NDArray[np.int64]]:
        """Which tokens each of several experts sees."""
        return [self._places[self._starts[i] : self._starts[i + 1]] // self._top_k for i in which]

    def store_host(self, which: list[int], output: Tensor) -> None:
        """Keep the outputs of several experts, one after the other in `output` on the host."""
        places = [int(place) for i in which for place in self._places[self._starts[i] : self._starts[i + 1]]]
        self._out[places] = output.to(self._out.device)

    def reduce(self, weights: Tensor, shared: Tensor | None) -> Tensor:
        """See `weighted_sum`."""
        return weighted_sum(self.outputs, weights, shared)

    @property
    def outputs(self) -> Tensor:
        """What has been stored, unweighted, [n, k, hidden] by token and rank."""
        return self._out.view(self._n, self._top_k, -1)


class Chunk(ABC):
    """A prompt chunk: tokens h [n, hidden] of experts ids [n, k], sorted by expert on the device.

    `counts` [E]: tokens of each expert, on the host.
    """

    grouped = False
    """Whether `run` launches its experts together."""

    def __init__(self, h: Tensor, ids: Tensor, experts: int) -> None:
        ordered, self._places = ids.reshape(-1).sort(stable=True)  # token * k + rank, those of the first expert first
        starts = torch.searchsorted(ordered, torch.arange(experts + 1, device=ids.device))
        self._h, self._top_k = h, ids.shape[1]
        self._starts: NDArray[np.int64] = starts.cpu().numpy()
        self.counts: NDArray[np.int32] = np.diff(self._starts).astype(np.int32)

    @abstractmethod
    def run(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """Run experts that tokens of the chunk have, each in the slot that holds it, and keep what they give."""

    @abstractmethod
    def add_to(self, r: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """r [n, hidden] plus what the experts and the `shared` ones gave, by fp32 weights [n, k]."""

    @property
    @abstractmethod
    def outputs(self) -> Tensor:
        """What the experts gave, unweighted, [n, k, hidden] by token and rank."""


class PlainChunk(Chunk):
    """A chunk whose experts run one by one, as torch operators."""

    def __init__(self, h: Tensor, ids: Tensor, experts: int, views: Callable[[int], ExpertViews]) -> None:
        """`views(slot)`: the expert in a slot."""
        super().__init__(h, ids, experts)
        self._views = views
        self._inputs = h[self._places // self._top_k]
        self._sorted = torch.empty_like(self._inputs)

    def run(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        """See `Chunk.run`."""
        for expert, slot in zip(experts, slots, strict=True):
            mine = slice(*self._starts[expert : expert + 2].tolist())
            self._sorted[mine] = run_expert(self._inputs[mine], *self._views(slot))

    def add_to(self, r: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        """See `Chunk.add_to`."""
        return r + weighted_sum(self.outputs, weights, shared)

    @property
    def outputs(self) -> Tensor:
        """See `Chunk.outputs`."""
        found = torch.empty_like(self._sorted)
        found[self._places] = self._sorted
        return found.view(-1, self._top_k, found.shape[1])


def weighted_sum(outputs: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """Sum [n, hidden] of outputs [n, k, hidden] with fp32 weights [n, k], in rank order, in the outputs' dtype.

    What the `shared` experts gave [n, hidden] comes last.
    """
    parts = zip(weights.split(AT_ONCE), outputs.split(AT_ONCE), strict=True)
    out = torch.cat([(part[..., None] * of_part.float()).sum(1) for part, of_part in parts])
    return (out if shared is None else out + shared).to(outputs.dtype)
