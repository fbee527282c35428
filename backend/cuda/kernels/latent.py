"""Decode attention over latent rows (arXiv 2405.04434, section 2.1), whose current length is read from device memory.

A position keeps one row for all heads: RANK numbers of the normed latent, then ROPE of the rotated key; key and value
expansions are folded into queries and outputs. Chunks of rows are as in `attention`, whose merge adds them up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreload.backend.cuda.kernels.dense import fetch
from foreload.backend.cuda.kernels.hold import follow


@triton.jit
def _rotated(
    x: tl.tensor, cos: tl.tensor, sin: tl.tensor, position: tl.tensor, ROPE: tl.constexpr, ROPE_UP: tl.constexpr
) -> tl.tensor:
    """[ROPE_UP] fp32: x [ROPE] rotated for a position, as in `attention.rope_store`."""
    dims = tl.arange(0, ROPE_UP)
    inside = dims < ROPE
    turn = position * ROPE + dims
    value = tl.load(x + dims, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + (dims + ROPE // 2) % ROPE, mask=inside, other=0.0).to(tl.float32)
    value *= tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
    return value + other * tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def fold_store(
    queries: tl.tensor,
    kept: tl.tensor,
    norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    current: tl.tensor,
    key_up: tl.tensor,
    q: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    KEPT_STRIDE: tl.constexpr,
    DIMS: tl.constexpr,
    TILE: tl.constexpr,
    RANK_UP: tl.constexpr,
    ROPE_UP: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, head, tile of RANK): its part of the query against latent rows, q [n, HEADS, RANK + ROPE].

    queries [n, HEADS, NOPE + ROPE], rows Q_STRIDE apart; key_up [HEADS, NOPE, RANK], DIMS of NOPE at a time. A head's
    first tile rotates, too. Head number HEADS: kept [n, RANK + ROPE], KEPT_STRIDE apart, normed and rotated, goes to
    its position in rows [context, RANK + ROPE].
    """
    row, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PDL:
        EACH: tl.constexpr = (NOPE * TILE + RANK - 1) // RANK
        fetch(key_up, head * NOPE + tile * EACH, EACH, RANK, HEADS * NOPE)
    follow(PDL, True)
    position = tl.load(current + 1) + row
    ropes = tl.arange(0, ROPE_UP)
    if head < HEADS:
        start = queries + row * Q_STRIDE + head * (NOPE + ROPE)
        found = q + (row * HEADS + head) * (RANK + ROPE)
        ranks = tile * TILE + tl.arange(0, TILE)
        total = tl.zeros([DIMS, TILE], tl.float32)
        for at in tl.static_range(0, NOPE, DIMS):  # unrolled, so that all loads are under way at once
            dims = at + tl.arange(0, DIMS)
            part = tl.load(start + dims, mask=dims < NOPE, other=0.0).to(tl.float32)
            place = (head * NOPE + dims)[:, None] * RANK + ranks[None, :]
            block = tl.load(key_up + place, mask=(dims < NOPE)[:, None] & (ranks < RANK)[None, :], other=0.0)
            total += block.to(tl.float32) * part[:, None]
        tl.store(found + ranks, tl.sum(total, axis=0).to(q.dtype.element_ty), mask=ranks < RANK)
        if tile == 0:
            turned = _rotated(start + NOPE, cos, sin, position, ROPE, ROPE_UP)
            tl.store(found + RANK + ropes, turned.to(q.dtype.element_ty), mask=ropes < ROPE)
    elif tile == 0:
        latent, there = kept + row * KEPT_STRIDE, rows + position * (RANK + ROPE)
        every = tl.arange(0, RANK_UP)
        value = tl.load(latent + every, mask=every < RANK, other=0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, axis=0) / RANK + EPS)
        value *= tl.load(norm + every, mask=every < RANK, other=0.0).to(tl.float32)
        tl.store(there + every, value.to(rows.dtype.element_ty), mask=every < RANK)
        turned = _rotated(latent + RANK, cos, sin, position, ROPE, ROPE_UP)
        tl.store(there + RANK + ropes, turned.to(rows.dtype.element_ty), mask=ropes < ROPE)


