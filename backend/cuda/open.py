"""Whether this machine has the fast path, and putting its parts together."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

import numpy as np
import torch

from foreload.backend.cuda.copies import NativeCopies, NativeOrder
from foreload.backend.cuda.forward import FastForward, FastParts
from foreload.backend.cuda.issue import Blocks, Issuer, cuda_runtime, issue_library
from foreload.backend.cuda.kernels.layout import kernel_layout
from foreload.backend.cuda.kernels.ops import check_layout
from foreload.backend.cuda.programs import GraphCapture
from foreload.backend.experts.cpu import CpuExperts
from foreload.backend.experts.pool import SlotPool
from foreload.backend.experts.slab import HostSlab
from foreload.backend.models.decoder import Decoder
from foreload.backend.native import chosen_isa
from foreload.backend.policy import Brain
from foreload.backend.policy.calls import queue_calls
from foreload.errors import InternalError, UsageError
from foreload.formats import BlockLayout
from foreload.machine import cores
from foreload.shape import ModelShape

SPINS = 64
"""Pauses between two looks at the link, some microseconds, where there are cores to spare."""
DELAYS = tuple(1 << n for n in range(10, 21))
"""Lengths, in cycles, of the random delays before copies in debug mode."""


def missing(layouts: Sequence[BlockLayout], shape: ModelShape) -> str | None:
    """Why decode steps over experts packed like this [MoE layers] cannot be graphs here; None if they can."""
    try:
        for layout in set(layouts):
            check_layout(kernel_layout(layout, shape))
    except UsageError as error:
        return str(error)
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if issue_library() is None:
        return "the native library was not built"
    if chosen_isa() is None:
        return "CPU experts run in torch"
    if queue_calls() is None:
        return "numba compiles nothing (NUMBA_DISABLE_JIT)"
    return None


def blocks_of(slab: HostSlab, pool: SlotPool) -> Callable[[], Blocks]:
    """Where the experts are: the host's blocks stay, slots are looked up again each time."""
    shape = slab.shape
    blocks = [[slab.block(layer, expert) for expert in range(shape.experts)] for layer in range(shape.n_moe_layers)]
    sources = np.array([[block.data_ptr() for block in layer] for layer in blocks], np.int64)
    sizes = np.array([layer[0].numel() * layer[0].element_size() for layer in blocks], np.int64)

    def find() -> Blocks:
        return Blocks(sources, sizes, np.array([pool.slot(slot).data_ptr() for slot in range(len(pool))], np.int64))

    return find


def open_copies(brain: Brain, slab: HostSlab, pool: SlotPool, issuer: Issuer) -> NativeCopies:
    """Copies served by the native library."""
    calls = queue_calls()
    if calls is None:
        raise InternalError("the brain's queue functions are not compiled")
    return NativeCopies(brain, issuer, calls, blocks_of(slab, pool))


def open_fast(
    decoder: Decoder, brain: Brain, slab: HostSlab, pool: SlotPool, cpu: CpuExperts, debug_seed: int | None
) -> tuple[NativeCopies, FastForward]:
    """Copies and forward of the fast path on the current CUDA device (`missing` gives None)."""
    from foreload.backend.cuda.kernels.triton_ops import TritonOps

    library = issue_library()
    if library is None:
        raise InternalError("the native library was not built")
    issuer = Issuer(library, cuda_runtime(), torch.cuda.current_device(), SPINS if cores() > 3 else 0)
    copies = open_copies(brain, slab, pool, issuer)
    capture = GraphCapture(issuer)
    if debug_seed is not None:
        with copies.lock:
            issuer.delays([capture(lambda cycles=n: torch.cuda._sleep(cycles)) for n in DELAYS], debug_seed)  # type: ignore[misc]
    parts = FastParts(
        ops=TritonOps(pdl=torch.cuda.get_device_capability() >= (9, 0)),
        issuer=issuer,
        capture=capture,
        layouts=[kernel_layout(layout, slab.shape) for layout in slab.layouts],
        stream=lambda: int(torch.cuda.current_stream().cuda_stream),
        idle=lambda: bool(torch.cuda.current_stream().query()),
    )
    order = NativeOrder(copies, parts.stream)
    forward = FastForward(decoder, slab, pool, order, copies, cpu, debug_seed is not None, parts=parts)
    return copies, forward
