"""Belady's eviction as an oracle beside the simulated engine: when every expert is demanded next.

Steps are numbered as the brain counts them. A prompt loads what it needs without being counted, so an expert that a
prompt demands before any decode step does is never demanded next (as in `bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import Brain
from foreload.backend.policy.state import NEVER
from foreload.shape import ModelShape
from foreload.simulator.workload import Request


class Oracle:
    """Knows the decode steps of `requests`, served in this order."""

    def __init__(self, requests: Sequence[Request], shape: ModelShape) -> None:
        later = np.full((shape.n_moe_layers, shape.experts), NEVER, np.int64)
        now = sum(len(request.fed) for request in requests)
        self._steps: dict[int, NDArray[np.int64]] = {}  # request -> [S, L, D] as its demand
        self._prompts: dict[int, NDArray[np.int64]] = {}  # request -> [L, E]
        for request in reversed(requests):
            found = np.full(request.demand.shape, NEVER, np.int64)
            for step in range(len(request.fed) - 1, -1, -1):
                now -= 1
                layers, places = np.nonzero(request.counts[step])
                experts = request.demand[step, layers, places]
                found[step, layers, places] = later[layers, experts]
                later[layers, experts] = now
            self._steps[request.number] = found
            self._prompts[request.number] = later.copy()
            for layer in range(shape.n_moe_layers):
                later[layer, request.prompt[:, layer].ravel()] = NEVER

    def before_demand(self, brain: Brain, request: Request, step: int, layer: int) -> None:
        """Tell the brain when the experts of a layer-step are demanded after it."""
        count = int(np.count_nonzero(request.counts[step, layer]))
        following = self._steps[request.number][step, layer, :count]
        brain.foresee(layer, request.demand[step, layer, :count], following)

    def before_prompt(self, brain: Brain, request: Request, layer: int) -> None:
        """Tell the brain when every expert of a layer is demanded after the prompt."""
        every = np.arange(brain.shape.experts)
        brain.foresee(layer, every, self._prompts[request.number][layer])
