"""The host slab: all experts in host memory, one contiguous block each, registered for DMA in one call."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.family import ExpertPart
from foreload.errors import ForeloadError
from foreload.formats import FORMAT_OF_DTYPE, BlockLayout, block_layout
from foreload.shape import ModelShape
from foreload.units import format_bytes


class PageableWarning(UserWarning):
    """Host memory could not be registered: copies run from pageable memory, several times slower."""


class ExpertViews(NamedTuple):
    """One expert's tensors inside its block. Rows of `gate_up` are all gates, then all ups; by turns if clamped."""

    gate_up: Tensor  # [2 width, hidden]
    down: Tensor  # [hidden, width]
    gate_up_bias: Tensor | None = None  # [2 width]
    down_bias: Tensor | None = None  # [hidden]
    clamp: tuple[float, float] | None = None  # (alpha, limit) of `swiglu_oai`


def block_views(block: Tensor, shape: ModelShape) -> ExpertViews:
    """The parts of an expert block [weights]: gate_up, down and, if the shape has biases, theirs in the same order."""
    width, hidden = shape.expert_width, shape.hidden
    sizes = [2 * width * hidden, hidden * width]
    if shape.expert_bias:
        sizes += [2 * width, hidden]
    gate_up, down, *biases = block.split(sizes)
    gate_up_bias, down_bias = biases or (None, None)
    clamp = (shape.swiglu_alpha, shape.swiglu_limit) if shape.activation == "swiglu_oai" else None
    return ExpertViews(gate_up.view(2 * width, hidden), down.view(hidden, width), gate_up_bias, down_bias, clamp)


def run_expert(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """One SwiGLU expert on x [n, hidden] -> [n, hidden]: down(silu(gate x) * up x); arguments as in `ExpertViews`.

    Clamped, with (alpha, limit): down(min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (up within +-limit + 1)).
    """
    both = F.linear(x, gate_up, gate_up_bias)
    if clamp is None:
        gate, up = both.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, down, down_bias)
    alpha, limit = clamp
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return F.linear(gate * torch.sigmoid(alpha * gate) * (up + 1), down, down_bias)


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

        `progress(done, total)` is called per part of an expert. Random weights are made on the GPU if `register`.
        """
        self.shape = checkpoint.shape
        self.dtype = dtype
        shape = self.shape
        try:
            self.blocks = torch.empty(shape.n_moe_layers, shape.experts, shape.expert_weights, dtype=dtype)
        except RuntimeError as error:
            size = shape.n_moe_layers * shape.experts * shape.expert_weights * dtype.itemsize
            raise ForeloadError(f"host memory: {format_bytes(size)} for the experts cannot be allocated") from error
        self._views = [[block_views(block, shape) for block in layer] for layer in self.blocks]
        self._fill(checkpoint, torch.device("cuda" if register else "cpu"), progress)
        self._registered = register and self._register()

    def _fill(self, checkpoint: Checkpoint, device: torch.device, progress: Callable[[int, int], None] | None) -> None:
        total = checkpoint.expert_parts()
        for done, (at, expert, part, tensor) in enumerate(checkpoint.read_experts(device), 1):
            self._part(at, expert, part).copy_(tensor)
            if progress is not None:
                progress(done, total)

    def _part(self, layer: int, expert: int, part: ExpertPart) -> Tensor:
        """Where a part of an expert belongs."""
        views, width = self._views[layer][expert], self.shape.expert_width
        if part in ("gate", "up"):
            return views.gate_up[:width] if part == "gate" else views.gate_up[width:]
        found = {"gate_up": views.gate_up, "down": views.down}.get(part)
        found = found if found is not None else views.gate_up_bias if part == "gate_up_bias" else views.down_bias
        assert found is not None
        return found

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

    def layout(self, layer: int) -> BlockLayout:
        """How the blocks of a layer are packed."""
        name = str(self.dtype).removeprefix("torch.")
        return block_layout(FORMAT_OF_DTYPE[name], self.shape)

    def addresses(self) -> NDArray[np.int64]:
        """Host addresses of all blocks, [MoE layers, experts]."""
        size = self.shape.expert_weights * self.dtype.itemsize
        numbers = np.arange(self.shape.n_moe_layers * self.shape.experts, dtype=np.int64)
        return (self.blocks.data_ptr() + size * numbers).reshape(-1, self.shape.experts)

    def views(self, layer: int, expert: int) -> ExpertViews:
        """The expert's tensors on the host."""
        return self._views[layer][expert]

    def close(self) -> None:
        """Unregister the memory."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.blocks.data_ptr())
            self._registered = False
