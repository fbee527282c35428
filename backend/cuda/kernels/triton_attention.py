"""Attention of decode steps as Triton kernels: over grouped heads and over latent rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foreload.backend.cuda.kernels import attention, latent
from foreload.backend.cuda.kernels.ops import AttentionScratch, Ops, power_of_two, tiles

BUILD: dict[str, Any] = {"enable_fp_fusion": True}
FOLD_DIMS, FOLD_TILE = 64, 64
"""A program that folds a query: dimensions of a head at once, and numbers of the latent."""
VALUE_ROWS = 4
"""A program that expands values: rows of a head."""
LATENT_ROWS, LATENT_HEADS = 64, 64
"""Rows at once and heads of a program over latent rows, times the bytes of a number: registers hold a block of each,
shared memory two, and cards since compute capability 8.6 have 99 KiB of it."""
LATENT_DIMS = 128
"""Numbers of a latent that a program merges."""


class TritonAttention(Ops):
    """The part of `TritonOps` that a layer's attention consists of."""

    def __init__(self, pdl: bool) -> None:
        self._build = {**BUILD, "PDL": pdl, "launch_pdl": pdl}

    def rope_store(  # noqa: D102
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        tables: tuple[Tensor, Tensor],
        current: Tensor,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        eps: float,
        ring: bool = False,
    ) -> None:
        n, heads, dim = q.shape
        kv_heads, context = cache[0].shape[:2]
        attention.rope_store[(n, heads + 2 * kv_heads)](
            qkv,
            q if qk_norm is None else qk_norm,
            *tables,
            current,
            q,
            *cache,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            DIMS=power_of_two(dim),
            CONTEXT=context,
            EPS=eps,
            NORM=qk_norm is not None,
            RING=ring,
            num_warps=1,
            **self._build,
        )

    def attend(  # noqa: D102
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        current: Tensor,
        scratch: AttentionScratch,
        out: Tensor,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        n, heads, dim = q.shape
        kv_heads, context = cache[0].shape[:2]
        chunks, dims = scratch.largest.shape[2], max(16, power_of_two(dim))
        attention.attend_chunks[(kv_heads, tiles(context, scratch.chunk))](
            q,
            *cache,
            current,
            scratch.largest,
            scratch.weight,
            scratch.partial,
            N=n,
            HEADS=heads,
            KV_HEADS=kv_heads,
            DIM=dim,
            DIMS=dims,
            CONTEXT=context,
            CHUNKS=chunks,
            CHUNK=scratch.chunk,
            BLOCK=64,
            M=max(16, power_of_two(n * (heads // kv_heads))),
            SCALE=scale,
            WINDOW=window,
            **self._build,
        )
        self._merge(scratch, current, out, context, dims, sinks)

    def _merge(
        self, scratch: AttentionScratch, current: Tensor, out: Tensor, context: int, dims: int, sinks: Tensor | None
    ) -> None:
        """The sums over chunks of a cache of `context` positions, for `dims` dimensions of a head in a program."""
        n, heads, chunks, dim = scratch.partial.shape
        attention.attend_merge[(n, heads, tiles(dim, dims))](
            scratch.largest,
            scratch.weight,
            scratch.partial,
            out if sinks is None else sinks,
            current,
            out,
            HEADS=heads,
            DIM=dim,
            DIMS=dims,
            CHUNKS=chunks,
            CHUNKS_UP=power_of_two(chunks),
            USED=tiles(context, scratch.chunk),
            CHUNK=scratch.chunk,
            BLOCK=16,
            SINKS=sinks is not None,
            **self._build,
        )

    def fold_store(  # noqa: D102
        self,
        queries: Tensor,
        kept: Tensor,
        norm: Tensor,
        tables: tuple[Tensor, Tensor],
        current: Tensor,
        key_up: Tensor,
        q: Tensor,
        rows: Tensor,
        eps: float,
    ) -> None:
        heads, nope, rank = key_up.shape
        rope, tile = rows.shape[1] - rank, min(FOLD_TILE, power_of_two(rank))
        latent.fold_store[(len(q), heads + 1, tiles(rank, tile))](
            queries,
            kept,
            norm,
            *tables,
            current,
            key_up,
            q,
            rows,
            HEADS=heads,
            NOPE=nope,
            ROPE=rope,
            RANK=rank,
            Q_STRIDE=queries.stride(0),
            KEPT_STRIDE=kept.stride(0),
            DIMS=min(FOLD_DIMS, power_of_two(nope)),
            TILE=tile,
            RANK_UP=power_of_two(rank),
            ROPE_UP=power_of_two(rope),
            EPS=eps,
            **self._build,
        )

    def latent_attend(  # noqa: D102
        self,
        q: Tensor,
        rows: Tensor,
        current: Tensor,
        scratch: AttentionScratch,
        mixed: Tensor,
        value_up: Tensor,
        out: Tensor,
        scale: float,
    ) -> None:
        (n, heads, _), (context, row), (_, value, rank) = q.shape, rows.shape, value_up.shape
        chunks, size = scratch.largest.shape[2], rows.element_size()
        most = min(LATENT_HEADS // size, max(16, power_of_two(heads)))
        latent.latent_chunks[(tiles(context, scratch.chunk), n, tiles(heads, most))](
            q,
            rows,
            current,
            scratch.largest,
            scratch.weight,
            scratch.partial,
            HEADS=heads,
            ROPE=row - rank,
            RANK=rank,
            RANK_UP=max(16, power_of_two(rank)),
            ROPE_UP=max(16, power_of_two(row - rank)),
            CHUNKS=chunks,
            CHUNK=scratch.chunk,
            BLOCK=LATENT_ROWS // size,
            M=most,
            SCALE=scale,
            num_warps=8,
            num_stages=2,
            **self._build,
        )
        self._merge(scratch, current, mixed, context, min(LATENT_DIMS, power_of_two(rank)), None)
        latent.latent_values[(tiles(value, VALUE_ROWS), heads)](
            mixed,
            value_up,
            out,
            N=n,
            HEADS=heads,
            VALUE=value,
            RANK=rank,
            ROWS=VALUE_ROWS,
            RANK_UP=power_of_two(rank),
            **self._build,
        )
