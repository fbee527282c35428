"""Where the parts of an expert block lie, in bytes from the slot's address, as the kernels read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foreload.shape import ModelShape

Format = Literal["float32", "bfloat16", "fp8", "int8", "mxfp4"]
FORMATS: tuple[Format, ...] = ("float32", "bfloat16", "fp8", "int8", "mxfp4")
Activation = Literal["silu", "swiglu_oai"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "swiglu_oai")

ENTRY = 4
"""Words (int64) of a plan entry: slot address (0: none), first item, items, unused (keeps entries 32 bytes apart)."""


@dataclass(frozen=True)
class Part:
    """One matrix of a block, rows x columns: `at` + row * `stride` is a row, its scales and bias likewise.

    Scales are one per row (fp8, int8: float32) or one per 32 columns (mxfp4: a byte, 2**(byte - 127)); -1: none.
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

    @property
    def aligned(self) -> bool:
        """Whether every row starts at a multiple of 16 bytes, so that rows are read 16 bytes at a time."""
        numbers = [self.block_bytes]
        for part in (self.gate, self.up, self.down):
            numbers += [part.at, part.stride]
        return all(number % 16 == 0 for number in numbers)


def float_layout(shape: ModelShape, dtype: Literal["float32", "bfloat16"]) -> BlockLayout:
    """A block of plain weights as the slab holds it (`experts.slab.block_views`).

    gate_up, down, then the biases of both; gate rows before up rows, or by turns if the activation is clamped.
    """
    size: Literal[2, 4] = 4 if dtype == "float32" else 2
    hidden, width = shape.hidden, shape.expert_width
    row, matrix = hidden * size, hidden * width * size
    turns = shape.activation == "swiglu_oai"
    pace, second, next_bias = (2, row, size) if turns else (1, matrix, width * size)
    bias = 3 * matrix if shape.expert_bias else -1
    up_bias, down_bias = (bias + next_bias, bias + 2 * width * size) if shape.expert_bias else (-1, -1)
    return BlockLayout(
        dtype,
        hidden,
        width,
        gate=Part(0, pace * row, bias=bias, bias_stride=pace * size),
        up=Part(second, pace * row, bias=up_bias, bias_stride=pace * size),
        down=Part(2 * matrix, width * size, bias=down_bias, bias_stride=size),
        block_bytes=shape.expert_bytes(dtype),
        activation=shape.activation,
        alpha=shape.swiglu_alpha,
        limit=shape.swiglu_limit,
        bias_bytes=size,
    )
