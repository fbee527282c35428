"""Device slots: one pool, allocated in blocks of slots, so that resizing adds or frees blocks and moves little."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foreload.backend.experts.blocks import BlockCodec, ExpertViews
from foreload.errors import BudgetError
from foreload.units import format_bytes

BLOCK_BYTES = 64 << 20


class SlotPool:
    """Slots 0 .. len - 1, each as large as the largest expert block of any layer. An expert's bytes begin its slot."""

    def __init__(self, codecs: Sequence[BlockCodec], slot_bytes: int, device: torch.device) -> None:
        """`codecs` [MoE layers]: how each layer's blocks are read."""
        self._codecs, self._slot_bytes, self._device = codecs, slot_bytes, device
        self._per_block = max(1, min(64, BLOCK_BYTES // slot_bytes))
        self._blocks: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._views: list[dict[str, ExpertViews]] = []  # of plain weights, by format

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def allocated_bytes(self) -> int:
        """Bytes the blocks take."""
        return sum(block.numel() for block in self._blocks)

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
                added.append(torch.empty(size, self._slot_bytes, device=self._device, dtype=torch.uint8))
                missing -= size
        except RuntimeError as error:
            short = missing * self._slot_bytes
            raise BudgetError(
                f"device memory: {format_bytes(short)} short for {slots} expert slots", "vram", short
            ) from error
        for block in added:
            self._blocks.append(block)
            self._slots.extend(block)
            self._views.extend({} for _ in block)

    def shrink(self, slots: int) -> None:
        """Give up whole blocks above `slots`; what they hold is lost."""
        while self._blocks and len(self) - len(self._blocks[-1]) >= slots:
            size = len(self._blocks.pop())
            del self._slots[-size:], self._views[-size:]

    def slot(self, index: int) -> Tensor:
        """The slot's memory, uint8."""
        return self._slots[index]

    def views(self, index: int, layer: int) -> ExpertViews:
        """The tensors of the expert of `layer` that the slot holds; unpacked if the layer is packed."""
        codec, known = self._codecs[layer], self._views[index]
        if not codec.plain:
            return codec.views(self._slots[index])
        found = known.get(codec.layout.format)
        if found is None:
            found = known[codec.layout.format] = codec.views(self._slots[index])
        return found

    def move(self, source: int, target: int) -> None:
        """Copy one slot to another."""
        self._slots[target].copy_(self._slots[source])

    def poison(self, index: int) -> None:
        """Fill a free slot with what every format, or its scale, reads as NaN, so that a read before its copy shows."""
        self._slots[index].fill_(0xFF)
