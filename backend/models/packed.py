"""Packed weights as they are stored, and what they stand for: MXFP4 blocks and fp8 with a scale per tile."""

from __future__ import annotations

from functools import cache
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
    pairs, powers = _tables(blocks.device)
    values = torch.index_select(pairs, 0, blocks.flatten().int()).view(torch.float32).view(*scales.shape, MX_BLOCK)
    values *= torch.index_select(powers, 0, scales.flatten().int()).view(*scales.shape, 1)
    return values.flatten(-2)


@cache
@torch.inference_mode(False)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """What a byte of two values stands for, as the bits of two floats in an int64; and the power of each scale."""
    pairs = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)], device=device)
    powers = torch.ldexp(torch.ones(256, device=device), torch.arange(256, device=device) - MX_BIAS)
    powers[MX_NAN] = float("nan")
    return pairs.view(torch.int64).flatten(), powers


class Mxfp4(NamedTuple):
    """A matrix [rows, 32 b] as it is stored."""

    blocks: Tensor  # uint8 [rows, b, 16]
    scales: Tensor  # uint8 [rows, b]

    def floats(self) -> Tensor:
        """What it stands for, fp32 [rows, 32 b]."""
        return unpack_mxfp4(self.blocks, self.scales)


class Fp8Tiles(NamedTuple):
    """A matrix [rows, columns] as it is stored, but for its scales, which every row has its own copy of."""

    weights: Tensor  # e4m3 [rows, columns]
    scales: Tensor  # fp32 [rows, ceil(columns / tile)]
    tile: int

    def floats(self) -> Tensor:
        """What it stands for, fp32 [rows, columns]."""
        return unpack_fp8(self.weights, self.scales, (1, self.tile))


def unpack_fp8(weight: Tensor, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """fp32 [out, in] from e4m3 weight [out, in] and scales [ceil(out / tile[0]), ceil(in / tile[1])]."""
    rows, columns = weight.shape
    spread = scales.float().repeat_interleave(tile[0], 0)[:rows].repeat_interleave(tile[1], 1)[:, :columns]
    return weight.float() * spread
