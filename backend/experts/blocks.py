"""What lies in an expert block, and what it means: views of plain weights, unpacked copies of packed ones."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from foreload.backend.experts.packing import TORCH_DTYPES, pack_rows, unpack_rows
from foreload.backend.models.family import ExpertPart
from foreload.backend.models.packed import Fp8Tiles, Mxfp4
from foreload.backend.models.source import Found
from foreload.formats import BlockLayout
from foreload.shape import ModelShape

Matrix = Literal["gate_up", "down"]


class ExpertViews(NamedTuple):
    """One expert's tensors. Rows of `gate_up` are all gates, then all ups; by turns if clamped."""

    gate_up: Tensor  # [2 width, hidden]
    down: Tensor  # [hidden, width]
    gate_up_bias: Tensor | None = None  # [2 width]
    down_bias: Tensor | None = None  # [hidden]
    clamp: tuple[float, float] | None = None  # (alpha, limit) of `swiglu_oai`


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


class BlockCodec:
    """Reads and writes the blocks of one layout, uint8 [at least its bytes] each; activations are `dtype`."""

    def __init__(self, layout: BlockLayout, shape: ModelShape, dtype: torch.dtype) -> None:
        self.layout = layout
        self._shape, self._dtype = shape, dtype
        self._bias_dtype = torch.bfloat16 if layout.format == "bf16" else torch.float32
        self._clamp = (shape.swiglu_alpha, shape.swiglu_limit) if shape.activation == "swiglu_oai" else None
        self.plain = TORCH_DTYPES.get(layout.format) == dtype
        """Whether `views` are views, which follow the block, and no copies."""

    def views(self, block: Tensor) -> ExpertViews:
        """The expert in a block: views of plain weights in `dtype`, else an unpacked copy."""
        hidden, width = self._shape.hidden, self._shape.expert_width
        format, tile = self.layout.format, self.layout.tile
        gate_up = unpack_rows(*self._matrix(block, "gate_up"), format, hidden, tile).to(self._dtype)
        down = unpack_rows(*self._matrix(block, "down"), format, width, tile).to(self._dtype)
        gate_up_bias, down_bias = self._bias(block, "gate_up"), self._bias(block, "down")
        if gate_up_bias is None or down_bias is None:
            return ExpertViews(gate_up, down, clamp=self._clamp)
        return ExpertViews(gate_up, down, gate_up_bias.to(self._dtype), down_bias.to(self._dtype), self._clamp)

    def write(self, block: Tensor, part: ExpertPart, tensor: Found) -> None:
        """Pack a tensor [rows, columns], or bias [rows], into its place; what is packed so already is copied."""
        if part in ("gate_up_bias", "down_bias"):
            bias = self._bias(block, "down" if part == "down_bias" else "gate_up")
            assert bias is not None
            assert isinstance(tensor, Tensor)
            bias.copy_(tensor)
            return
        rows, scales = self._matrix(block, "down" if part == "down" else "gate_up")
        first = self._shape.expert_width if part == "up" else 0
        packed, packed_scales = self._packed(tensor)
        rows[first : first + len(packed)].copy_(packed)
        if scales is not None and packed_scales is not None:
            scales[first : first + len(packed)].copy_(packed_scales)

    def _packed(self, found: Found) -> tuple[Tensor, Tensor | None]:
        format, tile = self.layout.format, self.layout.tile
        if isinstance(found, Tensor):
            return pack_rows(found, format, tile)
        if isinstance(found, Mxfp4) and format == "mxfp4":
            return found.blocks.flatten(1), found.scales
        if isinstance(found, Fp8Tiles) and format == "fp8_tile" and found.tile == tile:
            return found.weights, found.scales
        return pack_rows(found.floats(), format, tile)

    def _matrix(self, block: Tensor, name: Matrix) -> tuple[Tensor, Tensor | None]:
        """Packed rows and scales of a matrix inside a block, as `unpack_rows` takes them."""
        layout, down = self.layout, name == "down"
        rows, columns = self._rows(name), self._shape.expert_width if down else self._shape.hidden
        at, scale_at = (layout.down, layout.down_scale) if down else (layout.gate_up, layout.gate_up_scale)
        size = layout.row_bytes(columns)
        weights = block[at : at + rows * size].view(TORCH_DTYPES.get(layout.format, torch.uint8)).view(rows, -1)
        if scale_at < 0:
            return weights, None
        scales = layout.scales(columns)
        if layout.format == "mxfp4":
            return weights, block[scale_at : scale_at + rows * scales].view(rows, scales)
        found = block[scale_at : scale_at + 4 * rows * scales].view(torch.float32)
        return weights, found.view(rows, scales) if layout.format == "fp8_tile" else found

    def _bias(self, block: Tensor, name: Matrix) -> Tensor | None:
        at = self.layout.down_bias if name == "down" else self.layout.gate_up_bias
        if at < 0:
            return None
        return block[at : at + self._rows(name) * self._bias_dtype.itemsize].view(self._bias_dtype)

    def _rows(self, name: Matrix) -> int:
        return self._shape.hidden if name == "down" else 2 * self._shape.expert_width
