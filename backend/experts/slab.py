"""The host slab: all experts in host memory, one contiguous block each, registered for DMA in one call."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import ForeloadError
from foreload.shape import ModelShape
from foreload.units import format_bytes


class PageableWarning(UserWarning):
    """Host memory could not be registered: copies run from pageable memory, several times slower."""


def block_views(block: Tensor, shape: ModelShape) -> tuple[Tensor, Tensor]:
    """An expert block [3 hidden width] as (gate and up stacked [2 width, hidden], down [hidden, width])."""
    split = 2 * shape.expert_width * shape.hidden
    gate_up = block[:split].view(2 * shape.expert_width, shape.hidden)
    return gate_up, block[split:].view(shape.hidden, shape.expert_width)


def run_expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One SwiGLU expert on x [n, hidden] -> [n, hidden]: down(silu(gate x) * up x)."""
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def _clear_cuda_error() -> None:
    """Reset the runtime's last error, which torch would otherwise raise at its next call."""
    major = (torch.version.cuda or "12").split(".")[0]
    ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


class HostSlab:
    """Experts of all MoE layers, [MoE layers, experts, weights of one expert]."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        register: bool,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Read every expert into its block; `register` for DMA (with a PageableWarning if that fails).

        `progress(done, total)` is called per expert matrix.
        """
        self.shape = checkpoint.shape
        shape = self.shape
        try:
            self.blocks = torch.empty(shape.n_moe_layers, shape.experts, shape.expert_weights, dtype=dtype)
        except RuntimeError as error:
            size = shape.n_moe_layers * shape.experts * shape.expert_weights * dtype.itemsize
            raise ForeloadError(f"host memory: {format_bytes(size)} for the experts cannot be allocated") from error
        self._views = [[block_views(block, shape) for block in layer] for layer in self.blocks]
        self._fill(checkpoint, progress)
        self._registered = register and self._register()

    def _fill(self, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None) -> None:
        shape, width = self.shape, self.shape.expert_width
        wanted: dict[str, tuple[int, ...]] = {}
        target: dict[str, Tensor] = {}
        for at, layer in enumerate(shape.moe_layers):
            for expert in range(shape.experts):
                gate_up, down = self._views[at][expert]
                for name, part in zip(checkpoint.family.expert, (gate_up[:width], gate_up[width:], down), strict=True):
                    full = name.format(layer=layer, expert=expert)
                    wanted[full], target[full] = tuple(part.shape), part
        for done, (name, tensor) in enumerate(checkpoint.read(wanted), 1):
            target[name].copy_(tensor)
            if progress is not None:
                progress(done, len(wanted))

    def _register(self) -> bool:
        size = self.blocks.numel() * self.blocks.element_size()
        code = int(torch.cuda.cudart().cudaHostRegister(self.blocks.data_ptr(), size, 0))
        if code == 0:
            return True
        _clear_cuda_error()
        warnings.warn(
            f"host memory: {format_bytes(size)} of experts could not be pinned (CUDA error {code}); "
            "copies run from pageable memory, several times slower: raise the memlock limit or free memory",
            PageableWarning,
            stacklevel=3,
        )
        return False

    @property
    def pinned(self) -> bool:
        """Whether the GPU reads the slab directly."""
        return self._registered

    def block(self, layer: int, expert: int) -> Tensor:
        """The block of one expert, [weights]; `layer` counts MoE layers."""
        return self.blocks[layer, expert]

    def views(self, layer: int, expert: int) -> tuple[Tensor, Tensor]:
        """The expert's (gate_up, down) on the host."""
        return self._views[layer][expert]

    def close(self) -> None:
        """Unregister the memory."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.blocks.data_ptr())
            self._registered = False
