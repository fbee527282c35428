"""CPU experts in the native library: one call starts a layer-step's experts, which all workers share row by row."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.experts.cpu import CpuExperts, ExpertBlocks
from foreload.backend.native import OPEN, Isa, Library, NativePool, Plan, c_layout
from foreload.errors import InternalError
from foreload.machine import cores


class NativeExperts(CpuExperts):
    """`threads` workers of the library, on the instruction set `isa`.

    A token's output does not depend on the other tokens, nor on the number of threads.
    """

    def __init__(self, slab: ExpertBlocks, threads: int, library: Library, isa: Isa) -> None:
        self._library, self._isa, self._dtype = library, isa, slab.dtype
        bf16 = slab.dtype == torch.bfloat16
        self.addresses = slab.addresses()
        self._layouts = [c_layout(slab.layout(layer), slab.shape, bf16) for layer in range(slab.shape.n_moe_layers)]
        self.layout_addresses = np.array([ctypes.addressof(layout) for layout in self._layouts], np.int64)
        self._cores: Collection[int] = ()
        self._open: list[tuple[int, int, int, Tensor]] = []  # ticket, layer, experts, the output it writes
        self._pool: NativePool | None = None
        self.threads = 0
        self.resize(threads)

    def resize(self, threads: int) -> None:
        """Have `threads` workers; nothing may be running."""
        if threads == self.threads:
            return
        if self._pool is not None:
            self._pool.close()
        self._pool = NativePool(self._library, threads, self._isa, cores()) if threads else None
        self.threads = threads
        self.place(self._cores)

    @property
    def handle(self) -> int:
        """Address of the library's pool; 0 without workers."""
        return 0 if self._pool is None else self._pool.handle

    def place(self, cores: Collection[int]) -> None:
        """Bind the workers to `cores`, those of later numbers of them too."""
        self._cores = cores
        if self._pool is not None and cores:
            self._pool.place(cores)

    def submit(self, layer: int, experts: list[int], x: Tensor, rows: Sequence[NDArray[np.int64]]) -> Tensor:
        """See `CpuExperts`."""
        if self._pool is None:
            raise InternalError("CPU experts were asked for, and there is no thread to run them")
        if len(self._open) == OPEN:
            self._wait(self._open.pop(0))
        x = x.contiguous()
        x_rows = np.concatenate(rows).astype(np.int32)
        first = np.zeros(len(experts) + 1, np.int32)
        np.cumsum([len(of) for of in rows], out=first[1:])
        out = torch.empty(len(x_rows), x.shape[1], dtype=x.dtype)
        plan = Plan(self.addresses[layer, experts], first, x_rows, np.arange(len(x_rows), dtype=np.int32))
        bf16 = x.dtype == torch.bfloat16
        ticket = self._pool.submit(
            self._layouts[layer], plan, (x.data_ptr(), len(x), bf16), (out.data_ptr(), out.dtype == torch.bfloat16)
        )
        self._open.append((ticket, layer, len(experts), out))
        return out

    def read_ahead(self, layer: int, expert: int) -> None:
        """See `CpuExperts`."""
        if self._pool is not None:
            self._pool.read_ahead(self._layouts[layer], 0 if expert < 0 else int(self.addresses[layer, expert]))

    def done(self) -> bool:
        """Whether nothing is running, without waiting."""
        return self._pool is None or all(self._pool.done(ticket) for ticket, *_ in self._open)

    def drain(self) -> BaseException | None:
        """Wait for all submitted experts."""
        while self._open:
            self._wait(self._open.pop(0))
        return None

    def _wait(self, submitted: tuple[int, int, int, Tensor]) -> None:
        ticket, layer, experts, _ = submitted
        assert self._pool is not None
        begun, ended = self._pool.wait(ticket)
        if self.spans is not None:
            self.spans.append((layer, experts, begun, ended))
