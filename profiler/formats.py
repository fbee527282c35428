"""Experts in each format, beside nothing: what `CostModel` shifts costs by for a format the engine did not run in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreload.backend.cuda.forward import FastForward
from foreload.backend.cuda.kernels.layout import kernel_layout
from foreload.backend.cuda.kernels.ops import ExpertBuffers, Ops, check_layout
from foreload.backend.experts.blocks import BlockCodec, ExpertViews, run_expert
from foreload.backend.experts.cpu import make_cpu_experts
from foreload.backend.experts.pages import prefer_huge_pages
from foreload.backend.experts.pool import SlotPool
from foreload.errors import UsageError
from foreload.formats import FORMATS, BlockLayout, PackedFormat, block_layout
from foreload.profiler.bench import Bench
from foreload.profiler.schema import Measurement
from foreload.profiler.stats import gpu_microseconds, host_samples, summarise
from foreload.shape import ModelShape

SCRATCH_BYTES = 512 << 20
"""More than caches keep (of servers some hundred MB), so that experts are read from memory as they are in decode."""


class ScratchExperts:
    """Experts of one layer in some format, all the same weights at different places: `ExpertBlocks` without a model."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, format: PackedFormat, scratch_bytes: int = SCRATCH_BYTES
    ) -> None:
        """At least 2 `top_k` experts, and as many of the model's as `scratch_bytes` hold; activations are `dtype`."""
        self.dtype = dtype
        codec = BlockCodec(block_layout(format, shape), shape, dtype)
        most, size = shape.experts * shape.n_moe_layers, codec.layout.bytes
        count = min(most, max(2 * shape.top_k, scratch_bytes // size))
        self.shape = replace(shape, layers=1, moe_layers=(0,), experts=count)
        self.codec = codec
        one = torch.zeros(size, dtype=torch.uint8)
        generator = torch.Generator().manual_seed(0)
        hidden, width = shape.hidden, shape.expert_width
        codec.write(one, "gate_up", torch.randn(2 * width, hidden, generator=generator) / hidden**0.5)
        codec.write(one, "down", torch.randn(hidden, width, generator=generator) / width**0.5)
        self.blocks = torch.empty(count, size, dtype=torch.uint8)
        prefer_huge_pages(self.blocks)
        self.blocks.copy_(one)

    def layout(self, layer: int) -> BlockLayout:
        """How blocks are packed."""
        return self.codec.layout

    def addresses(self) -> NDArray[np.int64]:
        """Host addresses, [1, experts]."""
        start, size = self.blocks.data_ptr(), self.codec.layout.bytes
        return (start + size * np.arange(self.shape.experts, dtype=np.int64))[None]

    def views(self, layer: int, expert: int) -> ExpertViews:
        """One expert's tensors."""
        return self.codec.views(self.blocks[expert])


def by_format(
    bench: Bench, rounds: int, threads: tuple[int, ...], seconds: float = float("inf")
) -> Iterator[Measurement]:
    """`gpu_format` and `cpu_format` for the engine's own format and all that can be chosen; `seconds` for a point."""
    own = bench.engine.formats[0]
    for format in FORMATS:
        if format != "fp32" or format == own:
            scratch = ScratchExperts(bench.shape, bench.decoder.embedding.dtype, format)
            yield from _on_device(bench, scratch, rounds, seconds)
            for count in threads:
                for experts, samples in cpu_samples(scratch, count, range(1, bench.shape.top_k + 1), rounds, seconds):
                    number = FORMATS.index(format)
                    yield summarise("cpu_format", samples, experts=experts, threads=count, format=number)


def _on_device(bench: Bench, scratch: ScratchExperts, rounds: int, seconds: float) -> Iterator[Measurement]:
    device, k = bench.engine.device, bench.shape.top_k
    pool = SlotPool([scratch.codec], scratch.codec.layout.bytes, device)
    pool.grow(min(scratch.shape.experts, 4 * k))
    for slot in range(len(pool)):
        pool.slot(slot).copy_(scratch.blocks[slot])
    forward, block = bench.engine.forward, _one_by_one(bench, pool)
    if isinstance(forward, FastForward):
        with suppress(UsageError):  # experts that kernels cannot read run one by one there, too
            block = _grouped(bench, scratch, pool, forward.ops)
    for count in range(1, k + 1):
        samples = host_samples(block(count), rounds, device, seconds)
        gpu_us = gpu_microseconds(block(count), rounds, device)
        yield summarise("gpu_format", samples, gpu_us, experts=count, format=FORMATS.index(scratch.codec.layout.format))


Block = Callable[[int], object]
"""Runs experts, others at every turn."""


def _one_by_one(bench: Bench, pool: SlotPool) -> Callable[[int], Block]:
    """So many experts as the eager path runs them."""
    x = bench.hidden()
    out = torch.empty(bench.shape.top_k, bench.shape.hidden, device=x.device, dtype=x.dtype)

    def block(count: int) -> Block:
        def run(i: int) -> None:
            for n in range(count):
                out[n].copy_(run_expert(x, *pool.views((i * count + n) % len(pool), 0))[0])

        return run

    return block


def _grouped(bench: Bench, scratch: ScratchExperts, pool: SlotPool, ops: Ops) -> Callable[[int], Block]:
    """So many experts as graphs run them: one plan, whose other entries are empty."""
    k, x, layout = bench.shape.top_k, bench.hidden(), kernel_layout(scratch.codec.layout, bench.shape)
    check_layout(layout)
    base = ExpertBuffers.on(x.device, layout, k)
    base.listed.copy_(torch.arange(k))

    def block(count: int) -> Block:
        plans = []
        for turn in range(len(pool) // count):
            entries = [(pool.slot(turn * count + n).data_ptr(), n, 1, 0) for n in range(count)]
            plan = torch.tensor(entries + [(0, 0, 0, 0)] * (k - count), dtype=torch.int64, device=x.device)
            plans.append(base.with_plan(plan))
        return lambda i: ops.experts(layout, k, x, plans[i % len(plans)])

    return block


def cpu_samples(
    scratch: ScratchExperts, threads: int, counts: Iterable[int], rounds: int, seconds: float
) -> Iterator[tuple[int, list[float]]]:
    """Microseconds of so many experts, one token each, on the CPU, for each of `counts`."""
    cpu = make_cpu_experts(scratch, threads)
    x, zero = torch.randn(1, scratch.shape.hidden).to(scratch.dtype), np.zeros(1, np.int64)
    try:
        for count in counts:

            def run(i: int, count: int = count) -> Tensor:
                experts = [(i * count + n) % scratch.shape.experts for n in range(count)]
                out = cpu.submit(0, experts, x, [zero] * count)
                cpu.join()
                return out

            yield count, host_samples(run, rounds, x.device, seconds)
    finally:
        cpu.close()
