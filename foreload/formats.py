"""How one expert is packed: the formats, and where the parts of its block lie.

    fp32, bf16   plain weights
    int8, fp8    one byte a weight (fp8: e4m3) and one fp32 scale per row: weight = scale * stored
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

PackedFormat = Literal["fp32", "bf16", "int8", "fp8", "mxfp4"]
FORMATS: tuple[PackedFormat, ...] = ("fp32", "bf16", "int8", "fp8", "mxfp4")
FORMAT_OF_DTYPE: dict[str, PackedFormat] = {"float32": "fp32", "bfloat16": "bf16"}
MX_BLOCK = 32
ALIGNMENT = 64

ExpertFormat = Literal["bf16", "fp8", "int8", "mxfp4"]
"""What `Settings.expert_format` may choose; without a choice experts stay as the checkpoint has them."""


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

    def row_bytes(self, weights: int) -> int:
        """Bytes of a packed row of so many weights, without scales."""
        return row_bytes(self.format, weights)


def row_bytes(format: PackedFormat, weights: int) -> int:
    """Bytes of a packed row of so many weights, without scales."""
    if format == "mxfp4":
        return -(-weights // MX_BLOCK) * MX_BLOCK // 2
    return weights * {"fp32": 4, "bf16": 2}.get(format, 1)


def _scale_bytes(format: PackedFormat, rows: int, weights: int) -> int:
    return rows * (-(-weights // MX_BLOCK) if format == "mxfp4" else 4)


def _aligned(at: int) -> int:
    return -(-at // ALIGNMENT) * ALIGNMENT


@cache
def block_layout(format: PackedFormat, shape: ModelShape) -> BlockLayout:
    """The layout of the shape's experts in `format`."""
    hidden, width = shape.hidden, shape.expert_width
    plain = format in FORMAT_OF_DTYPE.values()
    item = 2 if format == "bf16" else 4
    scales = (0, 0) if plain else (_scale_bytes(format, 2 * width, hidden), _scale_bytes(format, hidden, width))
    biases = (2 * width * item, hidden * item) if shape.expert_bias else (0, 0)
    parts = (2 * width * row_bytes(format, hidden), hidden * row_bytes(format, width), *scales, *biases)
    offsets, at = [], 0
    for size in parts:
        at = at if plain else _aligned(at)
        offsets.append(at if size else -1)
        at += size
    end = at if plain else _aligned(at)
    gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias = offsets
    return BlockLayout(format, hidden, width, gate_up, down, gate_up_scale, down_scale, gate_up_bias, down_bias, end)


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
    own: PackedFormat = "mxfp4" if shape.stored_experts == "mxfp4" else FORMAT_OF_DTYPE[dtype]
    return (chosen or own,) * layers


def layer_bytes(formats: tuple[PackedFormat, ...], shape: ModelShape) -> tuple[int, ...]:
    """Bytes of one expert of each MoE layer."""
    return tuple(block_layout(format, shape).bytes for format in formats)


def slot_bytes(formats: tuple[PackedFormat, ...], shape: ModelShape) -> int:
    """Bytes of a device slot: any slot can hold an expert of any layer, so it is as large as the largest."""
    most = max(layer_bytes(formats, shape))
    return most if len(set(formats)) == 1 else _aligned(most)
