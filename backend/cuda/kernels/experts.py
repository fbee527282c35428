"""Grouped expert kernels over slot addresses, for any number of tokens per expert; shared experts.

A *plan* is int64 [groups, 4]: slot address (0: nothing to do), first item, items. An *item* is token * k + rank;
`items` lists those of each group. `gate_up` writes the activated products mid [items, width], `down` the outputs out
[items, hidden], both fp32. Each item is computed by the same instructions whatever else is in its group, so its bits
depend neither on the plan nor on the number of tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreload.backend.cuda.kernels.dense import fetch
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
def _coded(packed: tl.tensor, parts: tl.tuple) -> tl.tensor:
    """[words]: e2m1 codes [words], eight a word, the first lowest, times x, eight parts [words].

    A code's three lower bits are exponent and mantissa. As the last exponent bits and the first of the mantissa of a
    bfloat16 they are the number times 2**-126, its subnormal ones (0 and 0.5) included. Four codes apart are made at
    once, the two halves of a word, each of which is a float32's upper one.
    """
    found = tl.zeros(packed.shape, tl.float32)
    for n in tl.static_range(4):
        size = packed << (6 - 4 * n) if n < 2 else packed >> (4 * n - 6)
        both = (size & 0x01C001C0) | ((packed << (12 - 4 * n)) & -0x7FFF8000)
        found += (both << 16).to(tl.float32, bitcast=True) * parts[n]
        found += (both & -0x10000).to(tl.float32, bitcast=True) * parts[n + 4]
    return found


@triton.jit
def _four(x: tl.tensor, inside: tl.tensor, SCALE: tl.constexpr = 1.0) -> tl.tuple:
    """Four numbers at each address [words], times SCALE: four tensors [words]."""
    found = tl.load(x[:, None] + tl.arange(0, 4)[None, :], mask=inside[:, None], other=0.0)
    even, odd = tl.split(tl.reshape(found.to(tl.float32) * SCALE, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _coded_products(
    address: tl.tensor,
    first: tl.tensor,
    x: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ALIGN: tl.constexpr,
    STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    AT: tl.constexpr,
    SCALES: tl.constexpr,
    OTHER_AT: tl.constexpr,
    OTHER_SCALES: tl.constexpr,
) -> tl.tuple:
    """[ROWS], [ROWS]: mxfp4 rows from `first` on of a matrix, HEIGHT x WIDTH, times x; of another (OTHER_AT >= 0), too.

    A thread has words of eight codes, its neighbour the next, and the x of its words in registers, which all rows need:
    whatever is read is read by neighbours side by side. x is multiplied by 2**64, so that no product is subnormal; the
    scales, a byte for 32 columns, make up for that.
    """
    UP: tl.constexpr = 18446744073709551616.0
    WORDS: tl.constexpr = COLS // 8
    EACH: tl.constexpr = ROWS if OTHER_AT < 0 else 2 * ROWS
    codes = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGN)
    scales = address.to(tl.pointer_type(tl.uint8))
    none = (address >> 63).to(tl.int32)  # 0, but the compiler does not know, or it would give a thread four words
    totals = ()
    for _ in tl.static_range(EACH):
        totals = totals + (tl.zeros([WORDS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for at in range(0, WIDTH // 8, WORDS):
        word = at + (tl.arange(0, WORDS) ^ none)
        inside = tl.full([WORDS], True, tl.int1) if WIDTH % COLS == 0 else word < WIDTH // 8
        parts = _four(x + word * 8, inside, UP) + _four(x + word * 8 + 4, inside, UP)
        more = ()
        for each in tl.static_range(EACH):
            row = first + each % ROWS
            here = inside if HEIGHT % ROWS == 0 else inside & (row + tl.zeros([WORDS], tl.int32) < HEIGHT)
            start = AT // 4 if each < ROWS else OTHER_AT // 4
            packed = tl.load(codes + start + row * (STRIDE // 4) + word, mask=here, other=0)
            place = (SCALES if each < ROWS else OTHER_SCALES) + row * SCALE_STRIDE + word // 4
            power = tl.load(scales + place, mask=here, other=0).to(tl.int32)
            scale = (tl.minimum(power + 62, 255) << 23).to(tl.float32, bitcast=True)  # 2**(power - 127 + 126 - 64)
            more = more + (totals[each] + scale * _coded(packed, parts),)  # type: ignore[assignment]  # noqa: RUF005
        totals = more
    found, other = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for each in tl.static_range(EACH):
        mine = tl.arange(0, ROWS) == each % ROWS
        if each < ROWS:
            found = tl.where(mine, tl.sum(totals[each], axis=0), found)
        else:
            other = tl.where(mine, tl.sum(totals[each], axis=0), other)
    return found, other


@triton.jit
def bf12_block(
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    cols: tl.tensor,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """[rows, cols] fp32: weights of a bf12 matrix (`foreload.formats`); outliers are 0, `outliers` has them."""
    mask = inside_rows[:, None] & (cols < WIDTH)[None, :]
    signed = tl.multiple_of(address.to(tl.pointer_type(tl.int8)), ALIGN) + AT
    coded = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), ALIGN) + AT
    base = tl.load(coded + rows * STRIDE, mask=inside_rows, other=0).to(tl.int32)
    chunk = 48 + cols // 32 * 48
    low = tl.load(signed + (rows * STRIDE)[:, None] + (chunk + 16 + cols % 32)[None, :], mask=mask, other=0)
    pairs = tl.load(coded + (rows * STRIDE)[:, None] + (chunk + cols % 16)[None, :], mask=mask, other=0)
    code = (pairs.to(tl.int32) >> (cols // 16 % 2 * 4)[None, :]) & 15
    exponent = tl.where(code == 0, 0, code + (base[:, None] - 15))
    bits = ((low.to(tl.int32) << 16) & -0x7F810000) | (exponent << 23)  # sign and mantissa: 0x807F0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def outliers(
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    each: tl.tensor,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    AT: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Columns int32 and values fp32 of entries `each` of the headers of bf12 rows, WIDTH wide; values are 0 where a row
    has fewer, and in a poisoned block.
    """
    mask = inside_rows & (each < 11)
    words = (
        tl.multiple_of(address.to(tl.pointer_type(tl.uint16)), ALIGN) + AT // 2 + rows * (STRIDE // 2) + 2 + 2 * each
    )
    column = tl.load(words, mask=mask, other=0).to(tl.int32)
    value = tl.where(column < WIDTH, tl.load(words + 1, mask=mask, other=0).to(tl.int32) << 16, 0)
    return column, value.to(tl.float32, bitcast=True)


