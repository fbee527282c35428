"""Static tensors of a decode step: what kernels read and write, on the device and in host memory that both see."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from foreload.backend.cuda.kernels.layout import ENTRY
from foreload.backend.cuda.kernels.ops import PLANNED, AttentionScratch
from foreload.shape import ModelShape

GIVEN = 3
"""Numbers before the token ids in what the host gives a step: its number, the first position, the replayed row."""


def host_tensor(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory; where the device is a GPU, memory that its kernels read and write in place."""
    return torch.zeros(size, dtype=dtype, pin_memory=device.type == "cuda")


@dataclass
class HostMemory:
    """Memory of both sides, for steps of up to `rows` rows of `items` = rows * k items."""

    given: Tensor  # int32 [GIVEN + rows]
    words: Tensor  # int32 [layers, items], what layers tell: ids
    guesses: Tensor  # int32 [layers, words of predictions]
    rows: Tensor  # [rows, hidden], the experts' input for the CPU
    weights: Tensor  # float32 [rows, k], and what its outputs are weighted by
    out: Tensor  # int64 [rows, hidden], sums of what the CPU computed: a turn over the bits of a float32
    soon: Tensor  # int32 [1], the turn whose sums are there soon
    plan: Tensor  # int64 [PLANNED * items], the plan of a layer-step as `Ops.take_plan` reads it
    waves: Tensor  # int64 [items, ENTRY], the late experts

    @classmethod
    def make(cls, shape: ModelShape, rows: int, guesses: int, dtype: torch.dtype, device: torch.device) -> HostMemory:
        """Zeros, and words of no step; `guesses`: words of predictions per layer."""
        items = rows * shape.top_k

        def make(kind: torch.dtype, *size: int) -> Tensor:
            return host_tensor(size, kind, device)

        return cls(
            given=make(torch.int32, GIVEN + rows),
            words=make(torch.int32, shape.n_moe_layers, items).fill_(-1),
            guesses=make(torch.int32, shape.n_moe_layers, guesses).fill_(-1),
            rows=make(dtype, rows, shape.hidden),
            weights=make(torch.float32, rows, shape.top_k),
            out=make(torch.int64, rows, shape.hidden),
            soon=make(torch.int32, 1),
            plan=make(torch.int64, PLANNED * items),
            waves=make(torch.int64, items, ENTRY),
        )

    def release(self, turn: int) -> None:
        """Whatever a device waits for up to a turn is there, and empty."""
        self.plan.fill_(turn << 32)
        self.out.fill_(turn << 32)
        self.soon.fill_(turn)


@dataclass(frozen=True)
class _Sizes:
    """Numbers of a row that attention needs memory for."""

    projected: int
    expanded: int  # of queries that were compressed
    key: int  # of a head
    merged: int  # of a head, by chunks
    value: int  # of a head
    latents: int  # of all heads

    @classmethod
    def of(cls, shape: ModelShape) -> _Sizes:
        wide, dim, latent = shape.heads * shape.head_dim, shape.head_dim, shape.latent
        if latent is None:
            return cls(wide + 2 * shape.kv_heads * dim, 0, dim, dim, dim, 0)
        rank, queries = latent.query_rank, latent.query_rank or wide
        all_latents = shape.heads * latent.rank
        return cls(queries + latent.row, wide if rank else 0, latent.row, latent.rank, latent.value_dim, all_latents)


