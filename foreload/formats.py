"""How one expert is packed: the formats, and where the parts of its block lie.

    fp32, bf16   plain weights
    int8, fp8    one byte a weight (fp8: e4m3) and one fp32 scale per row: weight = scale * stored
    fp8_tile     the same with one scale per row and tile of columns, as many as the checkpoint's tiles have
    bf12         bf16 in 12 bits, nothing lost: weights of a row whose exponents are among 15 neighbours (or 0) have a
                 byte, sign and mantissa, and a code of 4 bits, the exponent; up to 11 others are in the row's header
    mxfp4        blocks of 32 along a row share a power of two (OCP Microscaling Formats 1.0): 16 bytes of e2m1 pairs,
                 the earlier weight in the low half, and one e8m0 byte; rows are filled up with zeros to whole blocks

A block holds gate_up [2 width, hidden] (gate rows before up rows, or by turns where the activation is `swiglu_oai`),
down [hidden, width], the scales of both, and the biases of both where the shape has them: in bf16 beside bf16 weights,
else in fp32. In a packed block every part begins at a multiple of 64 bytes; plain weights and biases lie end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from foreload.errors import SettingsError
from foreload.shape import ModelShape

PackedFormat = Literal["fp32", "bf16", "int8", "fp8", "mxfp4", "fp8_tile", "bf12"]
FORMATS: tuple[PackedFormat, ...] = ("fp32", "bf16", "int8", "fp8", "mxfp4", "fp8_tile", "bf12")
FORMAT_OF_DTYPE: dict[str, PackedFormat] = {"float32": "fp32", "bfloat16": "bf16"}
MX_BLOCK = 32
BF12_CHUNK, BF12_BYTES, BF12_OUTLIERS = 32, 48, 11
"""Weights of a chunk and its bytes, 16 of codes and 32 of signs and mantissas. A row's header, as large as a chunk, has
the exponent of code 15 (the others' are next to it, that of code 0 is 0), how many weights no code fits, 2 bytes of
nothing, their columns and values (2 bytes each)."""
ALIGNMENT = 64

ExpertFormat = Literal["bf16", "bf12", "fp8", "int8", "mxfp4"]
"""What `Settings.expert_format` may choose; without a choice experts stay as the checkpoint has them."""
SMALLER: dict[PackedFormat, ExpertFormat] = {"bf16": "bf12"}
"""Formats that hold the same numbers in fewer bytes."""


@dataclass(frozen=True)
class BlockLayout:
    """Offsets in bytes from the start of an expert's block; -1: the format has no such part."""

    format: PackedFormat
    hidden: int
    width: int
    gate_up: int
    down: int
    gate_up_scale: int
    down_scale: int
    gate_up_bias: int
    down_bias: int
    bytes: int
    tile: int = 0  # columns that share a scale, of fp8_tile

    def scales(self, weights: int) -> int:
        """Scales of a packed row of so many weights."""
        return row_scales(self.format, weights, self.tile)

    def row_bytes(self, weights: int) -> int:
        """Bytes of a packed row of so many weights, without scales."""
        return row_bytes(self.format, weights)


def row_bytes(format: PackedFormat, weights: int) -> int:
    """Bytes of a packed row of so many weights, without scales."""
    if format == "mxfp4":
        return -(-weights // MX_BLOCK) * MX_BLOCK // 2
    if format == "bf12":
        return (-(-weights // BF12_CHUNK) + 1) * BF12_BYTES
    return weights * {"fp32": 4, "bf16": 2}.get(format, 1)


def row_scales(format: PackedFormat, weights: int, tile: int) -> int:
    """Scales of a packed row of so many weights: bytes of mxfp4, else fp32."""
    if format in ("bf12", *FORMAT_OF_DTYPE.values()):
        return 0
    return -(-weights // {"mxfp4": MX_BLOCK, "fp8_tile": tile}.get(format, weights))


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


@cache
def block_layout(format: PackedFormat, shape: ModelShape) -> BlockLayout:
    """The layout of the shape's experts in `format`."""
    hidden, width = shape.hidden, shape.expert_width
    plain = format in FORMAT_OF_DTYPE.values()
    item = 2 if format == "bf16" else 4
    tile = (shape.expert_tile or max(hidden, width)) if format == "fp8_tile" else 0
    wide = 1 if format == "mxfp4" else 4
    scales = tuple(
        wide * rows * row_scales(format, columns, tile) for rows, columns in ((2 * width, hidden), (hidden, width))
    )
    biases = (2 * width * item, hidden * item) if shape.expert_bias else (0, 0)
    parts = (2 * width * row_bytes(format, hidden), hidden * row_bytes(format, width), *scales, *biases)
    offsets, at = [], 0
    for size in parts:
        at = at if plain else _aligned(at)
        offsets.append(at if size else -1)
        at += size
    end = at if plain else _aligned(at)
    gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias = offsets
    return BlockLayout(
        format, hidden, width, gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias, end, tile
    )


def layer_formats(
    chosen: ExpertFormat | tuple[ExpertFormat, ...] | None, shape: ModelShape, dtype: str
) -> tuple[PackedFormat, ...]:
    """The format of each MoE layer under a choice of `Settings.expert_format`; `dtype` is what the model runs in.

    SettingsError for a list that is not one format per MoE layer.
    """
    layers = shape.n_moe_layers
    if isinstance(chosen, tuple):
        if len(chosen) != layers:
            raise SettingsError(f"expert_format has {len(chosen)} entries: the model has {layers} MoE layers")
        return chosen
    own = FORMAT_OF_DTYPE[dtype] if shape.stored_experts == "float" else shape.stored_experts
    return (chosen or own,) * layers


def layer_bytes(formats: tuple[PackedFormat, ...], shape: ModelShape) -> tuple[int, ...]:
    """Bytes of one expert of each MoE layer."""
    return tuple(block_layout(format, shape).bytes for format in formats)


def slot_bytes(formats: tuple[PackedFormat, ...], shape: ModelShape) -> int:
    """Bytes of a device slot: any slot can hold an expert of any layer, so it is as large as the largest."""
    most = max(layer_bytes(formats, shape))
    return most if len(set(formats)) == 1 else _aligned(most)
