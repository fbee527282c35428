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
from foreload.backend.cuda.chunk import ChunkPlans, GroupedChunk
from foreload.backend.cuda.copies import NativeCopies
from foreload.backend.cuda.issue import Issuer
from foreload.backend.cuda.kernels.layout import BlockLayout
from foreload.backend.cuda.kernels.ops import TAG, Ops, tile_columns
from foreload.backend.cuda.layers import (
    ASTRAY,
    BEGUN,
    CHOSEN,
    COMPUTED,
    CPU_BEGUN,
    CPU_ENDED,
    DONE,
    ENDED,
    FORESEEN,
    GUESSED,
    ISSUED,
    LAUNCHED,
    NO_SLOT,
    ON_CPU,
    PLANNED,
    ROUTED,
    SUBMITTED,
    UNSEEN,
    UNTOLD,
    Chosen,
    Step,
    run_layers,
)
from foreload.backend.cuda.pieces import Behaviour, Pieces
from foreload.backend.cuda.programs import Capture, Program, make_program, make_waves
from foreload.backend.cuda.steps import StepArrays
from foreload.backend.cuda.throttle import CapturedStopwatch
from foreload.backend.experts.batch import Chunk
from foreload.backend.experts.cpu_native import NativeExperts
from foreload.backend.experts.link import transfer_ns
from foreload.backend.forward import Forward
from foreload.backend.observe import RouteLog
from foreload.backend.policy.state import KEPT
from foreload.errors import InternalError, UsageError

