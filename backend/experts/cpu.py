"""Experts computed on the host beside the device: worker threads that run whole experts out of the slab."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import torch
from torch import Tensor

from foreload.backend.experts.slab import HostSlab, run_expert
from foreload.errors import InternalError

Job = tuple[int, list[tuple[int, Tensor, Tensor]]]
"""MoE layer, and per expert: its number, x [tokens, hidden] and out [tokens, hidden], both on the host."""


class CpuExperts:
    """`threads` workers; a layer-step's experts are dealt to them round robin."""

    def __init__(self, slab: HostSlab, threads: int) -> None:
        self.spans: list[tuple[int, int, int, int]] | None = None  # (layer, experts, begun, done) in nanoseconds
        self._slab = slab
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._pending = 0
        self.workers: list[threading.Thread] = []
        self.resize(threads)

    def resize(self, threads: int) -> None:
        """Have `threads` workers; nothing may be running."""
        if threads == len(self.workers):
            return
        for _ in self.workers:
            self._jobs.put(None)
        for worker in self.workers:
            worker.join()
        self.workers = [
            threading.Thread(target=self._run, name=f"foreload-cpu-{n}", daemon=True) for n in range(threads)
        ]
        for worker in self.workers:
            worker.start()

    def submit(self, layer: int, experts: list[int], inputs: list[Tensor]) -> Tensor:
        """Start each expert on its tokens, inputs [tokens, hidden] each, on the host.

        Returns the outputs [all tokens, hidden], one expert's after the other's, filled when `join` returns.
        """
        counts = [len(x) for x in inputs]
        out = torch.empty(sum(counts), inputs[0].shape[1], dtype=inputs[0].dtype)
        work = list(zip(experts, inputs, out.split(counts), strict=True))
        share = min(len(experts), len(self.workers))
        for worker in range(share):
            self._jobs.put((layer, work[worker::share]))
        self._pending += share
        return out

    def join(self) -> None:
        """Wait for all submitted experts; InternalError if one failed."""
        error = self.drain()
        if error is not None:
            raise InternalError(f"a CPU expert failed: {error}") from error

    def drain(self) -> BaseException | None:
        """Wait for all submitted experts; returns the first error among them."""
        first = None
        while self._pending:
            error = self._done.get()
            self._pending -= 1
            first = first or error
        return first

    def close(self) -> None:
        """Stop the workers."""
        self.resize(0)

    def _run(self) -> None:
        torch.set_num_threads(1)
        while (job := self._jobs.get()) is not None:
            layer, work = job
            begun = time.perf_counter_ns()
            try:
                with torch.inference_mode():
                    for expert, x, out in work:
                        out.copy_(run_expert(x, *self._slab.views(layer, expert)))
            except BaseException as error:
                self._done.put(error)
                continue
            if self.spans is not None:
                self.spans.append((layer, len(work), begun, time.perf_counter_ns()))
            self._done.put(None)
