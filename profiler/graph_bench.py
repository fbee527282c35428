"""The bench of the graph path: whole decode steps as they are launched, their experts and prefetches chosen.

`FastForward.decode` runs; only what it demands is exchanged (`Steer`). What the device takes is seen from the host:
from a launch until the next layer's routing is told. On a device that is played (`tests/backend/cuda`) the same code
runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from foreload.backend.cuda.forward import FastForward, Steer
from foreload.backend.cuda.steps import choose
from foreload.backend.engine import Engine
from foreload.backend.experts.transfer import CopySpan
from foreload.backend.observe import Marks, NoMarks
from foreload.backend.policy.window import Demand, demand_of
from foreload.backend.sampling import Sampler, Sampling
from foreload.backend.speculate.accept import judge
from foreload.backend.speculate.base import Proposal
from foreload.errors import InternalError
from foreload.profiler.bench import Bench, Stage
from foreload.profiler.schema import PROBED_CONTEXT
from foreload.settings import Settings


@dataclass(frozen=True)
class Asked:
    """What one layer-step executes: experts [tokens, each], and what is prefetched for the next layers.

    `wait_us` is waited before it is planned.
    """

    experts: NDArray[np.int64]
    prefetch: tuple[list[int], ...] = ()
    wait_us: int = 0

    @classmethod
    def of(cls, experts: Sequence[int], *prefetch: list[int]) -> Asked:
        """A step of a single token."""
        return cls(np.asarray([experts], np.int64), prefetch)


@dataclass
class LayerTimes:
    """One layer-step: microseconds of the host's blocks, and perf_counter nanoseconds of what happened when."""

    host: dict[str, float] = field(default_factory=dict)
    told_ns: int = 0  # the host knows the routing
    planned_ns: int = 0  # so does the device what to run
    copies: list[CopySpan] = field(default_factory=list)  # demanded here, in the order of landing

    def until_us(self, after: LayerTimes) -> float:
        """From knowing this layer's routing to knowing a later one's."""
        return (after.told_ns - self.told_ns) / 1e3


@dataclass
class StepTimes:
    """One step: its layers, when it began, when the device was first launched, and when its token was known."""

    layers: list[LayerTimes]
    begun_ns: int
    launched_ns: int
    decoded_ns: int  # `decode` has returned; the token is not known yet
    done_ns: int

    def turn_us(self, layer: int) -> float:
        """From the plan of a layer's experts until the next layer has told (or the token is known)."""
        after = self.layers[layer + 1].told_ns if layer + 1 < len(self.layers) else self.done_ns
        return (after - self.layers[layer].planned_ns) / 1e3


