"""Expert blocks of every format with random contents."""

from __future__ import annotations

import torch
from torch import Tensor

from foreload import formats
from foreload.backend.cuda.kernels.layout import BlockLayout, Format, Part
from foreload.backend.experts.packing import pack_rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
DTYPES["fp8_tile"] = DTYPES["fp8"]
TILE = 48


def row_bytes(format_: Format, columns: int) -> int:
    """Bytes of a row of weights."""
    if format_ == "bf12":
        return formats.row_bytes(format_, columns)
    return columns // 2 if format_ == "mxfp4" else columns * DTYPES[format_].itemsize


def any_layout(
    format_: Format, hidden: int, width: int, biases: bool = False, interleaved: bool = False, **fields: object
) -> BlockLayout:
    """Gate and up (row by row if `interleaved`), down; then scales, then biases."""
    at = 0

    def take(rows: int, size: int) -> int:
        nonlocal at
        start, at = at, at + -(-rows * size // 16) * 16
        return start

    wide, tall = row_bytes(format_, hidden), row_bytes(format_, width)
    both, last = take(2 * width, wide), take(hidden, tall)
    stride, second = (2 * wide, wide) if interleaved else (wide, width * wide)
    tiles = (4 * -(-hidden // TILE), 4 * -(-width // TILE))
    sizes = {"fp8": (4, 4), "int8": (4, 4), "mxfp4": (hidden // 32, width // 32), "fp8_tile": tiles}
    scale = sizes.get(format_, (0, 0))
    scales = (take(2 * width, scale[0]), take(hidden, scale[1])) if scale[0] else (-1, -1)
    bias = (take(2 * width, 4), take(hidden, 4)) if biases else (-1, -1)
    pace = 2 if interleaved else 1

    def beside(start: int, size: int) -> int:
        """Where the up rows' numbers begin."""
        return -1 if start < 0 else start + (size if interleaved else width * size)

    return BlockLayout(
        format_,
        hidden,
        width,
        Part(both, stride, scales[0], pace * scale[0], bias[0], 4 * pace),
        Part(both + second, stride, beside(scales[0], scale[0]), pace * scale[0], beside(bias[0], 4), 4 * pace),
        Part(last, tall, scales[1], scale[1], bias[1], 4),
        block_bytes=at,
        tile=TILE if format_ == "fp8_tile" else 0,
        **fields,  # type: ignore[arg-type]
    )


def random_blocks(layout: BlockLayout, count: int, generator: torch.Generator) -> Tensor:
    """uint8 [count, block_bytes]: small weights, scales near 1/8."""
    blocks = torch.zeros(count, layout.block_bytes, dtype=torch.uint8)

    def put(block: Tensor, at: int, stride: int, values: Tensor) -> None:
        for row, value in enumerate(values):
            raw = value.contiguous().view(-1).view(torch.uint8)
            block[at + row * stride : at + row * stride + len(raw)] = raw

    for block in blocks:
        for part, rows, columns in (
            (layout.gate, layout.width, layout.hidden),
            (layout.up, layout.width, layout.hidden),
            (layout.down, layout.hidden, layout.width),
        ):
            weights = torch.randn(rows, columns, generator=generator)
            if layout.format == "mxfp4":
                codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
                put(block, part.at, part.stride, codes)
                powers = torch.randint(122, 126, (rows, columns // 32), generator=generator, dtype=torch.uint8)
                put(block, part.scales, part.scale_stride, powers)
            elif layout.format == "bf12":
                weights[:, ::29] = weights[:, ::29].sign() * 1e-9  # what is beside it in the headers counts
                weights[1] *= 1e-9
                weights[1, 3:9:2] = 8.0
                put(block, part.at, part.stride, pack_rows(weights / 8, "bf12")[0])
            elif layout.format == "int8":
                put(block, part.at, part.stride, (weights * 40).clamp(-127, 127).to(torch.int8))
            else:
                small = weights if layout.format in ("fp8", "fp8_tile") else weights / 8
                put(block, part.at, part.stride, small.to(DTYPES[layout.format]))
            if layout.format in ("fp8", "int8", "fp8_tile"):
                scale, tiles = 0.003 if layout.format == "int8" else 0.125, -(-columns // (layout.tile or columns))
                put(block, part.scales, part.scale_stride, scale * (0.5 + torch.rand(rows, tiles, generator=generator)))
            if part.bias >= 0:
                put(block, part.bias, part.bias_stride, torch.randn(rows, 1, generator=generator))
    return blocks
