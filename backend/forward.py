"""The hot path: one decode step and one prompt chunk, with experts where the brain says (design: section 7)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.experts.batch import Batch, Chunk, PlainChunk
from foreload.backend.experts.blocks import run_expert
from foreload.backend.experts.cpu import CpuExperts
from foreload.backend.experts.link import Order
from foreload.backend.experts.pool import SlotPool
from foreload.backend.experts.slab import HostSlab
from foreload.backend.experts.transfer import Copies
from foreload.backend.models.decoder import Decoder
from foreload.backend.observe import Marks, NoMarks, Observer, RouteLog
from foreload.backend.policy.state import ABSENT, DECODE, KEPT, N_FREE, PREFILL
from foreload.backend.policy.step import ACT_CPU, ACT_FETCH, ACT_HIT, ACT_LATE
from foreload.backend.policy.window import Demand, demand_of
from foreload.backend.predict.lens import Lens, Seen
from foreload.backend.predict.lookahead import Guess, LookAhead, Shadow
from foreload.backend.replay import Replay
from foreload.traces import schema

LOGIT_ROWS = 32  # so that scoring a prompt of a large vocabulary takes little device memory


class Forward:
    """Runs a decoder over tokens of one sequence. Used by one thread; `look_ahead` follows the settings."""

    home = -1
    """The core on which the calling thread decodes, where it may stay on one: no worker's is taken then; -1: any."""

    def __init__(
        self,
        decoder: Decoder,
        slab: HostSlab,
        pool: SlotPool,
        link: Order,
        copies: Copies,
        cpu: CpuExperts,
        poison: bool = False,
    ) -> None:
        self.decoder = decoder
        self.marks: Marks = NoMarks()
        self.look_ahead = LookAhead(decoder.shape.top_k)
        self.shadow: Shadow | None = None
        self.replay: Replay | None = None
        self.observer: Observer | None = None
        self._shape = decoder.shape
        self._slab, self._pool, self._link, self._copies, self._cpu = slab, pool, link, copies, cpu
        self._brain = copies.brain
        self._asynchronous = link.asynchronous
        self._log: RouteLog | None = None  # of a decode step whose verdict is not known yet
        self._open: tuple[int, list[int]] | None = None  # layer-step begun and not finished, and its copies
        self._poisoned: set[int] | None = set() if poison else None
        self._early: list[int] = []  # experts copied for the next layer of a prompt before it was routed, in order

    @contextmanager
    def watched(self, observer: Observer | None) -> Iterator[None]:
        """Run one request under an observer; what an error or interrupt leaves half done is taken back."""
        self.observer = observer
        try:
            yield
        finally:
            self.observer = self._log = None
            self._open = None
            self._copies.phase = DECODE
            self._cpu.drain()

    def follow(self, replay: Replay | None) -> None:
        """Take routing and predictions of decode steps from a recording from now on; None: from the model."""
        self.replay = self.look_ahead.replay = replay

    def prepare(self, rows: Sequence[int]) -> None:
        """Get ready for decode steps of so many tokens under the present settings."""

    # Decode

    def decode(self, token_ids: list[int], position: int) -> Tensor:
        """Logits [n, vocab] after feeding n tokens from `position` on in one step: one token, or a verify window.

        A position below the end of the sequence rolls it back: keys and values from there on are written anew. The
        observer hears of the step from `report`.
        """
        decoder, shape, marks = self.decoder, self._shape, self.marks
        log = RouteLog(self.observer, len(token_ids), shape.n_moe_layers, shape.top_k) if self.observer else None
        marks.start()
        x = decoder.embed(torch.tensor(token_ids, device=decoder.device))
        marks.mark("embed")
        guess: Guess | None = None
        for at in range(shape.n_moe_layers):
            r = decoder.attend(at, x, position)
            marks.mark("attention", at)
            h = decoder.moe_input(at, r)
            ids, weights, routed = self._route(at, h, guess)
            marks.mark("route", at)
            predicted, guess = self.look_ahead.at(at, r, ids, weights, log)
            if predicted or log is not None:
                marks.mark("predict", at)
            x = r + self.experts(at, routed, h, weights, predicted)
            if not self._asynchronous:
                self.finish()
            marks.mark("finish", at)
            if log is not None:
                log.experts[:, at] = routed
                log.weights[:, at] = weights.cpu().numpy()
                marks.start()
        logits = decoder.logits(decoder.finish(x, position))
        marks.mark("head")
        self.finish()
        self._brain.end_step()
        self._log = log
        return logits

    def report(self, token_ids: list[int], position: int, kept: int, verify: bool) -> None:
        """Tell the observer of the decode step run last: the first `kept` of its tokens stay in the text."""
        if self._log is not None:
            self._log.close(schema.DRAFT_VERIFY if verify else schema.DECODE, position, token_ids, kept)
            self._log = None

    def _route(self, at: int, h: Tensor, guess: Guess | None) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
        """Ids and weights [n, k] to execute, and the ids on the host: the guess, or what the gate says."""
        if guess is None:
            ids, weights = self.decoder.route(at, h)
            if self.replay is not None:
                ids, weights = self.replay.route(at, len(ids))
            return ids, weights, ids.cpu().numpy()
        if self.shadow is not None:
            self.shadow.compare(at, guess.experts, self.decoder.route(at, h)[0])
        return guess.ids, guess.weights, guess.experts

    def experts(
        self, at: int, routed: NDArray[np.int64], h: Tensor, weights: Tensor, predicted: Sequence[NDArray[np.int32]]
    ) -> Tensor:
        """Weighted sums [n, hidden] of the experts routed [n, k] of tokens h [n, hidden], run where the brain says.

        Outputs are collected per token and rank and summed in rank order, so where and when an expert ran changes
        nothing.
        """
        demand = demand_of(routed)
        actions = self._begin(at, demand, predicted)
        batch, experts = Batch(h, demand), demand.experts.tolist()
        self.marks.mark("plan", at)
        on_cpu = [i for i, action in enumerate(actions) if action == ACT_CPU]
        host_out = self._submit_cpu(at, [experts[i] for i in on_cpu], batch, on_cpu) if on_cpu else None
        if predicted and self._brain.rules.cpu_reads:
            self._cpu.read_ahead(at + 1, self._brain.read(at + 1))
        used = []
        for i, action in enumerate(actions):
            if action == ACT_HIT:
                used.append(self._run_slot(at, experts[i], batch, i))
        shared = self.decoder.shared(at, h)
        self.marks.mark("experts_gpu", at)
        waiting = {self._key(at, experts[i]): i for i, a in enumerate(actions) if a in (ACT_LATE, ACT_FETCH)}
        self._open = (at, list(waiting))
        while waiting:
            key = self._copies.take_ready(waiting)
            i = waiting.pop(key)
            self._link.when_landed(self._brain.slot(at, experts[i]))
            self.marks.mark("wait", at, experts[i])
            used.append(self._run_slot(at, experts[i], batch, i))
            self.marks.mark("experts_gpu", at, experts[i])
        if host_out is not None:
            self._cpu.join()
            self.marks.mark("wait_cpu", at)
            batch.store_host(on_cpu, host_out)
        self._link.slot_used(used)
        return batch.reduce(weights, shared)

    def finish(self) -> None:
        """End the open layer-step, if any, once its copies have landed.

        Over an asynchronous link this happens when the next layer has been routed, so that the host runs ahead.
        """
        if self._open is None:
            return
        layer, keys = self._open
        self._open = None
        self._copies.wait_landed(keys)
        with self._copies.lock:
            self._brain.finish(layer)
            self._poison_free()
            self._copies.kick()

    def _begin(self, at: int, demand: Demand, predicted: Sequence[NDArray[np.int32]]) -> list[int]:
        self.finish()
        with self._copies.lock:
            actions: list[int] = self._brain.begin(at, demand.experts, demand.counts).tolist()
            for ahead, experts in enumerate(predicted):
                self._brain.prefetch(at + 1 + ahead, experts)
            self._copies.kick()
        return actions

    def _submit_cpu(self, at: int, experts: list[int], batch: Batch, which: list[int]) -> Tensor:
        out = self._cpu.submit(at, experts, batch.host_input(), batch.rows(which))
        self.marks.mark("submit", at)
        return out

    def _key(self, at: int, expert: int) -> int:
        return at * self._shape.experts + expert

    def _run_slot(self, at: int, expert: int, batch: Batch, i: int) -> int:
        """Run a resident expert, the i-th of the batch; returns its slot."""
        slot = self._brain.slot(at, expert)
        batch.store(i, run_expert(batch.input(i), *self._pool.views(slot, at)))
        return slot

    def _poison_free(self) -> None:
        """Debug mode: fill slots that became free with NaN, ordered before the next copy into them (lock held)."""
        if self._poisoned is None:
            return
        free = self._free_slots()
        for slot in free - self._poisoned:
            self._pool.poison(slot)
        self._link.slot_used(list(free - self._poisoned))
        self._poisoned = free

    def _free_slots(self) -> set[int]:
        state = self._brain.state
        return set(state.free[: state.scalars[N_FREE]].tolist())

    # Prefill

    def prefill(
        self, token_ids: list[int], position: int, last: bool, each: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """Logits [vocab] after feeding a prompt chunk at `position`; the `last` chunk fills the cache.

        `each` is given the logits of all positions (the last chunk's last one excepted), `LOGIT_ROWS` at a time.
        """
        x = self._chunk(token_ids, position, last)
        if each is not None and len(token_ids) > last:
            for rows in x[: len(token_ids) - last].split(LOGIT_ROWS):
                each(self.decoder.logits(rows))
        return self.decoder.logits(x[-1:])[0]

    def score(self, token_ids: list[int], lens: Lens, logits: bool) -> Tensor:
        """Feed tokens as one chunk at position 0 under a lens: logits [n, vocab], or [0, vocab] if not wanted."""
        x = self._chunk(token_ids, 0, True, lens)
        return self.decoder.logits(x if logits else x[:0])

    def _chunk(self, token_ids: list[int], position: int, last: bool, lens: Lens | None = None) -> Tensor:
        """The last layer's residual stream [n, hidden]."""
        decoder, shape = self.decoder, self._shape
        log = RouteLog(self.observer, len(token_ids), shape.n_moe_layers, shape.top_k) if self.observer else None
        self._copies.phase = PREFILL
        x = decoder.embed(torch.tensor(token_ids, device=decoder.device))
        for at in range(shape.n_moe_layers):
            r = decoder.attend(at, x, position)
            h = decoder.moe_input(at, r)
            ids, weights = decoder.route(at, h)
            if lens is not None:
                ids, weights = lens.route(Seen(at, r, h, ids, weights))
            batch = self.chunk(at, h, ids)
            self._prefill_experts(at, batch, last)
            shared = decoder.shared(at, h)
            x = batch.add_to(r, weights, shared)
            if lens is not None:
                lens.ran(at, ids, batch.outputs, shared)
            if log is not None:
                log.experts[:, at] = ids.cpu().numpy()
                log.weights[:, at] = weights.cpu().numpy()
        if last:
            self._copies.phase = DECODE
        if log is not None:
            log.close(schema.PREFILL, position, token_ids, len(token_ids))
        return decoder.finish(x, position)

    def chunk(self, at: int, h: Tensor, ids: Tensor) -> Chunk:
        """The experts ids [n, k] of a prompt chunk's tokens h [n, hidden] at MoE layer `at`, to be run."""
        return PlainChunk(h, ids, self._shape.experts, lambda slot: self._pool.views(slot, at))

    def _prefill_experts(self, at: int, batch: Chunk, last: bool) -> None:
        """Run the experts of a chunk: residents, then the others as they arrive through staging, wave by wave.

        What fits beside the last of them is copied early for the next layer. The host takes all that has arrived at
        once, so that it catches up when it is behind.
        """
        with self._copies.lock:
            target = self._brain.prefill_targets(at, batch.counts, last)
            status = self._brain.state.status[at]
            here = [expert for expert in self._early if status[expert] not in (ABSENT, KEPT)]
            absent = np.flatnonzero((batch.counts > 0) & (status == ABSENT)).tolist()
            residents = np.flatnonzero((batch.counts > 0) & (status == KEPT)).tolist()
            queue = _ChunkQueue(here, absent, self._next_early(at, batch, last))
            self._queue_chunk(at, queue)
            slots = [self._brain.slot(at, expert) for expert in residents]
        batch.run(residents, slots)
        self._link.slot_used(slots)
        while queue.sent:
            keys = self._copies.take_all_ready([self._key(at, expert) for expert in queue.sent])
            arrived = [key % self._shape.experts for key in keys]
            queue.sent = [expert for expert in queue.sent if expert not in arrived]
            used = self._run_arrived(at, arrived, batch)
            self._copies.wait_landed(keys)
            with self._copies.lock:
                self._link.slot_used(used)
                for expert in arrived:
                    self._brain.prefill_done(at, expert, target)
                self._poison_free()
                self._queue_chunk(at, queue)
        self._early = queue.early

    def _run_arrived(self, at: int, arrived: list[int], batch: Chunk) -> list[int]:
        """Run those experts whose copies are issued that the chunk demands; returns their slots."""
        demanded = [expert for expert in arrived if batch.counts[expert]]
        slots = [self._brain.slot(at, expert) for expert in demanded]
        for slot in slots:
            self._link.when_landed(slot)
        batch.run(demanded, slots)
        return slots

    def _next_early(self, at: int, batch: Chunk, last: bool) -> tuple[int, list[int]]:
        """The layer after `at`, in this chunk or the next, and what is worth copying early for it (lock held)."""
        following = (at + 1) % self._shape.n_moe_layers
        if following == at or (last and following < at):
            return following, []
        return following, self._brain.prefill_ahead(following, int(batch.counts.sum())).tolist()

    def _queue_chunk(self, at: int, queue: _ChunkQueue) -> None:
        """Queue what staging has room for (lock held)."""
        while queue.todo and self._brain.prefill_fetch(at, queue.todo[0]):
            queue.sent.append(queue.todo.popleft())
        layer = queue.following
        while not queue.todo and queue.ahead and self._brain.prefill_fetch(layer, queue.ahead[0], True):
            queue.early.append(queue.ahead.popleft())
        if self._poisoned is not None:
            self._poisoned &= self._free_slots()  # what a copy now overwrites is poisoned again when it is free
        self._copies.kick()


class _ChunkQueue:
    """Copies of one layer for a prompt chunk, `sent` and not yet served or still `todo`, and of the following one."""

    def __init__(self, here: list[int], absent: list[int], following: tuple[int, list[int]]) -> None:
        self.sent, self.todo = list(here), deque(absent)
        self.following, self.ahead = following[0], deque(following[1])
        self.early: list[int] = []
