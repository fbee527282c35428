"""Dense kernels of a decode step, for n rows at once: norm and projection, projection and residual, embedding.

A program multiplies its weights by several rows at once; each row is computed by the same instructions whatever n is.
Sums are fp32, in the order of the columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreload.backend.cuda.kernels.hold import follow


@triton.jit
def embed(
    given: tl.tensor,
    current: tl.tensor,
    table: tl.tensor,
    x: tl.tensor,
    HIDDEN: tl.constexpr,
    COLS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, column tile): x[row] = table[token]; the step's numbers move to device memory.

    given int32 [3 + n]: sequence number, position of the first row, replayed row, token ids (host memory); `current`
    holds its first three.
    """
    follow(PDL, True)
    row, tile = tl.program_id(0), tl.program_id(1)
    token = tl.load(given + 3 + row).to(tl.int64)
    cols = tile * COLS + tl.arange(0, COLS)
    inside = cols < HIDDEN
    tl.store(x + row * HIDDEN + cols, tl.load(table + token * HIDDEN + cols, mask=inside), mask=inside)
    if (row == 0) & (tile == 0):
        for at in range(3):
            tl.store(current + at, tl.load(given + at))


@triton.jit
def fetch(weights: tl.tensor, row: tl.tensor, ROWS: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr) -> None:
    """ROWS rows of `weights` [OUT, WIDTH] from `row` on begin to come into the L2 cache, in lines of 128 bytes.

    Nothing that a step computes decides which they are, so they come while the kernel before this one still runs.
    """
    LINE: tl.constexpr = 1024 // weights.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((ROWS * WIDTH + LINE - 1) // LINE)
    at = tl.minimum(tl.arange(0, LINES) * LINE, ROWS * WIDTH - 1)
    place = tl.minimum(row.to(tl.int64) * WIDTH + at, OUT * WIDTH - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [weights + place], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["N"])
def norm_linear(
    x: tl.tensor,
    norm: tl.tensor,
    weights: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    normed: tl.tensor,
    N: int,
    HIDDEN: tl.constexpr,
    STRIDE: tl.constexpr,
    OUT: tl.constexpr,
    EPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile of `weights`, TOGETHER rows of x): y [N, OUT] = weights @ rms_norm(x).

    x [N, HIDDEN], rows STRIDE apart. KEEP: the programs of the first tile write `normed`.
    """
    tile, first = tl.program_id(0), tl.program_id(1) * TOGETHER
    if PDL:
        fetch(weights, tile * ROWS, ROWS, HIDDEN, OUT)
    follow(PDL, True)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside_rows = rows < OUT
    scales, totals = (), ()
    for each in tl.static_range(TOGETHER):
        squares = tl.zeros([COLS], tl.float32)
        for at in range(0, HIDDEN, COLS):
            cols = at + tl.arange(0, COLS)
            mask = (cols < HIDDEN) & (first + each + 0 * cols < N)
            value = tl.load(x + (first + each) * STRIDE + cols, mask=mask, other=0.0).to(tl.float32)
            squares += value * value
        scales = scales + (tl.rsqrt(tl.sum(squares, axis=0) / HIDDEN + EPS),)  # type: ignore[assignment]  # noqa: RUF005
        totals = totals + (tl.zeros([ROWS, COLS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for at in range(0, HIDDEN, COLS):
        cols = at + tl.arange(0, COLS)
        inside = cols < HIDDEN
        mask = inside_rows[:, None] & inside[None, :]
        block = tl.load(weights + (rows.to(tl.int64) * HIDDEN)[:, None] + cols[None, :], mask=mask, other=0.0)
        more = ()
        for each in tl.static_range(TOGETHER):
            there = inside & (first + each + 0 * cols < N)
            value = tl.load(x + (first + each) * STRIDE + cols, mask=there, other=0.0).to(tl.float32)
            value = value * scales[each] * tl.load(norm + cols, mask=inside, other=0.0).to(tl.float32)
            value = value.to(x.dtype.element_ty)
            if KEEP:
                tl.store(normed + (first + each) * HIDDEN + cols, value, mask=there & (tile + 0 * cols == 0))
            product = block.to(tl.float32) * value.to(tl.float32)[None, :]
            more = more + (totals[each] + product,)  # type: ignore[assignment]  # noqa: RUF005
        totals = more
    for each in tl.static_range(TOGETHER):
        found = tl.sum(totals[each], axis=1)
        if BIAS:
            found += tl.load(bias + rows, mask=inside_rows, other=0.0).to(tl.float32)
        mask = inside_rows & (first + each + 0 * rows < N)
        tl.store(y + (first + each) * OUT + rows, found.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def linear_residual(
    x: tl.tensor,
    weights: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    y: tl.tensor,
    N: int,
    WIDTH: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile of `weights`, TOGETHER rows of x): y [N, OUT] = residual + weights @ x [N, WIDTH]."""
    tile, first = tl.program_id(0), tl.program_id(1) * TOGETHER
    if PDL:
        fetch(weights, tile * ROWS, ROWS, WIDTH, OUT)
    follow(PDL, True)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside_rows = rows < OUT
    totals = ()
    for _ in tl.static_range(TOGETHER):
        totals = totals + (tl.zeros([ROWS, COLS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for at in range(0, WIDTH, COLS):
        cols = at + tl.arange(0, COLS)
        inside = cols < WIDTH
        mask = inside_rows[:, None] & inside[None, :]
        block = tl.load(weights + (rows * WIDTH)[:, None] + cols[None, :], mask=mask, other=0.0)
        more = ()
        for each in tl.static_range(TOGETHER):
            there = inside & (first + each + 0 * cols < N)
            value = tl.load(x + (first + each) * WIDTH + cols, mask=there, other=0.0).to(tl.float32)
            more = more + (totals[each] + block.to(tl.float32) * value[None, :],)  # type: ignore[assignment]  # noqa: RUF005
        totals = more
    for each in tl.static_range(TOGETHER):
        there, mask = (first + each) * OUT + rows, inside_rows & (first + each + 0 * rows < N)
        found = tl.sum(totals[each], axis=1)
        if BIAS:
            found += tl.load(bias + rows, mask=inside_rows, other=0.0).to(tl.float32)
        found += tl.load(residual + there, mask=mask, other=0.0).to(tl.float32)
        tl.store(y + there, found.to(y.dtype.element_ty), mask=mask)