@dataclass
class DeviceMemory:
    """Activations of up to `rows` rows; a step of n rows uses the first n. Layers use the same ones in turn."""

    current: Tensor  # int32 [GIVEN]
    x: Tensor  # [rows, hidden], what goes into a layer
    r: Tensor  # [rows, hidden], after attention
    base: Tensor  # [rows, hidden], r and what shared experts add
    h: Tensor  # [rows, hidden], the experts' normed input
    qkv: Tensor  # float32 [rows, (heads + 2 kv heads) * dim], or [rows, queries or their rank + row] if it is latent
    queries: Tensor  # float32 [rows, heads * dim], compressed queries after expansion
    q: Tensor  # [rows, heads, dim], or folded [rows, heads, row]
    latents: Tensor  # float32 [rows, heads * rank], what latent attention gives before the expansion of values
    mixed: Tensor  # [rows, heads * dim of values]
    shared: Tensor  # float32 [rows, width of all shared experts]
    scores: Tensor  # float32 [rows, experts]
    ids: Tensor  # int64 [rows, k]
    weights: Tensor  # float32 [rows, k]
    guess_ids: Tensor  # int64 [rows, k], what the next layer executes if it is speculated
    guess_weights: Tensor  # float32 [rows, k]
    logits: Tensor  # float32 [rows, vocab]
    mid: Tensor  # float32 [items, width]
    out: Tensor  # float32 [items, hidden]
    plan: Tensor  # int64 [items, ENTRY], taken from the host or made here
    waves: Tensor  # int64 [items, ENTRY], the late experts, from the host
    listed: Tensor  # int64 [items]
    on_host: Tensor  # int64 [items], whether an item's output is the host's
    scratch: AttentionScratch

    @classmethod
    def make(cls, shape: ModelShape, rows: int, context: int, dtype: torch.dtype, device: torch.device) -> DeviceMemory:
        """Zeros."""
        items = rows * shape.top_k
        sizes = _Sizes.of(shape)

        def make(kind: torch.dtype, *size: int) -> Tensor:
            return torch.zeros(size, dtype=kind, device=device)

        full, number = torch.float32, torch.int64
        return cls(
            current=make(torch.int32, GIVEN),
            x=make(dtype, rows, shape.hidden),
            r=make(dtype, rows, shape.hidden),
            base=make(dtype, rows, shape.hidden),
            h=make(dtype, rows, shape.hidden),
            qkv=make(full, rows, sizes.projected),
            queries=make(full, rows, sizes.expanded),
            q=make(dtype, rows, shape.heads, sizes.key),
            latents=make(full, rows, sizes.latents),
            mixed=make(dtype, rows, shape.heads * sizes.value),
            shared=make(full, rows, shape.shared_width),
            scores=make(full, rows, shape.experts),
            ids=make(number, rows, shape.top_k),
            weights=make(full, rows, shape.top_k),
            guess_ids=make(number, rows, shape.top_k),
            guess_weights=make(full, rows, shape.top_k),
            logits=make(full, rows, shape.vocab),
            mid=make(full, items, shape.expert_width),
            out=make(full, items, shape.hidden),
            plan=make(number, items, ENTRY),
            waves=make(number, items, ENTRY),
            listed=make(number, items),
            on_host=make(number, items),
            scratch=AttentionScratch.on(device, rows, shape.heads, sizes.merged, context),
        )

    def of(self, rows: int, top_k: int) -> DeviceMemory:
        """Views of the first rows."""
        items = rows * top_k
        by_row = ("x", "r", "base", "h", "scores", "logits", "ids", "weights")
        attention = ("qkv", "queries", "q", "latents", "mixed", "shared")
        guessed = ("guess_ids", "guess_weights")
        by_item = ("mid", "out", "plan", "waves", "listed", "on_host")
        views = {name: getattr(self, name)[:rows] for name in (*by_row, *attention, *guessed)}
        views |= {name: getattr(self, name)[:items] for name in by_item}
        scratch = self.scratch
        part = AttentionScratch(scratch.chunk, scratch.largest[:rows], scratch.weight[:rows], scratch.partial[:rows])
        return DeviceMemory(current=self.current, scratch=part, **views)

    @classmethod
    def bytes(cls, shape: ModelShape, rows: int, context: int, dtype: torch.dtype) -> int:
        """Device bytes that `make` takes; nothing is allocated."""
        memory = cls.make(shape, rows, context, dtype, torch.device("meta"))
        scratch = memory.scratch
        tensors = [getattr(memory, f.name) for f in fields(memory) if f.name != "scratch"]
        tensors += [scratch.largest, scratch.weight, scratch.partial]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
