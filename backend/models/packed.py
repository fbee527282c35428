"""Packed weights as they are stored, and what they stand for: MXFP4 blocks and fp8 with a scale per tile."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MX_BLOCK = 32
"""Values that share one scale (OCP Microscaling Formats 1.0, section 5.2)."""
MX_BYTES = MX_BLOCK // 2
MX_BIAS = 127
MX_NAN = 255
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp32 [rows, 32 b] from blocks [rows, b, 16] and scales [rows, b], both uint8; a byte's low half comes first."""
    table = torch.tensor(_E2M1, device=blocks.device)
    halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = table[halves.int()]
    return torch.ldexp(values, scales.int()[..., None] - MX_BIAS).flatten(-2)


class Mxfp4(NamedTuple):
    """A matrix [rows, 32 b] as it is stored."""

    blocks: Tensor  # uint8 [rows, b, 16]
    scales: Tensor  # uint8 [rows, b]

    def floats(self) -> Tensor:
        """What it stands for, fp32 [rows, 32 b]."""
        return unpack_mxfp4(self.blocks, self.scales)


def unpack_fp8(weight: Tensor, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """fp32 [out, in] from e4m3 weight [out, in] and scales [ceil(out / tile[0]), ceil(in / tile[1])]."""
    rows, columns = weight.shape
    spread = scales.float().repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    return weight.float() * spread
