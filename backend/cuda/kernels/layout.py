"""Where the parts of an expert block lie, in bytes from the slot's address, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreload.formats import BlockLayout as PackedLayout
from foreload.formats import PackedFormat
from foreload.shape import ModelShape

Format = Literal["float32", "bfloat16", "fp8", "int8", "mxfp4", "fp8_tile", "bf12"]
FORMATS: tuple[Format, ...] = ("float32", "bfloat16", "fp8", "int8", "mxfp4", "fp8_tile", "bf12")
Activation = Literal["silu", "swiglu_oai"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "swiglu_oai")

ENTRY = 4
"""Words (int64) of a plan entry: slot address (0: none), first item, items, unused (keeps entries 32 bytes apart)."""


@dataclass(frozen=True)
class Part:
    """One matrix of a block, rows x columns: `at` + row * `stride` is a row, its scales and bias likewise.

    Scales are one per row (fp8, int8: float32), one per tile of its columns (fp8_tile: float32) or one per 32 columns
    (mxfp4: a byte, 2**(byte - 127)); -1: none.
    """

    at: int
    stride: int
    scales: int = -1
    scale_stride: int = 0
    bias: int = -1
    bias_stride: int = 0


@dataclass(frozen=True)
class BlockLayout:
    """An expert block: gate and up [width, hidden], down [hidden, width]."""

    format: Format
    hidden: int
    width: int
    gate: Part
    up: Part
    down: Part
    block_bytes: int
    activation: Activation = "silu"
    alpha: float = 1.702  # of swiglu_oai
    limit: float = 7.0
    bias_bytes: Literal[2, 4] = 4  # bfloat16 or float32
    tile: int = 0  # columns that share a scale, of fp8_tile

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes, so that rows are read 16 bytes at a time."""
        numbers = [self.block_bytes]
        for part in (self.gate, self.up, self.down):
            numbers += [part.at, part.stride]
        return all(number % 16 == 0 for number in numbers)


_NAMES: dict[PackedFormat, Format] = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp8": "fp8",
    "int8": "int8",
    "mxfp4": "mxfp4",
    "fp8_tile": "fp8_tile",
    "bf12": "bf12",
}


def kernel_layout(packed: PackedLayout, shape: ModelShape) -> BlockLayout:
    """A block as slab and slots hold it (`foreload.formats`), for the kernels.

    Gate rows come before up rows, or by turns if the activation is clamped.
    """
    width, turns = packed.width, shape.activation == "swiglu_oai"
    pace, second = (2, 1) if turns else (1, width)  # rows of gate_up from one gate to the next, and to the first up
    bias_bytes: Literal[2, 4] = 2 if packed.format == "bf16" else 4

    def part(at: int, scales: int, bias: int, columns: int, first: int = 0, step: int = 1) -> Part:
        row = packed.row_bytes(columns)
        scale = packed.scales(columns) * (1 if packed.format == "mxfp4" else 4)
        return Part(
            at + first * row,
            step * row,
            scales + first * scale if scales >= 0 else -1,
            step * scale if scales >= 0 else 0,
            bias + first * bias_bytes if bias >= 0 else -1,
            step * bias_bytes if bias >= 0 else 0,
        )

    gate_up = packed.gate_up, packed.gate_up_scale, packed.gate_up_bias, packed.hidden
    return BlockLayout(
        _NAMES[packed.format],
        packed.hidden,
        width,
        gate=part(*gate_up, 0, pace),
        up=part(*gate_up, second, pace),
        down=part(packed.down, packed.down_scale, packed.down_bias, width),
        block_bytes=packed.bytes,
        activation=shape.activation,
        alpha=shape.swiglu_alpha,
        limit=shape.swiglu_limit,
        bias_bytes=bias_bytes,
        tile=packed.tile,
    )
