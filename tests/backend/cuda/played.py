"""An engine on the CPU with the fast path, on a played device."""

from __future__ import annotations

import pytest
import torch
from fake_device import FakeDevice

from foreload.backend.cuda.copies import NativeCopies, NativeOrder
from foreload.backend.cuda.forward import FastForward, FastParts
from foreload.backend.cuda.issue import Issuer, issue_library
from foreload.backend.cuda.kernels.layout import kernel_layout
from foreload.backend.cuda.kernels.torch_ops import TorchOps
from foreload.backend.cuda.open import open_copies
from foreload.backend.cuda.programs import Program
from foreload.backend.engine import Engine
from foreload.backend.policy.calls import queue_calls


class PromptOrder(NativeOrder):
    """Prompts run on the calling thread, not on the played device: it waits where a kernel would."""

    def __init__(self, copies: NativeCopies, device: FakeDevice) -> None:
        super().__init__(copies, lambda: 0)
        self._device = device

    def when_landed(self, slot: int) -> None:
        super().when_landed(slot)
        self._device.cudaStreamSynchronize(0)


class PlayedForward(FastForward):
    """Reads logits when the played device has written them, as a kernel would."""

    device: FakeDevice

    def _logits(self, program: Program) -> torch.Tensor:
        self.device.cudaStreamSynchronize(0)
        return super()._logits(program)


def accelerate(engine: Engine, seed: int, poison: bool = False) -> FakeDevice:
    """Give an engine on the CPU the fast path, on a played device."""
    library = issue_library()
    if library is None or queue_calls() is None:
        pytest.skip("no native library, or numba compiles nothing")
    device = FakeDevice(seed)
    engine.copies.close()
    old = engine.forward
    issuer = Issuer(library, device.functions)
    copies = open_copies(engine.brain, engine.slab, engine.pool, issuer)
    parts = FastParts(
        ops=TorchOps(),
        issuer=issuer,
        capture=device,
        layouts=[kernel_layout(layout, engine.shape) for layout in engine.slab.layouts],
        stream=lambda: 0,
        idle=lambda: device.idle,
    )
    order = PromptOrder(copies, device)
    fill = engine.pool.poison
    engine.pool.poison = lambda slot: device.queue(lambda: fill(slot))  # type: ignore[method-assign]
    engine.copies = copies
    engine.forward = PlayedForward(
        old.decoder, engine.slab, engine.pool, order, copies, engine.cpu, poison, parts=parts
    )
    engine.forward.device = device
    engine.path = "graphs"
    engine._follow(engine.settings, engine._predictors.use(engine.settings))
    return device
