"""The host slab: all experts in host memory, one contiguous block each, registered for DMA in one call."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.experts import conversions
from foreload.backend.experts.blocks import BlockCodec, ExpertViews
from foreload.backend.experts.pages import populate, prefer_huge_pages
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import ForeloadError, SettingsError
from foreload.formats import ALIGNMENT, FORMAT_OF_DTYPE, BlockLayout, PackedFormat, block_layout
from foreload.machine import cores
from foreload.units import format_bytes


class PageableWarning(UserWarning):
    """Host memory could not be registered: copies run from pageable memory, several times slower."""


def clear_cuda_error() -> None:
    """Reset the runtime's last error, which torch would otherwise raise at its next call."""
    major = (torch.version.cuda or "12").split(".")[0]
    ctypes.CDLL(f"libcudart.so.{major}").cudaGetLastError()


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let torch use every core while weights are packed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class HostSlab:
    """Experts of all MoE layers, packed as their layer's format says (default: plain weights in `dtype`).

    `blocks` is uint8, all blocks end to end; a layer begins at a multiple of 64 bytes. `dtype` is what experts run in.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        register: bool,
        progress: Callable[[int, int], None] | None = None,
        formats: Sequence[PackedFormat] | None = None,
    ) -> None:
        """Read every expert into its block; `register` for DMA (with a PageableWarning if that fails).

        `progress(done, total)` is called per part of an expert. Random weights are made on the GPU if `register`.
        """
        self.shape = shape = checkpoint.shape
        self.dtype = dtype
        plain = FORMAT_OF_DTYPE[str(dtype).removeprefix("torch.")]
        self.layouts = [block_layout(of_layer, shape) for of_layer in formats or (plain,) * shape.n_moe_layers]
        self.codecs = [BlockCodec(layout, shape, dtype) for layout in self.layouts]
        sizes = [-(-shape.experts * layout.bytes // ALIGNMENT) * ALIGNMENT for layout in self.layouts]
        self._starts = np.cumsum([0, *sizes[:-1]])
        try:
            self.blocks = torch.empty(sum(sizes), dtype=torch.uint8)
        except RuntimeError as error:
            raise ForeloadError(
                f"host memory: {format_bytes(sum(sizes))} for the experts cannot be allocated"
            ) from error
        prefer_huge_pages(self.blocks)
        self._blocks = [
            [self.blocks[start + e * layout.bytes : start + (e + 1) * layout.bytes] for e in range(shape.experts)]
            for start, layout in zip(self._starts.tolist(), self.layouts, strict=True)
        ]
        self._views = [
            [codec.views(block) for block in blocks] if codec.plain else []
            for codec, blocks in zip(self.codecs, self._blocks, strict=True)
        ]
        self._registered = register and self._register()  # first: weights made on the GPU then come at link speed
        try:
            self._load(checkpoint, torch.device("cuda" if register else "cpu"), progress)
        except BaseException:
            self.close()
            raise

    def _load(self, checkpoint: Checkpoint, device: torch.device, progress: Callable[[int, int], None] | None) -> None:
        """Fill the blocks; what takes long to pack is kept on disk for the next time."""
        kept = None
        as_stored = [codec.plain or codec.layout.format == checkpoint.stored != "bf16" for codec in self.codecs]
        if self.blocks.numel() >= conversions.SMALLEST_BYTES and not all(as_stored):
            kept = conversions.Conversion(checkpoint, self.layouts)
            if kept.load(self.blocks):
                return
        if not all(codec.plain for codec in self.codecs):
            self.blocks.zero_()  # packed parts have gaps between them
        with _all_cores():
            self._fill(checkpoint, device, progress)
        if kept is not None:
            kept.save(self.blocks)

    def _fill(self, checkpoint: Checkpoint, device: torch.device, progress: Callable[[int, int], None] | None) -> None:
        total = checkpoint.expert_parts()
        for done, (at, expert, part, tensor) in enumerate(checkpoint.read_stored(device), 1):
            try:
                self.codecs[at].write(self._blocks[at][expert], part, tensor)
            except SettingsError as error:
                raise SettingsError(f"MoE layer {at}, expert {expert}, {part}: {error}") from error
            if progress is not None:
                progress(done, total)

    def _register(self) -> bool:
        size = self.blocks.numel()
        populate(self.blocks, cores())
        code = int(torch.cuda.cudart().cudaHostRegister(self.blocks.data_ptr(), size, 0))
        if code == 0:
            return True
        clear_cuda_error()
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
        """The block of one expert, uint8; `layer` counts MoE layers."""
        return self._blocks[layer][expert]

    def layout(self, layer: int) -> BlockLayout:
        """How the blocks of a layer are packed."""
        return self.layouts[layer]

    def addresses(self) -> NDArray[np.int64]:
        """Host addresses of all blocks, [MoE layers, experts]."""
        sizes = np.array([layout.bytes for layout in self.layouts])
        offsets = self._starts[:, None] + sizes[:, None] * np.arange(self.shape.experts)
        return (self.blocks.data_ptr() + offsets).astype(np.int64)

    def views(self, layer: int, expert: int) -> ExpertViews:
        """The expert's tensors on the host; unpacked if the layer is packed."""
        codec = self.codecs[layer]
        return self._views[layer][expert] if codec.plain else codec.views(self._blocks[layer][expert])

    def close(self) -> None:
        """Unregister the memory."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.blocks.data_ptr())
            self._registered = False