@triton.jit
def _bf12_products(
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
) -> tl.tensor:
    """[ROWS]: rows of a bf12 matrix times x, four weights of a word at once; what is in a row's header comes last.

    The bytes of `exponent` are code + base, or 0 of code 0, those of `low` and `high` halves of bfloat16 numbers; two
    of these make a word again, each of which is a float32's upper half.
    """
    WORDS: tl.constexpr = COLS // 4
    each = tl.arange(0, 16)
    column, value = outliers(address, rows[:, None], inside_rows[:, None], each[None, :], WIDTH, ALIGN, AT, STRIDE)
    words = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), ALIGN) + AT // 4
    start = (rows * (STRIDE // 4))[:, None]
    base = (tl.load(words + rows * (STRIDE // 4), mask=inside_rows, other=0) & 255)[:, None] - 15
    total = tl.zeros([ROWS, WORDS], tl.float32)
    for at in range(0, WIDTH // 4, WORDS):
        word = at + tl.arange(0, WORDS)
        mask = inside_rows[:, None] & (word < WIDTH // 4)[None, :]
        chunk = 12 + word // 8 * 12
        signed = tl.load(words + start + (chunk + 4 + word % 8)[None, :], mask=mask, other=0)
        pairs = tl.load(words + start + (chunk + word % 4)[None, :], mask=mask, other=0)
        code = (pairs >> (word // 4 % 2 * 4)[None, :]) & 0x0F0F0F0F
        exponent = code + (((code + 0x7F7F7F7F) >> 7) & 0x01010101) * base
        low = ((exponent << 7) & -0x7F7F7F80) | (signed & 0x7F7F7F7F)
        high = ((exponent >> 1) & 0x7F7F7F7F) | (signed & -0x7F7F7F80)
        even = (low & 0x00FF00FF) | ((high << 8) & -0x00FF0100)
        odd = ((low >> 8) & 0x00FF00FF) | (high & -0x00FF0100)
        first, second, third, fourth = _four(x + word * 4, word < WIDTH // 4)
        total += (even << 16).to(tl.float32, bitcast=True) * first[None, :]
        total += (odd << 16).to(tl.float32, bitcast=True) * second[None, :]
        total += (even & -0x10000).to(tl.float32, bitcast=True) * third[None, :]
        total += (odd & -0x10000).to(tl.float32, bitcast=True) * fourth[None, :]
    far = tl.load(x + column, mask=value != 0.0, other=0.0).to(tl.float32)
    return tl.sum(total, axis=1) + tl.sum(far * value, axis=1)


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
    TILE: tl.constexpr,
) -> tl.tensor:
    """[ROWS] fp32: rows of one matrix of the block at `address` times x [WIDTH], scaled."""
    scales = address.to(tl.pointer_type(tl.float32)) + SCALES // 4
    if FORMAT == "bf12":
        found = _bf12_products(address, rows, inside_rows, x, WIDTH, ROWS, COLS, ALIGN, AT, STRIDE)
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
    return found


@triton.jit
def _biases(
    address: tl.tensor,
    rows: tl.tensor,
    inside_rows: tl.tensor,
    BIAS: tl.constexpr,
    BIAS_STRIDE: tl.constexpr,
    BIAS_BYTES: tl.constexpr,
) -> tl.tensor:
    """[ROWS] fp32: what is added to those rows' products; zeros if there is none (BIAS below 0)."""
    if BIAS < 0:
        found = tl.zeros(rows.shape, tl.float32)
    elif BIAS_BYTES == 4:
        biases = address.to(tl.pointer_type(tl.float32)) + BIAS // 4 + rows * (BIAS_STRIDE // 4)
        found = tl.load(biases, mask=inside_rows, other=0.0)
    else:
        narrow = address.to(tl.pointer_type(tl.bfloat16)) + BIAS // 2 + rows * (BIAS_STRIDE // 2)
        found = tl.load(narrow, mask=inside_rows, other=0.0).to(tl.float32)
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
            if FORMAT == "mxfp4":
                gate, up = _coded_products(
                    address, tile * ROWS, row, WIDTH, HIDDEN, ROWS, COLS, ALIGN, STRIDE, SCALE_STRIDE, GATE,
                    GATE_SCALES, UP, UP_SCALES,
                )  # fmt: skip
            else:
                gate = _products(
                    address, rows, inside, row, HIDDEN, ROWS, COLS, ALIGN, FORMAT, GATE, STRIDE, GATE_SCALES,
                    SCALE_STRIDE, TILE,
                )  # fmt: skip
                up = _products(
                    address, rows, inside, row, HIDDEN, ROWS, COLS, ALIGN, FORMAT, UP, STRIDE, UP_SCALES, SCALE_STRIDE,
                    TILE,
                )  # fmt: skip
            gate += _biases(address, rows, inside, GATE_BIAS, BIAS_STRIDE, BIAS_BYTES)
            up += _biases(address, rows, inside, UP_BIAS, BIAS_STRIDE, BIAS_BYTES)
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
            if FORMAT == "mxfp4":
                found, _ = _coded_products(
                    address, tile * ROWS, mid + item * WIDTH, HIDDEN, WIDTH, ROWS, COLS, ALIGN, STRIDE, SCALE_STRIDE,
                    DOWN, SCALES, -1, -1,
                )  # fmt: skip
            else:
                found = _products(
                    address, rows, inside, mid + item * WIDTH, WIDTH, ROWS, COLS, ALIGN, FORMAT, DOWN, STRIDE, SCALES,
                    SCALE_STRIDE, TILE,
                )  # fmt: skip
            found += _biases(address, rows, inside, BIAS, BIAS_STRIDE, BIAS_BYTES)
            tl.store(out + item * HIDDEN + rows, found, mask=inside)


@triton.jit(do_not_specialize=["N"])
def shared_gate_up(
    x: tl.tensor,
    gate_up: tl.tensor,
    switch: tl.tensor,
    mid: tl.tensor,
    N: int,
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SWITCH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile): mid [N, WIDTH] fp32 = silu(gate x) * up x for all tokens x [N, HIDDEN].

    gate_up [2 WIDTH, HIDDEN]: the rows of gate, then those of up. SWITCH: times sigmoid(switch x), switch [1, HIDDEN].
    """
    tile = tl.program_id(0)
    if PDL:
        fetch(gate_up, tile * ROWS, ROWS, HIDDEN, 2 * WIDTH)
        fetch(gate_up, tile * ROWS + WIDTH, ROWS, HIDDEN, 2 * WIDTH)
    follow(PDL, True)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = rows < WIDTH
    for token in range(N):
        row = x + token * HIDDEN
        gate = _float_products(gate_up, gate_up, rows, inside, row, HIDDEN, ROWS, COLS, HIDDEN, 0, 0)
        up = _float_products(gate_up + WIDTH * HIDDEN, gate_up, rows, inside, row, HIDDEN, ROWS, COLS, HIDDEN, 0, 0)
        found = _activated(gate, up, "silu", 0.0, 0.0)
        if SWITCH:
            first = tl.arange(0, 1)
            found *= tl.sigmoid(_float_products(switch, switch, first, first == 0, row, HIDDEN, 1, COLS, HIDDEN, 0, 0))
        tl.store(mid + token * WIDTH + rows, found, mask=inside)


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
