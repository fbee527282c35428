"""CPU experts with torch: Python threads that each run whole experts. Serves where the native library does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.experts.blocks import run_expert
from foreload.backend.experts.cpu import CpuExperts, ExpertBlocks
from foreload.backend.placement import place_threads

Job = tuple[int, list[tuple[int, Tensor, Tensor]]]
"""MoE layer, and per expert: its number, x [tokens, hidden] and out [tokens, hidden], both on the host."""


class TorchExperts(CpuExperts):
    """`threads` workers; a layer-step's experts are dealt to them round robin."""

    def __init__(self, slab: ExpertBlocks, threads: int) -> None:
        self._slab = slab
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._pending = 0
        self._workers: list[threading.Thread] = []
        self.threads = 0
        self.resize(threads)

    def resize(self, threads: int) -> None:
        """Have `threads` workers; nothing may be running."""
        if threads == self.threads:
            return
        for _ in self._workers:
            self._jobs.put(None)
        for worker in self._workers:
            worker.join()
        self.threads = threads
        self._workers = [
            threading.Thread(target=self._run, name=f"foreload-cpu-{n}", daemon=True) for n in range(threads)
        ]
        for worker in self._workers:
            worker.start()

    def place(self, cores: Collection[int]) -> None:
        """Let the workers run on `cores`."""
        place_threads(self._workers, cores)

    def submit(self, layer: int, experts: list[int], x: Tensor, rows: Sequence[NDArray[np.int64]]) -> Tensor:
        """See `CpuExperts`."""
        counts = [len(of) for of in rows]
        out = torch.empty(sum(counts), x.shape[1], dtype=x.dtype)
        inputs = [x if len(x) == 1 else x[torch.from_numpy(of)] for of in rows]
        work = list(zip(experts, inputs, out.split(counts), strict=True))
        share = min(len(experts), self.threads)
        for worker in range(share):
            self._jobs.put((layer, work[worker::share]))
        self._pending += share
        return out

    def done(self) -> bool:
        """Whether nothing is running, without waiting."""
        return self._done.qsize() == self._pending

    def drain(self) -> BaseException | None:
        """Wait for all submitted experts; returns the first error among them."""
        first = None
        while self._pending:
            error = self._done.get()
            self._pending -= 1
            first = first or error
        return first

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
