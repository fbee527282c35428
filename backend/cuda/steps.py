"""A decode step's memory on the host as the compiled loop takes it, and demands that probes put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.backend.cuda.buffers import HostMemory
from foreload.backend.cuda.issue import CStep
from foreload.backend.cuda.layers import N_TIMES, Chosen, Graphs, Host
from foreload.backend.cuda.programs import Program
from foreload.backend.experts.cpu_native import NativeExperts
from foreload.backend.native.library import CWork
from foreload.backend.policy.window import Demand
from foreload.shape import ModelShape


class StepArrays:
    """Arrays over static memory of the host, made once; `number` is the running step's."""

    def __init__(self, host: HostMemory, shape: ModelShape, waves: Sequence[tuple[int, ...]], bring: int) -> None:
        """`waves`: of each layer, the graphs of its late experts; `bring`: the one that brings their plan."""
        layers, items = shape.n_moe_layers, len(host.waves)
        self.number = 0
        self.given, self.words, self.guesses = host.given.numpy(), host.words.numpy(), host.guesses.numpy()
        self.times, self.outcome = np.zeros((layers, N_TIMES), np.int64), np.zeros(2, np.int64)
        self.unchosen = choose(shape, [], [])
        self._memory, self._items, self._experts = host, items, shape.experts
        self._waves = np.asarray(waves, np.uint64)
        self._used, self._late = np.zeros(items, np.int32), np.zeros((3, items), np.int64)
        keys, firsts, counts = (row.ctypes.data for row in self._late)
        self._c = CStep(
            plan=host.waves.data_ptr(), keys=keys, firsts=firsts, counts=counts, used=self._used.ctypes.data,
            bring=bring,
        )  # fmt: skip
        self._work, self._pairs = CWork(), [np.zeros(items + 1, np.int32) for _ in range(2)]
        self._weights, self._blocks = np.zeros(items, np.float32), np.zeros(items, np.int64)
        self._made: tuple[NDArray[np.int64], NativeExperts | None, Host] | None = None
        self._graphs: tuple[Program, Graphs] | None = None

    def host(self, rows: int, targets: NDArray[np.int64], cpu: NativeExperts | None) -> Host:
        """Everything for a step of `rows` rows; targets [slots] are device addresses."""
        if self._made is None or self._made[0] is not targets or self._made[1] is not cpu:
            self._made = (targets, cpu, self._make(targets, cpu))
        self._work.tokens = rows
        return self._made[2]

    def _make(self, targets: NDArray[np.int64], cpu: NativeExperts | None) -> Host:
        m, items, layers = self._memory, self._items, len(self.words)
        first, rows = self._pairs
        self._work.x_bf16, self._work.out_bf16 = int(m.rows.element_size() == 2), 0
        self._work.blocks, self._work.first = self._blocks.ctypes.data, first.ctypes.data
        self._work.x_rows, self._work.weights = rows.ctypes.data, self._weights.ctypes.data
        self._work.x, self._work.out, self._work.soon = m.rows.data_ptr(), m.out.data_ptr(), m.soon.data_ptr()
        return Host(
            words=self.words,
            guesses=self.guesses,
            weights=m.weights.view(-1).numpy(),
            plan=m.plan.numpy(),
            on_host=np.zeros(items, np.int64),
            targets=targets,
            used=self._used,
            late=self._late,
            step=_words(self._c, np.int64),
            blocks=np.zeros((layers, 1), np.int64) if cpu is None else cpu.addresses,
            layouts=np.zeros(layers, np.int64) if cpu is None else cpu.layout_addresses,
            work=_words(self._work, np.int32),
            cpu_blocks=self._blocks,
            cpu_first=first,
            cpu_rows=rows,
            cpu_weights=self._weights,
            experts=np.zeros(items, np.int32),
            counts=np.zeros(items, np.int32),
            places=np.zeros(items, np.int64),
            actions=np.zeros(items, np.int8),
            found=np.zeros(max(self._experts, self.guesses.shape[1]), np.int32),
            scratch=np.zeros((2, self._experts), np.int32),
            times=self.times,
            outcome=self.outcome,
        )

    def graphs(self, program: Program) -> Graphs:
        """What a program launches."""
        if self._graphs is None or self._graphs[0] is not program:
            enter = np.asarray(program.enter, np.uint64)
            planned = np.asarray(program.planned, np.uint64) * np.uint64(not program.joined)
            self._graphs = (program, Graphs(enter, planned, self._waves))
        return self._graphs[1]

    def decided(self) -> tuple[NDArray[np.int32], NDArray[np.int8]]:
        """Experts of the layer-step run last and what was decided for each."""
        assert self._made is not None
        host, distinct = self._made[2], int(self.outcome[1])
        return host.experts[:distinct].copy(), host.actions[:distinct].copy()

    def release(self) -> None:
        """Whatever the device waits for in this step is there, and empty."""
        self._memory.release((self.number + 1) * len(self.words) - 1)

    def late_keys(self) -> list[int]:
        """Keys of the experts of the layer-step run last that come later."""
        found: list[int] = self._late[0, : self._c.late].tolist()
        return found


def _words(structure: Any, kind: type[Any]) -> NDArray[Any]:
    """A C structure in place as an array."""
    return np.frombuffer(structure, kind)


def choose(
    shape: ModelShape,
    demands: Sequence[Demand],
    predicted: Sequence[Sequence[Sequence[int]]],
    wait_us: Sequence[int] = (),
) -> Chosen:
    """Demands of all layers and, of each, predictions for the layers after it; without demands what is told counts."""
    layers, depths = shape.n_moe_layers, max((len(ahead) for ahead in predicted), default=0)
    items = max((len(demand.places) for demand in demands), default=1)
    most = max((len(experts) for ahead in predicted for experts in ahead), default=1)
    chosen = Chosen(
        on=int(bool(demands)),
        distinct=np.zeros(layers, np.int32),
        items=np.zeros(layers, np.int32),
        experts=np.zeros((layers, items), np.int32),
        counts=np.zeros((layers, items), np.int32),
        places=np.zeros((layers, items), np.int64),
        predicted=np.zeros((layers, depths, most), np.int32),
        predictions=np.zeros((layers, depths), np.int32),
        wait_ns=np.zeros(layers, np.int64),
    )
    for at, demand in enumerate(demands):
        distinct, count = len(demand.experts), len(demand.places)
        chosen.distinct[at], chosen.items[at] = distinct, count
        chosen.experts[at, :distinct], chosen.counts[at, :distinct] = demand.experts, demand.counts
        chosen.places[at, :count] = demand.places
    for at, of_layer in enumerate(predicted):
        for ahead, experts in enumerate(of_layer):
            chosen.predicted[at, ahead, : len(experts)] = experts
            chosen.predictions[at, ahead] = len(experts)
    for at, us in enumerate(wait_us):
        chosen.wait_ns[at] = 1000 * us
    return chosen
