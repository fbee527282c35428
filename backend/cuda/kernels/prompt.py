"""Expert kernels of prompt chunks: tiles of tokens on tensor cores, over slot addresses.

A *plan* is int64 [tiles, 4]: slot address, first item, items; every TOKENS items of an expert have an entry. An *item*
is token * k + rank; `items` lists those of each entry. Products are summed in fp32, column block by column block, and
every tile is computed by the same instructions whatever it holds, so that an item's bits depend neither on the other
items of its tile nor on the plan. `mid` [items, width] and `out` [items, hidden] are of the activations' type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreload.backend.cuda.kernels.experts import _activated, _e2m1, bf12_block, outliers


@triton.jit(do_not_specialize=["WORDS"])
def bring(given: tl.tensor, there: tl.tensor, WORDS: int, BLOCK: tl.constexpr) -> None:
    """Program (block): int64 words of host memory, which programs of other kernels would each wait for, to `there`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(there + at, tl.load(given + at, mask=at < WORDS), mask=at < WORDS)


@triton.jit
def _packed_block(
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    at: tl.tensor,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
) -> tl.tensor:
    """[rows, COLS] fp32: mxfp4 weights of columns `at`.. ; two columns a byte, the even one low."""
    byte = at // 2 + tl.arange(0, COLS // 2)
    mask = inside_rows[:, None] & (byte < WIDTH // 2)[None, :]
    codes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN) + AT
    packed = tl.load(codes + (rows * STRIDE)[:, None] + byte[None, :], mask=mask, other=0).to(tl.int32)
    powers = address.to(tl.pointer_type(tl.uint8)) + SCALES
    power = tl.load(powers + (rows * SCALE_STRIDE)[:, None] + (byte // 16)[None, :], mask=mask, other=0)
    scale = tl.exp2(power.to(tl.float32) - 127.0)
    return tl.interleave(scale * _e2m1(packed & 15), scale * _e2m1(packed >> 4))


@triton.jit
def _block(
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    at: tl.tensor,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
) -> tl.tensor:
    """[rows, COLS]: weights of columns `at`.. before scales of rows and tiles; of int8, mxfp4 and bf12 in fp32."""
    cols = at + tl.arange(0, COLS)
    mask = inside_rows[:, None] & (cols < WIDTH)[None, :]
    if FORMAT == "mxfp4":
        found = _packed_block(address, rows, inside_rows, at, WIDTH, COLS, ALIGN, AT, STRIDE, SCALES, SCALE_STRIDE)
    elif FORMAT == "bf12":
        found = bf12_block(address, rows, inside_rows, cols, WIDTH, ALIGN, AT, STRIDE)
    elif FORMAT == "float32":
        wide = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGN) + AT // 4
        found = tl.load(wide + (rows * (STRIDE // 4))[:, None] + cols[None, :], mask=mask, other=0.0)
    elif FORMAT == "bfloat16":
        half = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), ALIGN) + AT // 2
        found = tl.load(half + (rows * (STRIDE // 2))[:, None] + cols[None, :], mask=mask, other=0.0)
    elif FORMAT == "int8":
        whole = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), ALIGN) + AT
        found = tl.load(whole + (rows * STRIDE)[:, None] + cols[None, :], mask=mask, other=0).to(tl.float32)
    else:
        small = tl.multiple_of(address.to(tl.pointer_type(tl.float8e4nv)), ALIGN) + AT
        found = tl.load(small + (rows * STRIDE)[:, None] + cols[None, :], mask=mask, other=0.0)
    return found


@triton.jit
def _add_products(
    total: tl.tensor,
    x: tl.tensor,
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    at: tl.tensor,
    WIDTH: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    PLAIN: tl.constexpr,
) -> tl.tensor:
    """total [tokens, rows] + x [tokens, COLS] times the rows' columns `at`.. ; a scale of tiles is one per COLS.

    PLAIN: products one by one: Triton's interpreter has none of bfloat16, and bits of its others depend on company.
    """
    w = _block(
        address, rows, inside_rows, at, WIDTH, COLS, ALIGN, FORMAT, AT, STRIDE, SCALES, SCALE_STRIDE
    ).to(x.dtype)  # fmt: skip
    if TILE == 0 and not PLAIN:
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    else:
        if PLAIN:
            found = tl.sum(x.to(tl.float32)[:, None, :] * w.to(tl.float32)[None, :, :], axis=2)
        else:
            found = tl.dot(x, tl.trans(w), input_precision="ieee")
        if TILE > 0:
            scales = address.to(tl.pointer_type(tl.float32)) + SCALES // 4
            found *= tl.load(scales + rows * (SCALE_STRIDE // 4) + at // TILE, mask=inside_rows, other=0.0)[None, :]
        total += found
    return total


@triton.jit
def _finished(
    total: tl.tensor,
    inputs: tl.tensor,
    used: tl.tensor,
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
) -> tl.tensor:
    """total [tokens, rows] times the rows' scales, plus their bias; of bf12 with the products of `inputs` [tokens, 1],
    where each begins, with what is in the rows' headers.
    """
    if FORMAT == "bf12":
        heads = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN) + AT + 1
        most = tl.max(tl.load(heads + rows * STRIDE, mask=inside_rows, other=0).to(tl.int32), axis=0)
        for each in range(tl.minimum(most, 11)):
            column, value = outliers(address, rows, inside_rows, each, WIDTH, ALIGN, AT, STRIDE)
            mask = used[:, None] & (value != 0.0)[None, :]
            total += tl.load(inputs + column[None, :], mask=mask, other=0.0).to(tl.float32) * value[None, :]
    if FORMAT == "fp8" or FORMAT == "int8":
        scales = address.to(tl.pointer_type(tl.float32)) + SCALES // 4
        total *= tl.load(scales + rows * (SCALE_STRIDE // 4), mask=inside_rows, other=0.0)[None, :]
    if BIAS >= 0:
        if BIAS_BYTES == 4:
            biases = address.to(tl.pointer_type(tl.float32)) + BIAS // 4 + rows * (BIAS_STRIDE // 4)
            total += tl.load(biases, mask=inside_rows, other=0.0)[None, :]
        else:
            narrow = address.to(tl.pointer_type(tl.bfloat16)) + BIAS // 2 + rows * (BIAS_STRIDE // 2)
            total += tl.load(narrow, mask=inside_rows, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _entry(
    plan: tl.tensor, items: tl.tensor, ENTRY: tl.constexpr, TOKENS: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Slot address, items [TOKENS] and which of them there are, of the program's plan entry."""
    entry = plan + tl.program_id(1) * ENTRY
    address, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    token = tl.arange(0, TOKENS)
    used = token < count
    return address, tl.load(items + first + token, mask=used, other=0), used


@triton.jit
def gate_up_tiles(
    plan: tl.tensor,
    items: tl.tensor,
    x: tl.tensor,
    mid: tl.tensor,
    ENTRY: tl.constexpr,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    STRIDE: tl.constexpr,
    GATE_SCALES: tl.constexpr,
    UP_SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """Program (row tile, plan entry): activated rows of mid for the entry's items, from x [n, HIDDEN]."""
    address, item, used = _entry(plan, items, ENTRY, TOKENS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < WIDTH
    gate = tl.zeros([TOKENS, ROWS], tl.float32)
    up = tl.zeros([TOKENS, ROWS], tl.float32)
    inputs = x + (item // K)[:, None] * HIDDEN
    for at in range(0, HIDDEN, COLS):
        cols = at + tl.arange(0, COLS)
        part = tl.load(inputs + cols[None, :], mask=used[:, None] & (cols < HIDDEN)[None, :], other=0.0)
        gate = _add_products(
            gate, part, address, rows, inside, at, HIDDEN, COLS, ALIGN, FORMAT, GATE, STRIDE, GATE_SCALES,
            SCALE_STRIDE, TILE, PLAIN,
        )  # fmt: skip
        up = _add_products(
            up, part, address, rows, inside, at, HIDDEN, COLS, ALIGN, FORMAT, UP, STRIDE, UP_SCALES,
            SCALE_STRIDE, TILE, PLAIN,
        )  # fmt: skip
    gate = _finished(
        gate, inputs, used, address, rows, inside, HIDDEN, ALIGN, FORMAT, GATE, STRIDE, GATE_SCALES, SCALE_STRIDE,
        GATE_BIAS, BIAS_STRIDE, BIAS_BYTES,
    )  # fmt: skip
    up = _finished(
        up, inputs, used, address, rows, inside, HIDDEN, ALIGN, FORMAT, UP, STRIDE, UP_SCALES, SCALE_STRIDE, UP_BIAS,
        BIAS_STRIDE, BIAS_BYTES,
    )  # fmt: skip
    found = _activated(gate, up, ACTIVATION, ALPHA, LIMIT).to(mid.dtype.element_ty)
    tl.store(mid + item[:, None] * WIDTH + rows[None, :], found, mask=used[:, None] & inside[None, :])


@triton.jit
def down_tiles(
    plan: tl.tensor,
    items: tl.tensor,
    mid: tl.tensor,
    out: tl.tensor,
    ENTRY: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    DOWN: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    TILE: tl.constexpr,
    PLAIN: tl.constexpr,
) -> None:
    """Program (row tile, plan entry): unweighted output rows of the entry's items."""
    address, item, used = _entry(plan, items, ENTRY, TOKENS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < HIDDEN
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    inputs = mid + item[:, None] * WIDTH
    for at in range(0, WIDTH, COLS):
        cols = at + tl.arange(0, COLS)
        part = tl.load(inputs + cols[None, :], mask=used[:, None] & (cols < WIDTH)[None, :], other=0.0)
        total = _add_products(
            total, part, address, rows, inside, at, WIDTH, COLS, ALIGN, FORMAT, DOWN, STRIDE, SCALES,
            SCALE_STRIDE, TILE, PLAIN,
        )  # fmt: skip
    total = _finished(
        total, inputs, used, address, rows, inside, WIDTH, ALIGN, FORMAT, DOWN, STRIDE, SCALES, SCALE_STRIDE, BIAS,
        BIAS_STRIDE, BIAS_BYTES,
    )  # fmt: skip
    where = out + item[:, None] * HIDDEN + rows[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=used[:, None] & inside[None, :])


@triton.jit
def weigh(
    r: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    x: tl.tensor,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLS: tl.constexpr,
) -> None:
    """Program (token, column tile): x = r + weight * output of the token's items, in rank order, in fp32."""
    token, cols = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = cols < HIDDEN
    total = tl.zeros([COLS], tl.float32)
    for rank in range(K):
        found = tl.load(out + (token * K + rank) * HIDDEN + cols, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + token * K + rank) * found
    total += tl.load(r + token * HIDDEN + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + token * HIDDEN + cols, total.to(x.dtype.element_ty), mask=inside)
