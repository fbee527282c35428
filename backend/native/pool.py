"""`NativePool`: worker threads of the native library, fed with one layer-step's experts at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foreload.backend.native.library import CLayout, CWork, Isa, Library
from foreload.errors import ForeloadError, InternalError
from foreload.formats import FORMATS, BlockLayout
from foreload.machine import cores
from foreload.shape import ModelShape

ACTIVATIONS = ("silu", "swiglu_oai")
SPIN_US = 1000 if cores() >= 8 else 100
"""How long idle workers stay awake where there are cores to spare: the next layer-step comes sooner than a millisecond,
and waking them takes a tenth of one. On few cores they would be in the way of the decoding thread."""
OPEN = 8
"""Submissions whose spans are remembered (`RING` in `src/pool.c`)."""


def c_layout(block: BlockLayout, shape: ModelShape, bf16_inputs: bool = False) -> CLayout:
    """A block's layout for the library. `bf16_inputs`: activations hold no more than bf16, which kernels may use."""
    return CLayout(
        FORMATS.index(block.format), ACTIVATIONS.index(shape.activation), shape.activation == "swiglu_oai", bf16_inputs,
        block.hidden, block.width, block.tile, shape.swiglu_alpha, shape.swiglu_limit,
        block.gate_up, block.down, block.gate_up_scale, block.down_scale, block.gate_up_bias, block.down_bias,
    )  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Which tokens each expert runs on. Expert i has the pairs first[i] .. first[i + 1]."""

    blocks: NDArray[np.int64]  # [experts] addresses
    first: NDArray[np.int32]  # [experts + 1]
    x_rows: NDArray[np.int32]  # [pairs] row of the input
    out_rows: NDArray[np.int32]  # [pairs] row of the result


class NativePool:
    """`threads` workers. Used by one thread; at most `OPEN` submissions may be open. Close it to stop them."""

    def __init__(self, library: Library, threads: int, isa: Isa, cores: int) -> None:
        """`cores`: how many this process may use; idle workers stay awake for a while only where one is to spare."""
        if library.handle is None:
            raise InternalError(f"no native library: {library.missing}")
        self._library = library.handle
        self._pool = self._library.fl_pool_new(threads, int(isa), SPIN_US if threads < cores else 0)
        if not self._pool:
            raise ForeloadError(f"{threads} CPU expert threads could not be started")

    @property
    def handle(self) -> int:
        """Address of the library's pool."""
        return int(self._pool)

    def place(self, cpus: Collection[int]) -> None:
        """Bind the workers to `cpus`, one each if there are enough; where that is not allowed they stay as they are."""
        chosen = np.asarray(sorted(cpus), np.int32)
        self._library.fl_pool_place(self._pool, chosen.ctypes.data, len(chosen))

    def submit(self, layout: CLayout, plan: Plan, x: tuple[int, int, bool], out: tuple[int, bool]) -> int:
        """Start a plan; returns a ticket. `x` (address, tokens, whether bf16) is copied; `out` (address, whether bf16)
        must stay until the ticket is done."""
        work = CWork(
            len(plan.blocks), x[1], x[2], out[1], 0,
            plan.blocks.ctypes.data, plan.first.ctypes.data, plan.x_rows.ctypes.data, plan.out_rows.ctypes.data,
            None, None, x[0], out[0],
        )  # fmt: skip
        ticket = int(self._library.fl_submit(self._pool, ctypes.byref(layout), ctypes.byref(work)))
        if ticket == -2:
            raise ForeloadError("host memory: no room for the inputs of CPU experts")
        if ticket < 0:
            raise InternalError("the native library refused a plan of CPU experts")
        return ticket

    def read_ahead(self, layout: CLayout, block: int) -> None:
        """What idle workers bring into their caches, an address (0: nothing); `layout` must stay."""
        self._library.fl_ahead(self._pool, ctypes.addressof(layout), block)

    def done(self, ticket: int) -> bool:
        """Whether the results are there."""
        return bool(self._library.fl_done(self._pool, ticket))

    def wait(self, ticket: int) -> tuple[int, int]:
        """Wait for a ticket; returns when its work began and ended (perf_counter nanoseconds)."""
        span = (ctypes.c_int64 * 2)()
        self._library.fl_wait(self._pool, ticket, ctypes.byref(span))
        return span[0], span[1]

    def close(self) -> None:
        """Finish what was submitted and stop the workers."""
        if self._pool:
            self._library.fl_pool_free(self._pool)
            self._pool = None
