"""Grouped expert kernels against torch: formats, activations, odd sizes; bits do not depend on plan or company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from blocks import any_layout, random_blocks
from torch import Tensor

from foreload.backend.cuda.kernels.layout import FORMATS, BlockLayout, kernel_layout
from foreload.backend.cuda.kernels.ops import ExpertBuffers, HostOutputs, Turn, check_layout
from foreload.backend.cuda.kernels.torch_ops import TorchOps
from foreload.backend.experts.blocks import BlockCodec, run_expert
from foreload.errors import UsageError
from foreload.formats import FORMATS as PACKED_FORMATS
from foreload.formats import PackedFormat, block_layout
from foreload.shape import ModelShape

pytest.importorskip("triton")
from foreload.backend.cuda.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = TritonOps(fence=DEVICE.type == "cuda")


def planned(buffers: ExpertBuffers, groups: list[tuple[int, list[int]]]) -> ExpertBuffers:
    """Fill the plan with (slot address, items)."""
    buffers.plan.zero_()
    at = 0
    for number, (address, items) in enumerate(groups):
        buffers.plan[number, :3] = torch.tensor([address, at, len(items)])
        buffers.listed[at : at + len(items)] = torch.tensor(items)
        at += len(items)
    return buffers


def by_expert(ids: Tensor) -> dict[int, list[int]]:
    flat = ids.reshape(-1).tolist()
    return {expert: [i for i, its in enumerate(flat) if its == expert] for expert in sorted(set(flat))}


def run(ops: Any, layout: BlockLayout, blocks: Tensor, x: Tensor, ids: Tensor) -> Tensor:
    buffers = ExpertBuffers.on(x.device, layout, ids.numel())
    buffers.out.fill_(float("nan"))
    buffers.mid.fill_(float("nan"))
    groups = [(blocks[expert].data_ptr(), items) for expert, items in by_expert(ids).items()]
    ops.experts(layout, ids.shape[1], x, planned(buffers, groups))
    return buffers.out.cpu()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


@pytest.mark.unit
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("format_", FORMATS)
def test_equal_to_torch(format_: Any, activation: Any, generator: torch.Generator) -> None:
    """Three tokens that share experts; sizes that are no multiple of a tile."""
    oai = activation == "swiglu_oai"
    layout = any_layout(format_, 64, 32, biases=oai, interleaved=oai, activation=activation, limit=1.5)
    blocks = random_blocks(layout, 5, generator)
    dtype = torch.float32 if format_ == "float32" else torch.bfloat16
    x = torch.randn(3, 64, generator=generator).to(dtype)
    ids = torch.tensor([[0, 3], [3, 1], [4, 3]])
    expected = run(TorchOps(), layout, blocks, x, ids)
    found = run(OPS, layout, blocks.to(DEVICE), x.to(DEVICE), ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.abs().mean() > 0.01


@pytest.mark.unit
@pytest.mark.parametrize("packed", PACKED_FORMATS)
@pytest.mark.parametrize("oai", [False, True])
def test_layout_of_the_slab(shape: ModelShape, oai: bool, packed: PackedFormat, generator: torch.Generator) -> None:
    """Kernels read blocks as the slab writes them, and agree with the experts of the torch path."""
    clamped: dict[str, Any] = {
        "activation": "swiglu_oai",
        "swiglu_alpha": 1.7,
        "swiglu_limit": 2.0,
        "expert_bias": True,
    }
    shape = replace(shape, hidden=64, expert_width=32, **(clamped if oai else {}))
    codec = BlockCodec(block_layout(packed, shape), shape, torch.float32)
    blocks = torch.zeros(2, codec.layout.bytes, dtype=torch.uint8)
    sizes = {"gate_up": (64, 64), "down": (64, 32), **({"gate_up_bias": (64,), "down_bias": (64,)} if oai else {})}
    for block in blocks:
        for name, size in sizes.items():
            codec.write(block, name, torch.randn(size, generator=generator) / 3)  # type: ignore[arg-type]
    kind = torch.float32 if packed == "fp32" else torch.bfloat16
    x = torch.randn(1, shape.hidden, generator=generator).to(kind)
    out = run(OPS, kernel_layout(codec.layout, shape), blocks.to(DEVICE), x.to(DEVICE), torch.tensor([[1, 0]]))
    for rank, expert in enumerate((1, 0)):
        expected = run_expert(x.float(), *codec.views(blocks[expert]))[0]
        torch.testing.assert_close(out[rank], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.unit
def test_sizes_that_are_no_power_of_two(generator: torch.Generator) -> None:
    """GPT-OSS has 2,880 columns: rows end inside a tile, and so does the last row tile."""
    layout = any_layout("float32", 44, 18)
    blocks = random_blocks(layout, 2, generator)
    x, ids = torch.randn(1, 44, generator=generator), torch.tensor([[1, 0]])
    expected = run(TorchOps(), layout, blocks, x, ids)
    torch.testing.assert_close(run(OPS, layout, blocks.to(DEVICE), x.to(DEVICE), ids), expected)


@pytest.mark.unit
@pytest.mark.parametrize("format_", ["bfloat16", "mxfp4"])
def test_bits_depend_on_neither_company_nor_place(format_: Any, generator: torch.Generator) -> None:
    """An item alone in a launch of its own, in another slot, gives the bits it gives in a group of all."""
    layout = any_layout(format_, 32, 32)
    blocks = random_blocks(layout, 3, generator).to(DEVICE)
    moved = torch.cat([torch.zeros_like(blocks[:1]), blocks.flip(0)])
    x = torch.randn(2, 32, generator=generator).to(torch.bfloat16).to(DEVICE)
    ids = torch.tensor([[0, 1], [1, 2]])
    together = run(OPS, layout, blocks, x, ids)
    alone = ExpertBuffers.on(DEVICE, layout, ids.numel())
    for item, expert in enumerate(ids.reshape(-1).tolist()):
        OPS.experts(layout, 2, x, planned(alone, [(0, []), (moved[3 - expert].data_ptr(), [item])]))
    assert torch.equal(alone.out.cpu(), together)


@pytest.mark.unit
def test_empty_groups_write_nothing(generator: torch.Generator) -> None:
    layout = any_layout("float32", 32, 16)
    blocks = random_blocks(layout, 1, generator).to(DEVICE)
    buffers = ExpertBuffers.on(DEVICE, layout, 4)
    buffers.out.fill_(7.0)
    x = torch.randn(2, 32, generator=generator).to(DEVICE)
    OPS.experts(layout, 2, x, planned(buffers, [(0, []), (blocks[0].data_ptr(), [2])]))
    assert (buffers.out[[0, 1, 3]] == 7.0).all()
    assert (buffers.out[2] != 7.0).all()


@pytest.mark.unit
@pytest.mark.parametrize("on_host", [False, True])
def test_combine(on_host: bool, generator: torch.Generator) -> None:
    r = torch.randn(2, 40, generator=generator)
    weights = torch.rand(2, 3, generator=generator)
    out, host = torch.randn(6, 40, generator=generator), torch.randn(2, 40, generator=generator)
    there = torch.tensor([0, 1, 0, 0, 0, 0])
    if on_host:
        out[there == 1] = float("nan")  # what the CPU computed is not on the device
    expected, found = torch.empty_like(r), torch.empty_like(r, device=DEVICE)
    number, soon = torch.tensor([5, 0, 0], dtype=torch.int32), torch.tensor([5 * 48 + 3], dtype=torch.int32)
    words = (host.view(torch.int32).long() & 0xFFFFFFFF) | (5 * 48 + 3) << 32
    words[1] = 0  # of a token that has none there, never written

    def outputs(device: torch.device) -> HostOutputs | None:
        sums, items, word, now = (t.to(device) for t in (words, there, soon, number))
        return HostOutputs(sums, items, word, Turn(now, 48, 3)) if on_host else None

    TorchOps().combine(r, weights, out, expected, outputs(r.device))
    OPS.combine(*(t.to(DEVICE) for t in (r, weights, out)), found, outputs(DEVICE))
    torch.testing.assert_close(found.cpu(), expected)
    if on_host:
        mine = torch.where(there[:, None] != 0, 0, out).view(2, 3, 40)
        total = (weights[..., None] * mine).sum(1) + host * torch.tensor([[1.0], [0.0]])
        torch.testing.assert_close(expected, r + total)


@pytest.mark.unit
@pytest.mark.parametrize(("hidden", "moved", "what"), [(48, 0, "multiples of 32"), (64, 2, "multiples of 4 bytes")])
def test_codes_that_cannot_be_read(hidden: int, moved: int, what: str) -> None:
    layout = any_layout("mxfp4", hidden, 32)
    layout = replace(layout, up=replace(layout.up, at=layout.up.at + moved))
    with pytest.raises(UsageError, match=what):
        check_layout(layout)


@pytest.mark.unit
def test_codes_of_every_kind_in_every_place() -> None:
    """All sixteen codes, zero and one half included, beside scales of many sizes; x of many sizes, too."""
    layout = any_layout("mxfp4", 64, 32)
    blocks = random_blocks(layout, 1, torch.Generator().manual_seed(1))
    row = torch.arange(0, 256, 17).repeat(2).to(torch.uint8)  # every code low and high
    for part, height in ((layout.gate, 32), (layout.up, 32)):
        for at in range(height):
            start = part.at + at * part.stride
            blocks[0, start : start + 32] = row.roll(at)
            scale = part.scales + at * part.scale_stride
            blocks[0, scale : scale + 2] = torch.tensor([92 + at, 88 + at], dtype=torch.uint8)
    x = torch.logspace(-20, 1, 64)[None].to(torch.bfloat16)
    expected = run(TorchOps(), layout, blocks, x, torch.tensor([[0]]))
    found = run(OPS, layout, blocks.to(DEVICE), x.to(DEVICE), torch.tensor([[0]]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
