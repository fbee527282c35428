"""Grouped expert kernels over slot addresses, for any number of tokens per expert.

A *plan* is int64 [groups, 4]: slot address (0: nothing to do), first item, items. An *item* is token * k + rank;
`items` lists those of each group. `gate_up` writes the activated products mid [items, width], `down` the outputs out
[items, hidden], both fp32. Each item is computed by the same instructions whatever else is in its group, so its bits
depend neither on the plan nor on the number of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreload.backend.cuda.kernels.hold import follow, turn_of, words_of


@triton.jit
def _e2m1(code: tl.tensor) -> tl.tensor:
    """Values of 4-bit floats: sign, 2 exponent bits, 1 mantissa bit."""
    exponent = (code >> 1) & 3
    mantissa = (code & 1).to(tl.float32)
    power = (1 << exponent).to(tl.float32)
    size = tl.where(exponent == 0, 0.5 * mantissa, (0.5 + 0.25 * mantissa) * power)
    return tl.where((code & 8) != 0, -size, size)


@triton.jit
def _packed_products(
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    x: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
) -> tl.tensor:
    """[ROWS]: mxfp4 rows times x. Two columns a byte, the even one low; a scale byte for every 32 columns."""
    HALF: tl.constexpr = COLS // 2
    codes = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN) + AT
    scales = address.to(tl.pointer_type(tl.uint8)) + SCALES
    total = tl.zeros([ROWS, HALF], tl.float32)
    for at in range(0, WIDTH // 2, HALF):
        byte = at + tl.arange(0, HALF)
        inside = byte < WIDTH // 2
        mask = inside_rows[:, None] & inside[None, :]
        even = tl.load(x + 2 * byte, mask=inside, other=0.0).to(tl.float32)
        odd = tl.load(x + 2 * byte + 1, mask=inside, other=0.0).to(tl.float32)
        packed = tl.load(codes + (rows * STRIDE)[:, None] + byte[None, :], mask=mask, other=0).to(tl.int32)
        power = tl.load(scales + (rows * SCALE_STRIDE)[:, None] + (byte // 16)[None, :], mask=mask, other=0)
        scale = tl.exp2(power.to(tl.float32) - 127.0)
        total += scale * (_e2m1(packed & 15) * even[None, :] + _e2m1(packed >> 4) * odd[None, :])
    return tl.sum(total, axis=1)


@triton.jit
def _float_products(
    weights: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    x: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """[ROWS]: rows of `weights`, STEP elements apart, times x; TILE > 0: every TILE columns times their scale."""
    total = tl.zeros([ROWS, COLS], tl.float32)
    for at in range(0, WIDTH, COLS):
        cols = at + tl.arange(0, COLS)
        inside = cols < WIDTH
        part = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
        mask = inside_rows[:, None] & inside[None, :]
        block = tl.load(weights + (rows * STEP)[:, None] + cols[None, :], mask=mask, other=0.0)
        if TILE > 0:
            scale = tl.load(scales + (rows * SCALE_STEP)[:, None] + (cols // TILE)[None, :], mask=mask, other=0.0)
            total += scale * (block.to(tl.float32) * part[None, :])
        else:
            total += block.to(tl.float32) * part[None, :]
    return tl.sum(total, axis=1)


@triton.jit
def _products(
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    x: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    FORMAT: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """[ROWS] fp32: rows of one matrix of the block at `address` times x [WIDTH], scaled, plus bias."""
    scales = address.to(tl.pointer_type(tl.float32)) + SCALES // 4
    if FORMAT == "mxfp4":
        found = _packed_products(
            address, rows, inside_rows, x, WIDTH, ROWS, COLS, ALIGN, AT, STRIDE, SCALES, SCALE_STRIDE
        )
    elif FORMAT == "float32":
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), ALIGN) + AT // 4
        found = _float_products(weights, scales, rows, inside_rows, x, WIDTH, ROWS, COLS, STRIDE // 4, 0, 0)
    elif FORMAT == "bfloat16":
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), ALIGN) + AT // 2
        found = _float_products(weights, scales, rows, inside_rows, x, WIDTH, ROWS, COLS, STRIDE // 2, 0, 0)
    elif FORMAT == "fp8" or FORMAT == "fp8_tile":
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.float8e4nv)), ALIGN) + AT
        found = _float_products(
            weights, scales, rows, inside_rows, x, WIDTH, ROWS, COLS, STRIDE, SCALE_STRIDE // 4, TILE
        )
    else:
        weights = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), ALIGN) + AT
        found = _float_products(weights, scales, rows, inside_rows, x, WIDTH, ROWS, COLS, STRIDE, 0, 0)
    if FORMAT == "fp8" or FORMAT == "int8":
        found *= tl.load(scales + rows * (SCALE_STRIDE // 4), mask=inside_rows, other=0.0)
    if BIAS >= 0:
        if BIAS_BYTES == 4:
            biases = address.to(tl.pointer_type(tl.float32)) + BIAS // 4 + rows * (BIAS_STRIDE // 4)
            found += tl.load(biases, mask=inside_rows, other=0.0)
        else:
            narrow = address.to(tl.pointer_type(tl.bfloat16)) + BIAS // 2 + rows * (BIAS_STRIDE // 2)
            found += tl.load(narrow, mask=inside_rows, other=0.0).to(tl.float32)
    return found


@triton.jit
def _activated(
    gate: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """silu(gate) * up, or the clamped form of GPT-OSS: (up + 1) * gate * sigmoid(ALPHA gate)."""
    if ACTIVATION == "silu":
        return up * gate * tl.sigmoid(gate)
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + 1.0) * gate * tl.sigmoid(ALPHA * gate)


@triton.jit
def gate_up(
    plan: tl.tensor,
    items: tl.tensor,
    x: tl.tensor,
    mid: tl.tensor,
    ENTRY: tl.constexpr,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
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
    PDL: tl.constexpr,
) -> None:
    """Program (group, row tile): activated rows of mid for every item of the group."""
    follow(PDL, True)
    group, tile = tl.program_id(0), tl.program_id(1)
    address = tl.load(plan + group * ENTRY)
    if address != 0:
        first = tl.load(plan + group * ENTRY + 1)
        count = tl.load(plan + group * ENTRY + 2)
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = rows < WIDTH
        for at in range(first, first + count):
            item = tl.load(items + at)
            row = x + (item // K) * HIDDEN
            gate = _products(
                address, rows, inside, row, HIDDEN, ROWS, COLS, ALIGN, FORMAT, GATE, STRIDE, GATE_SCALES, SCALE_STRIDE,
                GATE_BIAS, BIAS_STRIDE, BIAS_BYTES, TILE,
            )  # fmt: skip
            up = _products(
                address, rows, inside, row, HIDDEN, ROWS, COLS, ALIGN, FORMAT, UP, STRIDE, UP_SCALES, SCALE_STRIDE,
                UP_BIAS, BIAS_STRIDE, BIAS_BYTES, TILE,
            )  # fmt: skip
            tl.store(mid + item * WIDTH + rows, _activated(gate, up, ACTIVATION, ALPHA, LIMIT), mask=inside)


@triton.jit
def down(
    plan: tl.tensor,
    items: tl.tensor,
    mid: tl.tensor,
    out: tl.tensor,
    ENTRY: tl.constexpr,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
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
    PDL: tl.constexpr,
) -> None:
    """Program (group, row tile): unweighted output rows of every item of the group."""
    follow(PDL, True)
    group, tile = tl.program_id(0), tl.program_id(1)
    address = tl.load(plan + group * ENTRY)
    if address != 0:
        first = tl.load(plan + group * ENTRY + 1)
        count = tl.load(plan + group * ENTRY + 2)
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = rows < HIDDEN
        for at in range(first, first + count):
            item = tl.load(items + at)
            found = _products(
                address, rows, inside, mid + item * WIDTH, WIDTH, ROWS, COLS, ALIGN, FORMAT, DOWN, STRIDE, SCALES,
                SCALE_STRIDE, BIAS, BIAS_STRIDE, BIAS_BYTES, TILE,
            )  # fmt: skip
            tl.store(out + item * HIDDEN + rows, found, mask=inside)


@triton.jit(do_not_specialize=["LAYER"])
def combine(
    r: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    host_out: tl.tensor,
    on_host: tl.tensor,
    current: tl.tensor,
    x: tl.tensor,
    LAYER: int,
    LAYERS: tl.constexpr,
    K: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLS: tl.constexpr,
    HOST: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (token, column tile): x = r + sum over ranks, in rank order, of weight * output, in fp32.

    Items whose `on_host` [items] is set are left out: for tokens that have one the host's sum of them comes last, read
    from its words `host_out` int64 [n, HIDDEN] once they are of this turn (`turn_of`), or later.
    """
    follow(PDL, not HOST)
    token, tile = tl.program_id(0), tl.program_id(1)
    cols = tile * COLS + tl.arange(0, COLS)
    inside = cols < HIDDEN
    total, theirs = tl.zeros([COLS], tl.float32), token * 0
    for rank in tl.static_range(K):  # unrolled, so that all loads are under way at once
        item = token * K + rank
        here = inside
        if HOST:
            there = tl.load(on_host + item).to(tl.int32)
            theirs += there
            here = inside & (there + 0 * cols == 0)
        total += tl.load(weights + item) * tl.load(out + item * HIDDEN + cols, mask=here, other=0.0)
    if HOST:  # noqa: SIM102 - this is known when the kernel is compiled
        if theirs > 0:
            turn = turn_of(current, LAYER, LAYERS)
            words = words_of(host_out + token * HIDDEN + cols, inside, turn)
            total += words.to(tl.int32).to(tl.float32, bitcast=True)
    residual = tl.load(r + token * HIDDEN + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + token * HIDDEN + cols, (residual + total).to(x.dtype.element_ty), mask=inside)