@triton.jit
def latent_chunks(
    q: tl.tensor,
    rows: tl.tensor,
    current: tl.tensor,
    largest: tl.tensor,
    weight: tl.tensor,
    partial: tl.tensor,
    HEADS: tl.constexpr,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    RANK_UP: tl.constexpr,
    ROPE_UP: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (chunk, row, M heads): softmax maximum, sum and weighted latents of a chunk's rows for those heads.

    largest, weight [n, HEADS, CHUNKS], partial [n, HEADS, CHUNKS, RANK], fp32. BLOCK rows at a time serve as keys and,
    their latents, as values. M >= 16 rows of the products.
    """
    follow(PDL, True)
    chunk, row, some = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(current + 1) + row + 1
    if chunk * CHUNK < length:
        head, ranks, ropes = some * M + tl.arange(0, M), tl.arange(0, RANK_UP), tl.arange(0, ROPE_UP)
        used = head < HEADS
        at_q = q + ((row * HEADS + head) * (RANK + ROPE))[:, None]
        folded = tl.load(at_q + ranks[None, :], mask=used[:, None] & (ranks < RANK)[None, :], other=0.0)
        turned = tl.load(at_q + RANK + ropes[None, :], mask=used[:, None] & (ropes < ROPE)[None, :], other=0.0)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, RANK_UP], tl.float32)
        for first in range(chunk * CHUNK, tl.minimum(length, (chunk + 1) * CHUNK), BLOCK):
            place = first + tl.arange(0, BLOCK)
            there = place < length
            start = rows + (place * (RANK + ROPE))[:, None]
            latent = tl.load(start + ranks[None, :], mask=there[:, None] & (ranks < RANK)[None, :], other=0.0)
            key = tl.load(start + RANK + ropes[None, :], mask=there[:, None] & (ropes < ROPE)[None, :], other=0.0)
            score = tl.dot(turned, tl.trans(key), input_precision="ieee")
            score += tl.dot(folded, tl.trans(latent), input_precision="ieee")
            score = tl.where(there[None, :], score * SCALE, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=1))
            chance = tl.exp(score - higher[:, None])
            shrink = tl.exp(top - higher)
            acc = acc * shrink[:, None] + tl.dot(chance.to(latent.dtype), latent, input_precision="ieee")
            total = total * shrink + tl.sum(chance, axis=1)
            top = higher
        at = (row * HEADS + head) * CHUNKS + chunk
        tl.store(largest + at, top, mask=used)
        tl.store(weight + at, total, mask=used)
        found = partial + at[:, None] * RANK + ranks[None, :]
        tl.store(found, acc, mask=used[:, None] & (ranks < RANK)[None, :])


@triton.jit(do_not_specialize=["N"])
def latent_values(
    mixed: tl.tensor,
    value_up: tl.tensor,
    out: tl.tensor,
    N: int,
    HEADS: tl.constexpr,
    VALUE: tl.constexpr,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    RANK_UP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row tile of a head's `value_up`, head): out [N, HEADS, VALUE] = value_up @ mixed [N, HEADS, RANK].

    value_up [HEADS, VALUE, RANK].
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    if PDL:
        fetch(value_up, head * VALUE + tile * ROWS, ROWS, RANK, HEADS * VALUE)
    follow(PDL, True)
    values, ranks = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, RANK_UP)
    inside = values < VALUE
    for token in range(N):
        at = token * HEADS + head
        latent = tl.load(mixed + at * RANK + ranks, mask=ranks < RANK, other=0.0).to(tl.float32)
        place = (head * VALUE + values)[:, None] * RANK + ranks[None, :]
        block = tl.load(value_up + place, mask=inside[:, None] & (ranks < RANK)[None, :], other=0.0)
        found = tl.sum(block.to(tl.float32) * latent[None, :], axis=1)
        tl.store(out + at * VALUE + values, found.to(out.dtype.element_ty), mask=inside)