PATIENCE_NS = 1_000_000_000
BEHAVIOURS = 4  # kept captured, the newest
BLOCKS = (
    ("route", BEGUN, ROUTED),
    ("plan", CHOSEN, PLANNED),
    ("submit", PLANNED, SUBMITTED),
    ("predict", SUBMITTED, GUESSED),
    ("plan", GUESSED, FORESEEN),
    ("issue", FORESEEN, ISSUED),
    ("experts_gpu", ISSUED, LAUNCHED),
    ("wait_cpu", LAUNCHED, COMPUTED),
    ("finish", COMPUTED, ENDED),
)
"""Spans of a layer-step on the decoding thread (`layers.BEGUN` ...)."""


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

    With `slots` [layers, experts] a step is one launch that reads experts there, whatever the brain holds.
    """

    chosen: Chosen
    slots: NDArray[np.int32] | None = None


class FastForward(Forward):
    """A forward whose decode steps are launched as graphs. Prompts go as in `Forward`, several experts in a launch."""

    _copies: NativeCopies
    _cpu: NativeExperts
    steer: Steer | None = None

    def __init__(self, *arguments: Any, parts: FastParts, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._parts, self._issuer = parts, parts.issuer
        self._dtype = self.decoder.embedding.dtype
        self._number = 0  # of the step
        self._rows = 0
        self._planned_rows = 0  # of the step whose last plan is in host memory
        self.behaviours = BEHAVIOURS
        self._programs: dict[tuple[int, Behaviour], Program] = {}
        self._late: list[int] = []  # graphs of late experts
        self._resident_at: NDArray[np.int32] | None = None  # slots that the device's table of addresses shows
        self._stopwatch: CapturedStopwatch | None = None
        self._chunk_plans = ChunkPlans(self.decoder.device)
        self._chunks_compiled = False

    @property
    def ops(self) -> Ops:
        """The kernels that graphs are made of."""
        return self._parts.ops

    # Graphs

    def prepare(self, rows: Sequence[int]) -> None:
        """Capture what steps of so many rows launch under the present settings."""
        for n in sorted(rows, reverse=True):
            self._layers(self._program(n), 0, 0)  # none: what is compiled is compiled now
        if not self._chunks_compiled:
            self._compile_chunks()

    def _compile_chunks(self) -> None:
        """Run a chunk of one token through whatever a slot holds, in every layout, so that no prompt waits for it."""
        shape, device, layouts = self._shape, self.decoder.device, list(self._parts.layouts)
        h = torch.zeros(1, shape.hidden, dtype=self._dtype, device=device)
        ids = torch.zeros(1, shape.top_k, dtype=torch.int64, device=device)
        for layout in dict.fromkeys(layouts):
            chunk = self.chunk(layouts.index(layout), h, ids)
            chunk.run([0], [0])
            chunk.add_to(h, torch.ones(1, shape.top_k, device=device), None)
        self._chunks_compiled = True

    def _behaviour(self) -> Behaviour:
        ahead, cpu = self.look_ahead, self._cpu.threads > 0
        predictor, watched = ahead.predictor, self.observer is not None or self.shadow is not None
        if predictor is None:
            return Behaviour(cpu=cpu, replay=self.replay, watched=watched)
        key, depth = (predictor.key, id(predictor.calibration)), min(ahead.depth, self._shape.n_moe_layers - 1)
        return Behaviour(predictor, key, depth, ahead.width, ahead.speculated, cpu, self.replay, watched)

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
        for executable in (*self._late, *(e for p in self._programs.values() for e in p.executables())):
            self._parts.capture.drop(executable)
        self._programs.clear()
        shape, device = self._shape, self.decoder.device
        with torch.inference_mode(False):
            self._host = HostMemory.make(shape, rows, behaviour.guesses(rows), self._dtype, device)
            self._device = DeviceMemory.make(shape, rows, self.decoder.context_tokens, self._dtype, device)
            self._addresses = torch.zeros(shape.n_moe_layers, shape.experts, dtype=torch.int64, device=device)
        self._rows = rows
        pieces, capture = self._pieces(rows, behaviour), self._parts.capture
        pieces.bring_waves()  # so that it is compiled
        waves, bring = make_waves(pieces, capture), capture(pieces.bring_waves)
        self._late = [bring, *(executable for of_layout in waves.values() for executable in of_layout)]
        self._step = StepArrays(self._host, shape, [waves[layout] for layout in self._parts.layouts], bring)

    def step_times(self, rows: int, repeats: int = 20) -> dict[str, float]:
        """Median device microseconds of each graph of a step of `rows` rows alone, at the position of the step before.

        `enter`: the layers in sum, routing included; `planned`: one layer's resident experts as last planned, if that
        was for so many rows (else it is left out: the plan reads as another one). With all experts resident `whole` is
        a step of one launch; before that it leaves experts out.
        """
        program, stream = self._program(rows), self._parts.stream()
        timed = {"enter": program.enter, "planned": program.planned[:1], "whole": (program.whole,)}
        if self._planned_rows != rows:
            del timed["planned"]
        found: dict[str, list[float]] = {name: [] for name in timed}
        planned = self._host.plan.clone()
        self._step.release()
        empty = self._host.plan.clone()
        for _ in range(repeats):
            for name, graphs in timed.items():
                self._host.plan.copy_(planned if name == "planned" else empty)
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

    def chunk(self, at: int, h: Tensor, ids: Tensor) -> Chunk:
        """See `Forward.chunk`."""
        parts = self._parts
        layout = parts.layouts[at]
        if not tile_columns(layout):
            return super().chunk(at, h, ids)
        targets = self._copies.blocks.targets
        return GroupedChunk(h, ids, self._shape.experts, parts.ops, layout, self._chunk_plans, targets)

    # Decode

    def decode(self, token_ids: list[int], position: int) -> Tensor:
        """See `Forward.decode`; logits are float32."""
        n = len(token_ids)
        log = RouteLog(self.observer, n, self._shape.n_moe_layers, self._shape.top_k) if self.observer else None
        program = self._program(n)
        self.marks.start()
        self._give(token_ids, position)
        watched = program.pieces.behaviour.watched
        slots = None if watched else self._whole()
        if slots is not None:
            self._show(slots)
        self._issuer.drive(True, self.home)
        try:
            self._issuer.launch(program.enter[0] if slots is None else program.whole, self._parts.stream())
            self.marks.mark("embed")
            if slots is not None or not (watched or self._poisoned is not None):
                self._layers(program, 0, self._shape.n_moe_layers, whole=slots is not None)
            else:
                for at in range(self._shape.n_moe_layers):
                    self._watched(program, at, log)
        except BaseException:
            self._step.release()
            raise
        finally:
            self._issuer.drive(False)
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
        self._step.release()
        begun = time.perf_counter_ns()
        for graph in program.enter[:layers]:
            self._issuer.launch(graph, stream)
        self._told(program, layers - 1)
        return time.perf_counter_ns() - begun

    def _give(self, token_ids: list[int], position: int) -> None:
        """Number the next step and tell the device what it is about."""
        self._number = self._number % (0x7FFFFFFF // self._shape.n_moe_layers - 1) + 1
        self._planned_rows = len(token_ids)
        row = 0 if self.replay is None else self.replay.row
        self._step.number = self._number
        if self._number == 1:  # numbers begin anew: nothing is there for a later step
            self._host.release(0)
        self._step.given[: GIVEN + len(token_ids)] = [self._number, position, row, *token_ids]

    def _whole(self) -> NDArray[np.int32] | None:
        """Slots of all experts [layers, experts] if the step can be one launch."""
        if self.steer is not None:
            return self.steer.slots
        state = self._brain.state
        return state.slot if (state.status == KEPT).all() else None

    def _show(self, slots: NDArray[np.int32]) -> None:
        """The device's table of addresses shows these slots."""
        if self._resident_at is None or not np.array_equal(slots, self._resident_at):
            self._resident_at = slots.copy()
            self._addresses.copy_(torch.from_numpy(self._copies.blocks.targets[slots]))

    def _logits(self, program: Program) -> Tensor:
        """What the step gives, [n, vocab], once it is there."""
        return program.pieces.m.logits.clone()

    def _layers(self, program: Program, first: int, last: int, whole: bool = False, ends: bool = True) -> None:
        """The layer-steps `first` .. `last` - 1: decide on what each tells, launch, and end them."""
        step, behaviour = self._step, program.pieces.behaviour
        numbers = Step(
            step.number, program.pieces.rows, self._shape.top_k, behaviour.depth, behaviour.width, PATIENCE_NS,
            int(ends), int(whole),
        )  # fmt: skip
        native = self._issuer.native(self._cpu.handle if behaviour.cpu else 0, self._parts.stream())
        host = step.host(numbers.rows, self._copies.blocks.targets, self._cpu if behaviour.cpu else None)
        chosen = step.unchosen if self.steer is None else self.steer.chosen
        brain, at = self._brain, first
        while True:
            at = run_layers(
                at, last, numbers, native, step.graphs(program), host, chosen, brain.state, brain.rules, brain.costs
            )
            if step.outcome[0] == DONE:
                break
            if step.outcome[0] == UNTOLD and not self._parts.idle():
                continue  # it takes its time
            raise self._stopped(at)
        if not whole:
            self._note(first, last)

    def _stopped(self, at: int) -> InternalError:
        """Why the layer-steps ended early."""
        outcome, error = self._step.outcome.tolist()
        if outcome == UNTOLD:
            return InternalError("the device finished a layer without telling its routing")
        if outcome == NO_SLOT:
            return InternalError(f"no staging slot left for the demand of MoE layer {at}")
        if outcome == UNSEEN:
            return InternalError(f"the device told the routing of MoE layer {at}, but not its predictions")
        if outcome == ASTRAY:
            return InternalError(f"the device told of experts that MoE layer {at}, or one behind it, does not have")
        return InternalError(f"MoE layer {at} could not be run: CUDA error {error}")

    def _note(self, first: int, last: int) -> None:
        """Tell marks and CPU spans what the layer-steps took."""
        spans = self._cpu.spans
        for at, times in enumerate(self._step.times[first:last].tolist(), first):
            if spans is not None and times[ON_CPU]:
                spans.append((at, times[ON_CPU], times[CPU_BEGUN], times[CPU_ENDED]))
            for kind, begun, ended in BLOCKS:
                if times[ended] and (begun not in (SUBMITTED, GUESSED) or times[ended] > times[begun]):
                    self.marks.add(kind, at, times[begun] or times[LAUNCHED], times[ended])

    def _watched(self, program: Program, at: int, log: RouteLog | None) -> None:
        """One layer-step with someone who reads what it has, or with freed slots poisoned behind it."""
        routed = self._told(program, at)
        m = program.pieces.m
        if log is not None:
            log.experts[:, at] = routed
            log.weights[:, at] = m.weights.cpu().numpy()
            self.look_ahead.record(at, m.r, m.ids, m.weights, log)
        if self.shadow is not None and at in program.pieces.behaviour.speculated:
            self.shadow.compare(at, routed.astype(np.int64), self.decoder.route(at, m.h)[0])
        self._layers(program, at, at + 1, ends=False)
        self._brain.took(*self._step.decided())
        self._open = (at, self._step.late_keys())
        self.finish()

    def _told(self, program: Program, at: int) -> NDArray[np.int32]:
        """Ids [n, k] that layer `at` has told, once its predictions are there too."""
        behaviour, items = program.pieces.behaviour, program.pieces.items
        depth = min(behaviour.depth, self._shape.n_moe_layers - 1 - at)
        self._await(self._step.words[at], items)
        self._await(self._step.guesses[at], depth * program.pieces.rows * behaviour.width)
        routed: NDArray[np.int32] = (self._step.words[at, :items] & 0xFFFF).reshape(-1, self._shape.top_k)
        return routed

    def _await(self, words: NDArray[np.int32], count: int) -> None:
        address, tag = words.ctypes.data, self._number & TAG
        while not self._issuer.told(address, count, tag, PATIENCE_NS):
            if self._parts.idle() and not self._issuer.told(address, count, tag, 0):
                raise InternalError("the device finished a layer without telling its routing")
