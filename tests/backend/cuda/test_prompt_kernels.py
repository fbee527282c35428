"""Expert kernels of prompt chunks against torch; an item's bits depend neither on its company nor on its place.

On a GPU also the operator that attends without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from blocks import any_layout, random_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreload.backend.cuda.kernels.layout import ENTRY, FORMATS, BlockLayout
from foreload.backend.cuda.kernels.ops import TOKENS, tile_columns
from foreload.backend.cuda.kernels.torch_ops import TorchOps
from foreload.backend.models import attention

pytest.importorskip("triton")
from foreload.backend.cuda.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = TritonOps(fence=DEVICE.type == "cuda")
Groups = Sequence[tuple[Tensor, Sequence[int]]]
"""Blocks, and the items that each serves."""


def run(ops: Any, layout: BlockLayout, groups: Groups, x: Tensor, k: int) -> Tensor:
    """Outputs [items, hidden] of one launch, NaN where nothing was asked for."""
    plan, listed = [], list[int]()
    for block, items in groups:
        for at in range(0, len(items), TOKENS):
            part = items[at : at + TOKENS]
            plan.append([block.data_ptr(), len(listed), len(part), 0])
            listed += part
    mid = torch.full((len(x) * k, layout.width), float("nan"), device=x.device, dtype=x.dtype)
    out = torch.full((len(x) * k, layout.hidden), float("nan"), device=x.device, dtype=x.dtype)
    there = torch.tensor(plan, dtype=torch.int64).view(-1, ENTRY).to(x.device)
    ops.chunk_experts(layout, k, x, there, torch.tensor(listed, device=x.device), mid, out)
    return out.cpu()


def by_expert(ids: Tensor, blocks: Tensor) -> Groups:
    flat = ids.reshape(-1)
    return [(block, torch.nonzero(flat == expert)[:, 0].tolist()) for expert, block in enumerate(blocks)]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


@pytest.mark.unit
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.parametrize("format_", FORMATS)
def test_equal_to_torch(format_: Any, activation: Any, generator: torch.Generator) -> None:
    """An expert with more tokens than a tile holds, one with few, one with none; rows and columns end amid blocks."""
    oai = activation == "swiglu_oai"
    layout = any_layout(format_, 96, 32, biases=oai, interleaved=oai, activation=activation, limit=1.5)
    blocks = random_blocks(layout, 4, generator)
    dtype = torch.float32 if format_ == "float32" else torch.bfloat16
    x = torch.randn(TOKENS + 3, 96, generator=generator).to(dtype)
    ids = torch.stack([torch.zeros(len(x)), torch.arange(len(x)) % 2 * 2 + 1], 1).long()
    ids[5:, 1] = 3
    expected = run(TorchOps(), layout, by_expert(ids, blocks), x, 2)
    found = run(OPS, layout, by_expert(ids, blocks.to(DEVICE)), x.to(DEVICE), 2)
    off = (found - expected).abs()
    near = 1e-5 if dtype == torch.float32 else 1e-2  # the interpreter cuts off where a GPU rounds to bfloat16
    assert off.mean() < near * expected.abs().mean()
    assert off.max() < 2 * near * expected.abs().max()
    assert expected.abs().mean() > 0.01


@pytest.mark.unit
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_bits_depend_on_neither_company_nor_place(data: st.DataObject) -> None:
    """Items alone and in any group, in any order, with their block in any slot."""
    format_ = data.draw(st.sampled_from(FORMATS))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    layout = any_layout(format_, 32, 32)
    blocks = random_blocks(layout, 3, generator).to(DEVICE)
    x = torch.randn(TOKENS + 2, 32, generator=generator).to(torch.bfloat16 if format_ != "float32" else torch.float32)
    x = x.to(DEVICE)
    ids = torch.randint(3, (len(x), 1), generator=generator)
    together = run(OPS, layout, by_expert(ids, blocks), x, 1)
    assert not together.isnan().any()
    moved = torch.cat([torch.zeros_like(blocks[:1]), blocks.flip(0)])
    expert = data.draw(st.integers(0, 2))
    mine = torch.nonzero(ids[:, 0] == expert)[:, 0].tolist()
    chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, max_size=5, unique=True))
    alone = run(OPS, layout, [(moved[3 - expert], chosen)], x, 1)
    assert torch.equal(alone[chosen], together[chosen])
    others = [item for item in range(len(x)) if item not in chosen]
    assert alone[others].isnan().all()


@pytest.mark.unit
def test_tiles_of_scale_bound_the_columns_taken_at_once() -> None:
    layout = any_layout("fp8_tile", 96, 32)
    assert layout.tile == 48
    assert tile_columns(layout) == 16
    assert tile_columns(any_layout("bfloat16", 96, 32)) == 64


@pytest.mark.unit
def test_plans_are_brought_whole(generator: torch.Generator) -> None:
    given_ = torch.randint(-(1 << 60), 1 << 60, (700, ENTRY), generator=generator)
    given_ = given_.pin_memory() if DEVICE.type == "cuda" else given_
    there = torch.zeros(701, ENTRY, dtype=torch.int64, device=DEVICE)
    OPS.bring(given_, there[:700])
    assert torch.equal(there[:700].cpu(), given_)
    assert not there[700].any()


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weigh(dtype: torch.dtype, generator: torch.Generator) -> None:
    r, out = (torch.randn(n, 40, generator=generator).to(dtype) for n in (3, 6))
    weights = torch.rand(3, 2, generator=generator)
    expected, found = torch.empty_like(r), torch.empty_like(r, device=DEVICE)
    TorchOps().weigh(r, weights, out, expected)
    OPS.weigh(r.to(DEVICE), weights.to(DEVICE), out.to(DEVICE), found)
    torch.testing.assert_close(found.cpu(), expected)
    plain = r + (weights.view(-1)[:, None] * out).view(3, 2, 40).sum(1)
    torch.testing.assert_close(expected.float(), plain.float(), atol=0.05, rtol=0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 200])
def test_flash_attention_aligns_to_the_lower_right(keys: int) -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(heads, n, 64, generator=generator).bfloat16().cuda() for heads, n in ((4, 64), (2, keys), (2, keys))
    )
    assert attention.can_flash(q)
    found, log_sum = attention.flash_attention(q, k, v, 0.125)
    expected = attention.masked_attention(q, k, v, 0, keys - 64, 0, 0.125, None).transpose(0, 1)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    last = (q[:, -1:].float() @ k.float().repeat_interleave(2, 0).transpose(1, 2) * 0.125).logsumexp(-1)
    torch.testing.assert_close(log_sum[:, -1:], last, atol=1e-2, rtol=1e-2)
