"""`FastForward`: decode steps as graphs, with one host decision per layer or, if all experts are resident, none."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.cuda.buffers import GIVEN, DeviceMemory, HostMemory
from foreload.backend.cuda.copies import NativeCopies
from foreload.backend.cuda.issue import CStep, Issuer
from foreload.backend.cuda.kernels.layout import BlockLayout
from foreload.backend.cuda.kernels.ops import TAG, Ops
from foreload.backend.cuda.pieces import Behaviour, Pieces
from foreload.backend.cuda.plan import write_plan
from foreload.backend.cuda.programs import Capture, Program, make_program, make_waves
from foreload.backend.cuda.throttle import CapturedStopwatch
from foreload.backend.experts.link import transfer_ns
from foreload.backend.forward import Forward
from foreload.backend.observe import RouteLog
from foreload.backend.policy.state import KEPT
from foreload.backend.policy.step import ACT_CPU
from foreload.backend.policy.window import Demand, demand_of, merge_predictions
from foreload.errors import InternalError, UsageError

PATIENCE_NS = 1_000_000_000
Guesses = list[NDArray[np.int32]]
"""Experts predicted for each of the next layers, best first."""
BEHAVIOURS = 4  # kept captured, the newest


@dataclass(frozen=True)
class FastParts:
    """What a fast path is made of."""

    ops: Ops
    issuer: Issuer
    capture: Capture
    layouts: Sequence[BlockLayout]
    """Of the expert blocks of each MoE layer."""
    stream: Callable[[], int]
    """The compute stream that kernels are queued on now."""
    idle: Callable[[], bool]
    """Whether the compute stream has nothing to do; raises what a kernel has raised."""


@dataclass(frozen=True)
class Steer:
    """What steps execute in place of what their gates say, so that probes choose what is measured.

    `choose(layer, demand, predicted)` gives what is demanded and prefetched instead. With `slots` [layers, experts] a
    step is one launch that reads experts there, whatever the brain holds.
    """

    choose: Callable[[int, Demand, Guesses], tuple[Demand, Guesses]]
    slots: NDArray[np.int32] | None = None


class FastForward(Forward):
    """A forward whose decode steps are launched as graphs. Prompts take the way of `Forward`."""

    _copies: NativeCopies
    steer: Steer | None = None

    def __init__(self, *arguments: Any, parts: FastParts, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._parts, self._issuer = parts, parts.issuer
        self._dtype = self.decoder.embedding.dtype
        self._number = 0  # of the step
        self._rows = 0
        self.behaviours = BEHAVIOURS
        self._programs: dict[tuple[int, Behaviour], Program] = {}
        self._waves: dict[BlockLayout, tuple[int, ...]] = {}
        self._resident_at: NDArray[np.int32] | None = None  # slots that the device's table of addresses shows
        self._stopwatch: CapturedStopwatch | None = None

    @property
    def ops(self) -> Ops:
        """The kernels that graphs are made of."""
        return self._parts.ops

    # Graphs

    def prepare(self, rows: Sequence[int]) -> None:
        """Capture what steps of so many rows launch under the present settings."""
        for n in sorted(rows, reverse=True):
            self._program(n)

    def _behaviour(self) -> Behaviour:
        ahead, cpu = self.look_ahead, self._cpu.threads > 0
        predictor = ahead.predictor
        if predictor is None:
            return Behaviour(cpu=cpu, replay=self.replay)
        key, depth = (predictor.key, id(predictor.calibration)), min(ahead.depth, self._shape.n_moe_layers - 1)
        return Behaviour(predictor, key, depth, ahead.width, ahead.speculated, cpu, self.replay)

    def _program(self, rows: int) -> Program:
        behaviour = self._behaviour()
        if rows > self._rows or behaviour.guesses(rows) > self._host.guesses.shape[1]:
            self._allocate(max(rows, self._rows), behaviour)
        found = self._programs.get((rows, behaviour))
        if found is None:
            self._forget_old(behaviour)
            pieces = self._pieces(rows, behaviour)
            found = make_program(pieces, self._addresses, self.decoder, self._parts.capture)
            self._programs[rows, behaviour] = found
            self._resident_at = None
        return found

    def _pieces(self, rows: int, behaviour: Behaviour) -> Pieces:
        parts = self._parts
        return Pieces(self.decoder, parts.ops, parts.layouts, self._device, self._host, rows, behaviour)

    def _forget_old(self, behaviour: Behaviour) -> None:
        """Keep graphs of a few behaviours only."""
        known = list(dict.fromkeys(which for _, which in self._programs))
        if behaviour in known or len(known) < self.behaviours:
            return
        for key in [key for key in self._programs if key[1] == known[0]]:
            for executable in self._programs.pop(key).executables():
                self._parts.capture.drop(executable)

    def _allocate(self, rows: int, behaviour: Behaviour) -> None:
        """Static memory for steps of up to `rows` rows; graphs of the old memory are given up."""
        waves = [executable for of_layout in self._waves.values() for executable in of_layout]
        for executable in (*waves, *(e for p in self._programs.values() for e in p.executables())):
            self._parts.capture.drop(executable)
        self._programs.clear()
        shape, device = self._shape, self.decoder.device
        with torch.inference_mode(False):
            self._host = HostMemory.make(shape, rows, behaviour.guesses(rows), self._dtype, device)
            self._device = DeviceMemory.make(shape, rows, self.decoder.context_tokens, self._dtype, device)
            self._addresses = torch.zeros(shape.n_moe_layers, shape.experts, dtype=torch.int64, device=device)
        self._rows = rows
        self._waves = make_waves(self._pieces(rows, behaviour), self._parts.capture)
        self._step = StepArrays(self._host, [self._waves[layout] for layout in self._parts.layouts])

    def step_times(self, rows: int, repeats: int = 20) -> dict[str, float]:
        """Median device microseconds of each graph of a step of `rows` rows alone, at the position of the step before.

        `enter`: the layers in sum, routing included; `planned`: one layer's resident experts as last planned. With all
        experts resident `whole` is a step of one launch; before that it leaves experts out.
        """
        program, stream = self._program(rows), self._parts.stream()
        found: dict[str, list[float]] = {"enter": [], "planned": [], "whole": []}
        for _ in range(repeats):
            for name, graphs in (
                ("enter", program.enter),
                ("planned", program.planned[:1]),
                ("whole", (program.whole,)),
            ):
                begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begun.record()
                for graph in graphs:
                    self._issuer.launch(graph, stream)
                ended.record()
                ended.synchronize()
                found[name].append(begun.elapsed_time(ended) * 1e3)
        return {name: float(np.median(times)) for name, times in found.items()}

    def throttle(self, bytes_per_second: int | None) -> None:
        """See `Link.throttle`."""
        watch = self._stopwatch
        if bytes_per_second is not None:
            watch = watch or CapturedStopwatch(self._parts.ops, self.decoder.device, self._parts.capture)
            watch.last(transfer_ns(self._block_bytes(), bytes_per_second))
            self._stopwatch = watch
        wanted = (None, None) if watch is None or bytes_per_second is None else (watch.before, watch.after)
        with self._copies.lock:
            self._issuer.throttle(*wanted)

    def _block_bytes(self) -> int:
        """Bytes of a copy; UsageError if layers differ in them."""
        sizes = {layout.block_bytes for layout in self._parts.layouts}
        if len(sizes) > 1:
            raise UsageError("an emulated link on a GPU needs experts of one format: layers have several here")
        return sizes.pop()

    # Decode

    def decode(self, token_ids: list[int], position: int) -> Tensor:
        """See `Forward.decode`; logits are float32."""
        n = len(token_ids)
        log = RouteLog(self.observer, n, self._shape.n_moe_layers, self._shape.top_k) if self.observer else None
        program = self._program(n)
        self.marks.start()
        self._give(token_ids, position)
        slots = self._whole() if log is None and self.shadow is None else None
        if slots is not None:
            self._run_whole(program, slots)
        else:
            self._issuer.launch(program.enter[0], self._parts.stream())
            self.marks.mark("embed")
            for at in range(self._shape.n_moe_layers):
                self._layer(program, at, log)
        logits = self._logits(program)
        self.marks.mark("head")
        with self._copies.lock:
            self._brain.end_step()
        self._log = log
        return logits

    def told_after(self, rows: int, position: int, layers: int) -> int:
        """Nanoseconds from launching what enters the first `layers` MoE layers until the last has told the host.

        For probes: no expert runs, graphs follow each other without the host.
        """
        program, stream = self._program(rows), self._parts.stream()
        self._give([0] * rows, position)
        begun = time.perf_counter_ns()
        for graph in program.enter[:layers]:
            self._issuer.launch(graph, stream)
        self._routed(program, layers - 1)
        self._guessed(program, layers - 1)
        return time.perf_counter_ns() - begun

    def _give(self, token_ids: list[int], position: int) -> None:
        """Number the next step and tell the device what it is about."""
        self._number += 1
        row = 0 if self.replay is None else self.replay.row
        self._step.given[: GIVEN + len(token_ids)] = [self._number & 0x7FFFFFFF, position, row, *token_ids]

    def _whole(self) -> NDArray[np.int32] | None:
        """Slots of all experts [layers, experts] if the step can be one launch."""
        if self.steer is not None:
            return self.steer.slots
        state = self._brain.state
        return state.slot if (state.status == KEPT).all() else None

    def _logits(self, program: Program) -> Tensor:
        """What the step gives, [n, vocab], once it is there."""
        return program.pieces.m.logits.clone()

    def _layer(self, program: Program, at: int, log: RouteLog | None) -> None:
        routed = self._routed(program, at)
        self.marks.mark("route", at)
        predicted = self._guessed(program, at)
        if predicted:
            self.marks.mark("predict", at)
        if log is not None:
            log.experts[:, at] = routed
            m = program.pieces.m
            log.weights[:, at] = m.weights.cpu().numpy()
            self.look_ahead.record(at, m.r, m.ids, m.weights, log)
        if self.shadow is not None and at in program.pieces.behaviour.speculated:
            self.shadow.compare(at, routed.astype(np.int64), self.decoder.route(at, program.pieces.m.h)[0])
        demand, step = demand_of(routed), self._step
        if self.steer is not None:
            demand, predicted = self.steer.choose(at, demand, predicted)
        with self._copies.lock:
            actions = self._brain.begin(at, demand.experts, demand.counts)
            for ahead, experts in enumerate(predicted):
                self._brain.prefetch(at + 1 + ahead, experts)
            self._copies.kick()
        first_key, slots = at * self._shape.experts, self._brain.state.slot[at]
        targets, items = self._copies.blocks.targets, program.pieces.items
        n_used, n_late = write_plan(
            *demand,
            actions,
            first_key,
            slots,
            targets,
            step.plan[:items],
            step.listed,
            step.on_host,
            step.used,
            step.late,
        )
        self.marks.mark("plan", at)
        self._run(program, at, demand, actions, n_used, n_late)
        self._open = (at, step.late[0, :n_late].tolist())
        self.finish()
        self.marks.mark("finish", at)

    def _run(
        self, program: Program, at: int, demand: Demand, actions: NDArray[np.int8], n_used: int, n_late: int
    ) -> None:
        """Launch the layer-step's experts and what follows them."""
        on_cpu = np.flatnonzero(actions == ACT_CPU).tolist()
        computed = self._start_cpu(program, at, demand, on_cpu) if on_cpu else None
        then = program.enter[at + 1]
        stream = self._parts.stream()
        c = self._step.c
        c.compute, c.resident, c.next = stream, program.planned[at] if n_used else None, None if on_cpu else then
        c.n_used, c.late, c.waves = n_used, n_late, self._step.waves[at]
        self._issuer.run(c)
        self.marks.mark("experts_gpu", at)
        if computed is not None:
            self._cpu.join()
            self.marks.mark("wait_cpu", at)
            items = np.concatenate([demand.places[a:b] for a, b in _spans(demand, on_cpu)])
            self._host.out[torch.from_numpy(items)] = computed.float()
            self.marks.mark("upload", at)
            self._issuer.launch(then, stream)

    def _start_cpu(self, program: Program, at: int, demand: Demand, on_cpu: list[int]) -> Tensor:
        """Outputs of the experts that the host computes, written until the workers are joined."""
        rows = [demand.places[a:b] // self._shape.top_k for a, b in _spans(demand, on_cpu)]
        x = self._host.rows[: program.pieces.rows]
        out = self._cpu.submit(at, demand.experts[on_cpu].tolist(), x, rows)
        self.marks.mark("submit", at)
        return out

    def _run_whole(self, program: Program, slots: NDArray[np.int32]) -> None:
        """One launch; the brain hears of each layer's demand while the device is at the next."""
        if self._resident_at is None or not np.array_equal(slots, self._resident_at):
            self._resident_at = slots.copy()
            self._addresses.copy_(torch.from_numpy(self._copies.blocks.targets[slots]))
        self._issuer.launch(program.whole, self._parts.stream())
        for at in range(self._shape.n_moe_layers):
            demand = demand_of(self._routed(program, at))
            if self.steer is not None:
                demand, _ = self.steer.choose(at, demand, [])
            with self._copies.lock:
                self._brain.begin(at, demand.experts, demand.counts)
                self._brain.finish(at)

    def _routed(self, program: Program, at: int) -> NDArray[np.int32]:
        """Ids [n, k] that layer `at` has told."""
        items = program.pieces.items
        self._await(self._step.words[at], items)
        routed: NDArray[np.int32] = (self._step.words[at, :items] & 0xFFFF).reshape(-1, self._shape.top_k)
        return routed

    def _guessed(self, program: Program, at: int) -> Guesses:
        behaviour = program.pieces.behaviour
        targets = min(behaviour.depth, self._shape.n_moe_layers - 1 - at)
        if targets <= 0:
            return []
        words = targets * program.pieces.rows * behaviour.width
        self._await(self._step.guesses[at], words)
        told = self._step.guesses[at, :words].astype(np.uint16).view(np.int16)  # 0xFFFF is -1: none
        return [merge_predictions(rows) for rows in told.reshape(targets, program.pieces.rows, -1)]

    def _await(self, words: NDArray[np.int32], count: int) -> None:
        address, tag = words.ctypes.data, self._number & TAG
        while not self._issuer.awaited(address, count, tag, PATIENCE_NS):
            if self._parts.idle() and not self._issuer.awaited(address, count, tag, 0):
                raise InternalError("the device finished a layer without telling its routing")


class StepArrays:
    """The host's side of a step as numpy arrays and C structure, made once."""

    def __init__(self, host: HostMemory, waves: Sequence[tuple[int, ...]]) -> None:
        """`waves`: of each layer, the graphs of its late experts."""
        items = len(host.listed)
        self.given, self.words, self.guesses = host.given.numpy(), host.words.numpy(), host.guesses.numpy()
        self.plan, self.listed, self.on_host = host.plan.numpy(), host.listed.numpy(), host.on_host.numpy()
        self.used = np.zeros(items, np.int32)
        self.late = np.zeros((3, items), np.int64)
        self._waves = np.asarray(waves, np.uint64)  # [layers, items]
        self.waves = [row.ctypes.data for row in self._waves]
        keys, firsts, counts = (row.ctypes.data for row in self.late)
        self.c = CStep(
            waves=self.waves[0], plan=host.waves.data_ptr(), keys=keys, firsts=firsts, counts=counts,
            used=self.used.ctypes.data,
        )  # fmt: skip


def _spans(demand: Demand, which: list[int]) -> list[tuple[int, int]]:
    """Where the items of some experts are among the demand's places."""
    starts = demand.starts()
    return [(starts[i], starts[i + 1]) for i in which]
