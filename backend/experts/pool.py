"""Device slots: one pool, allocated in blocks of slots, so that resizing adds or frees blocks and moves little."""

from __future__ import annotations

import torch
from torch import Tensor

from foreload.backend.experts.slab import ExpertViews, block_views
from foreload.errors import BudgetError
from foreload.shape import ModelShape
from foreload.units import format_bytes

BLOCK_BYTES = 64 << 20


class SlotPool:
    """Slots 0 .. len - 1, each one expert block on the device."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape, self._device, self._dtype = shape, device, dtype
        slot_bytes = shape.expert_weights * dtype.itemsize
        self._per_block = max(1, min(64, BLOCK_BYTES // slot_bytes))
        self._blocks: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._views: list[ExpertViews] = []

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def allocated_bytes(self) -> int:
        """Bytes the blocks take."""
        return sum(block.numel() * block.element_size() for block in self._blocks)

    @torch.inference_mode(False)
    def grow(self, slots: int) -> None:
        """Have at least `slots` slots. BudgetError, and no change, if the device has no memory for them.

        They are plain tensors even if a request is running, since threads outside inference mode write to them.
        """
        added: list[Tensor] = []
        missing = slots - len(self)
        try:
            while missing > 0:
                size = min(self._per_block, missing)
                added.append(torch.empty(size, self._shape.expert_weights, device=self._device, dtype=self._dtype))
                missing -= size
        except RuntimeError as error:
            short = missing * self._shape.expert_weights * self._dtype.itemsize
            raise BudgetError(
                f"device memory: {format_bytes(short)} short for {slots} expert slots", "vram", short
            ) from error
        for block in added:
            self._blocks.append(block)
            self._slots.extend(block)
            self._views.extend(block_views(slot, self._shape) for slot in block)

    def shrink(self, slots: int) -> None:
        """Give up whole blocks above `slots`; what they hold is lost."""
        while self._blocks and len(self) - len(self._blocks[-1]) >= slots:
            size = len(self._blocks.pop())
            del self._slots[-size:], self._views[-size:]

    def slot(self, index: int) -> Tensor:
        """The slot's block, [weights]."""
        return self._slots[index]

    def views(self, index: int) -> ExpertViews:
        """The slot's tensors."""
        return self._views[index]

    def move(self, source: int, target: int) -> None:
        """Copy one slot to another."""
        self._slots[target].copy_(self._slots[source])

    def poison(self, index: int) -> None:
        """Fill a free slot with NaN, so that a read before its next copy shows."""
        self._slots[index].fill_(float("nan"))
