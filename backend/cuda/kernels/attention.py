"""Decode attention over a static KV cache, whose current length is read from device memory.

Keys are split into chunks at fixed positions, so a row's result does not depend on how many rows the step has. Grouped
heads share their keys: one program holds all rows and query heads of a key head.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreload.backend.cuda.kernels.hold import follow


@triton.jit
def rope_store(
    qkv: tl.tensor,
    qk_norm: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    current: tl.tensor,
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    CONTEXT: tl.constexpr,
    EPS: tl.constexpr,
    NORM: tl.constexpr,
    RING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, head of q, k or v): normalise and rotate; q to [n, HEADS, DIM], k and v into the cache.

    `sin` carries the sign of the first half, so that rotating is x * cos + (x rolled by half) * sin. DIMS: DIM or the
    next power of two. keys, values: [KV_HEADS, CONTEXT, DIM] of this layer; RING: positions go round in it.
    """
    follow(PDL, True)
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(current + 1) + row
    dims = tl.arange(0, DIMS)
    inside = dims < DIM
    rolled = (dims + DIM // 2) % DIM
    start = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    value = tl.load(start + dims, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        other = tl.load(start + rolled, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, axis=0) / DIM + EPS)
            value = value * scale * tl.load(qk_norm + head * DIM + dims, mask=inside, other=0.0).to(tl.float32)
            other = other * scale * tl.load(qk_norm + head * DIM + rolled, mask=inside, other=0.0).to(tl.float32)
        turn = position * DIM + dims
        value = value * tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32) + other * tl.load(
            sin + turn, mask=inside, other=0.0
        ).to(tl.float32)
    done = value.to(q.dtype.element_ty)
    place = position % CONTEXT if RING else position
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * DIM + dims, done, mask=inside)
    elif head < HEADS + KV_HEADS:
        tl.store(keys + ((head - HEADS) * CONTEXT + place) * DIM + dims, done, mask=inside)
    else:
        tl.store(values + ((head - HEADS - KV_HEADS) * CONTEXT + place) * DIM + dims, done, mask=inside)


@triton.jit(do_not_specialize=["N"])
def attend_chunks(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    current: tl.tensor,
    largest: tl.tensor,
    weight: tl.tensor,
    partial: tl.tensor,
    N: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    CONTEXT: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (key head, chunk): softmax maximum, sum and weighted values of its keys for all rows and query heads.

    largest, weight [n, HEADS, CHUNKS], partial [n, HEADS, CHUNKS, DIM], fp32. M >= 16 rows of the products, of which
    N * group are used. WINDOW > 0: a row sees that many positions, its own included, and the cache is a ring.
    """
    follow(PDL, True)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv, chunk = tl.program_id(0), tl.program_id(1)
    position = tl.load(current + 1)
    length = position + N
    if (chunk * CHUNK < length) & (chunk * CHUNK < CONTEXT):
        m = tl.arange(0, M)
        dims = tl.arange(0, DIMS)
        used = m < N * GROUP
        row, head = m // GROUP, kv * GROUP + m % GROUP
        at_q = (row * HEADS + head) * DIM
        query = tl.load(q + at_q[:, None] + dims[None, :], mask=used[:, None] & (dims < DIM)[None, :], other=0.0)
        top = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DIMS], tl.float32)
        for block in range(0, CHUNK, BLOCK):
            place = chunk * CHUNK + block + tl.arange(0, BLOCK)
            if (chunk * CHUNK + block < length) & (chunk * CHUNK + block < CONTEXT):
                stored = ((place < length) & (place < CONTEXT))[:, None] & (dims < DIM)[None, :]
                at_k = (kv * CONTEXT + place) * DIM
                key = place
                if WINDOW > 0:
                    key = length - 1 - (length - 1 - place + CONTEXT) % CONTEXT
                k = tl.load(keys + at_k[:, None] + dims[None, :], mask=stored, other=0.0)
                score = tl.dot(query, tl.trans(k), input_precision="ieee") * SCALE
                seen = (key[None, :] <= (position + row)[:, None]) & ((place < CONTEXT) & (key >= 0))[None, :]
                if WINDOW > 0:
                    seen = seen & (key[None, :] > (position + row - WINDOW)[:, None])
                score = tl.where(seen & used[:, None], score, float("-inf"))
                higher = tl.maximum(top, tl.max(score, axis=1))
                safe = tl.where(higher == float("-inf"), 0.0, higher)
                chance = tl.exp(score - safe[:, None])
                shrink = tl.exp(top - safe)
                v = tl.load(values + at_k[:, None] + dims[None, :], mask=stored, other=0.0)
                acc = acc * shrink[:, None] + tl.dot(chance.to(v.dtype), v, input_precision="ieee")
                total = total * shrink + tl.sum(chance, axis=1)
                top = higher
        at = (row * HEADS + head) * CHUNKS + chunk
        tl.store(largest + at, top, mask=used)
        tl.store(weight + at, total, mask=used)
        tl.store(partial + at[:, None] * DIM + dims[None, :], acc, mask=used[:, None] & (dims < DIM)[None, :])


@triton.jit
def attend_merge(
    largest: tl.tensor,
    weight: tl.tensor,
    partial: tl.tensor,
    sinks: tl.tensor,
    current: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_UP: tl.constexpr,
    USED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, head, DIMS of the head's): out [n, HEADS * DIM] from the chunks that hold keys.

    SINKS: a logit per head that has no value. CHUNKS_UP: CHUNKS or the next power of two; USED: those
    that this layer's cache has, added up BLOCK at a time.
    """
    follow(PDL, True)
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(current + 1) + row + 1
    start = (row * HEADS + head) * CHUNKS
    chunks = tl.arange(0, CHUNKS_UP)
    held = chunks * CHUNK < length
    tops = tl.load(largest + start + chunks, mask=held & (chunks < USED), other=float("-inf"))
    top = tl.max(tops, axis=0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        top = tl.maximum(top, sink)
    sums = tl.load(weight + start + chunks, mask=held & (chunks < USED), other=0.0)
    total = tl.sum(sums * tl.exp(tops - top), axis=0)
    if SINKS:
        total += tl.exp(sink - top)
    dims = tl.program_id(2) * DIMS + tl.arange(0, DIMS)
    acc = tl.zeros([DIMS], tl.float32)
    for first in range(0, USED, BLOCK):
        if first * CHUNK < length:
            some = first + tl.arange(0, BLOCK)
            there = (some * CHUNK < length) & (some < USED)
            scale = tl.exp(tl.load(largest + start + some, mask=there, other=float("-inf")) - top)
            mask = there[:, None] & (dims < DIM)[None, :]
            part = tl.load(partial + (start + some)[:, None] * DIM + dims[None, :], mask=mask, other=0.0)
            acc += tl.sum(part * scale[:, None], axis=0)
    tl.store(out + (row * HEADS + head) * DIM + dims, (acc / total).to(out.dtype.element_ty), mask=dims < DIM)