def demand_at(experts: NDArray[np.int64], top_k: int) -> Demand:
    """The demand of experts [tokens, each], each token's at its first ranks of `top_k`."""
    found, each = demand_of(experts), experts.shape[1]
    return Demand(found.experts, found.counts, found.places // each * top_k + found.places % each)


def in_runs(layers: int, most: int, turn: int) -> list[int]:
    """How many experts each layer has: 1 to `most`, layers of as many in a row, other ones every turn."""
    return [(turn + layer * most // layers) % most + 1 for layer in range(layers)]


AfterTurn = Callable[["GraphBench", str, Stage, int], object]
"""What else is measured after a turn of a probe: the bench, the probe, its stage, and the CPU's threads (0: none)."""


class GraphBench(Bench):
    """Drives an engine of the graph path; leaves it with an empty cache and its own settings (`close`)."""

    def __init__(self, engine: Engine, after_turn: AfterTurn | None = None) -> None:
        super().__init__(engine)
        self._after_turn = after_turn
        if not isinstance(engine.forward, FastForward):
            raise InternalError("the engine launches no graphs")
        self.forward = engine.forward
        self._sampler = Sampler(Sampling())

    def after_turn(self, probe: str, stage: Stage, threads: int = 0) -> None:
        """A turn of a probe is done: whoever wants to measure something beside it has one, too."""
        if self._after_turn is not None:
            self._after_turn(self, probe, stage, threads)

    def close(self) -> None:
        """Give the engine back as it was, with an empty cache."""
        self.forward.steer = None
        self.forward.follow(None)
        super().close()

    def stage(
        self, miss_action: str, threads: int = 1, depth: int = 0, speculate: bool = False, read_ahead: bool = False
    ) -> Stage:
        """Fill every layer's cache with the same experts and fix it; misses then take `miss_action`.

        `depth`: the gate predicts so many layers ahead; `speculate`: all layers but the first execute predictions;
        `read_ahead`: idle workers read the last of the predicted.
        """
        base = {"slots_per_layer": (self._resident,) * self.shape.n_moe_layers, "cpu_threads": threads}
        base["expert_format"] = self._settings.expert_format
        self.engine.apply(Settings.parse({**base, "miss_action": "fetch"}))
        resident, k = list(range(self._resident)), self.shape.top_k
        for at in range(0, self._resident, k):
            self.step([Asked.of(resident[at : at + k])] * self.shape.n_moe_layers)
        ahead = {"predictor": "gate", "prefetch_depth": depth} if depth else {}
        ahead |= {"speculate_layers": "all"} if speculate else {}
        ahead |= {"cpu_read_ahead": True} if read_ahead else {}
        self.engine.apply(Settings.parse({**base, **ahead, "miss_action": miss_action, "admission": "none"}))
        self.engine.place_helpers()
        return Stage(resident, list(range(self._resident, self.shape.experts)))

    def step(
        self, asked: Sequence[Asked], context: int = PROBED_CONTEXT, slots: NDArray[np.int32] | None = None
    ) -> StepTimes:
        """One decode step whose layers execute `asked` (in turn), its last token at `context`, and the choice after it.

        With `slots` [layers, experts] it is one launch. Copies are given where they are recorded (`copies.spans`).
        """
        rows, k = len(asked[0].experts), self.shape.top_k
        layers = range(self.shape.n_moe_layers)
        demands = [demand_at(asked[at].experts, k) for at in layers]
        prefetches = [asked[at].prefetch[: layers[-1] - at] for at in layers]
        chosen = choose(self.shape, demands, prefetches, [asked[at].wait_us for at in layers])
        self.forward.steer, self.forward.marks = Steer(chosen, slots), Marks()
        position = max(0, min(context, self.decoder.context_tokens) - rows)
        with torch.inference_mode():
            begun = time.perf_counter_ns()
            logits = self.forward.decode([0] * rows, position)
            decoded = time.perf_counter_ns()
            judge(self._sampler, logits, Proposal([0] * (rows - 1)))
            done = time.perf_counter_ns()
        marks, self.forward.marks = self.forward.marks, NoMarks()
        return self._times(marks, begun, decoded, done)

    def _times(self, marks: Marks, begun: int, decoded: int, done: int) -> StepTimes:
        layers = [LayerTimes() for _ in range(self.shape.n_moe_layers)]
        launched = begun
        for kind, layer, _, since, until in marks.spans:
            if layer < 0:
                launched = until if kind == "embed" else launched
                continue
            of = layers[layer]
            of.host[kind] = of.host.get(kind, 0.0) + (until - since) / 1e3
            if kind == "route":
                of.told_ns = until
            elif kind == "plan" and not of.planned_ns:  # the other is of predictions
                of.planned_ns = until
        for copy in self.engine.copies.spans or ():
            layers[copy.key // self.shape.experts].copies.append(copy)
        if self.engine.copies.spans is not None:
            self.engine.copies.spans = []
        return StepTimes(layers, begun, launched, decoded, done)

    def resident_us(self, steps: int = 5) -> float:
        """Median turn of layer-steps whose experts are all resident; sets a stage."""
        asked = [Asked.of(self.stage("fetch").resident[: self.shape.top_k])] * self.shape.n_moe_layers
        found = [self.step(asked) for _ in range(steps)][1:]
        return median(step.turn_us(layer) for step in found for layer in range(self.shape.n_moe_layers))

    def entering_us(self, layers: int, rows: int = 1, context: int = PROBED_CONTEXT) -> float:
        """From launching what enters the first `layers` layers until the last has told."""
        position = max(0, min(context, self.decoder.context_tokens) - rows)
        with torch.inference_mode():
            return self.forward.told_after(rows, position, layers) / 1e3

    def anywhere(self) -> NDArray[np.int32]:
        """Slots [layers, experts] for steps of one launch: as many different ones as the device holds, with whatever
        is in them. Such steps read from all over the memory that residents take, and farther apart takes longer.
        """
        self.engine.apply(Settings(expert_format=self._settings.expert_format))
        experts = np.arange(self.shape.all_experts) % self.engine.brain.slots
        return experts.reshape(self.shape.n_moe_layers, self.shape.experts).astype(np.int32)
