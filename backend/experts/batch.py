"""The inputs and outputs of one layer-step's experts: which tokens each expert sees and where its results go."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.policy.window import Demand


class Batch:
    """Tokens h [n, hidden] on the device and the outputs [n k, hidden] of their experts, by token and rank.

    Every output has its own place, so where and when an expert ran changes no bit of the sum.
    """

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
        """Sum [n, hidden] over each token's experts with fp32 weights [n, k], in rank order.

        What the `shared` experts gave [n, hidden] comes last.
        """
        out = (weights[..., None] * self.outputs.float()).sum(1)
        return (out if shared is None else out + shared).to(self._h.dtype)

    @property
    def outputs(self) -> Tensor:
        """What has been stored, unweighted, [n, k, hidden] by token and rank."""
        return self._out.view(self._n, self._top_k, -1)
