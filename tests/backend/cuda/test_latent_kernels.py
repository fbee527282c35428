"""Kernels of latent attention against torch: odd sizes, several chunks, several rows; a row's bits are its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from foreload.backend.cuda.kernels.ops import AttentionScratch, Ops, chunk_tokens
from foreload.backend.cuda.kernels.torch_ops import TorchOps
from foreload.backend.models.attention import LATENT_EPS, LatentAttention
from foreload.backend.models.rope import rotary_tables
from foreload.backend.models.tensors import layer_tensors
from foreload.shape import Latent, ModelShape

pytest.importorskip("triton")
from foreload.backend.cuda.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = TritonOps(fence=DEVICE.type == "cuda")
REFERENCE = TorchOps()
CONTEXT = 200


def shape_of(latent: Latent, heads: int) -> ModelShape:
    """One layer of so many heads."""
    return ModelShape(
        family="any",
        layers=1,
        moe_layers=(0,),
        hidden=24,
        heads=heads,
        kv_heads=heads,
        head_dim=latent.nope_dim + latent.rope_dim,
        vocab=8,
        experts=2,
        top_k=1,
        expert_width=4,
        scoring="softmax_topk",
        normalise_weights=True,
        rope_theta=100.0,
        norm_eps=1e-5,
        max_positions=CONTEXT,
        tied_embeddings=True,
        qk_norm="none",
        latent=latent,
    )


SHAPES = {
    "odd": shape_of(Latent(0, 20, 10, 6, 7), 3),
    "compressed": shape_of(Latent(9, 16, 8, 8, 8), 4),
    "many_heads": shape_of(Latent(0, 80, 70, 4, 5), 33),  # two groups of heads, two tiles of rank and of dimensions
}


@dataclass
class Step:
    """What a step of latent attention wrote."""

    q: Tensor
    rows: Tensor
    mixed: Tensor
    out: Tensor


def block(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> LatentAttention:
    """The attention of `shape`, always with the same random weights, and the same rows, none of them after 150."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, generator=generator) / 4 for name, size in layer_tensors(shape, 0).items()}
    weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}
    assert shape.latent is not None
    made = LatentAttention(shape, shape.latent, weights, CONTEXT, rotary_tables(shape, CONTEXT, device, dtype))
    made.rows.copy_(torch.randn(made.rows.shape, generator=generator))
    made.rows[150:] = float("nan")  # never written yet, so never read
    return made


def stepped(ops: Ops, attention: LatentAttention, x: Tensor, position: int) -> Step:
    """A step of rows x [n, hidden] from `position` on, by the calls of `Pieces`."""
    n, shape, latent, device = len(x), attention.shape, attention.latent, x.device

    def full(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(size, float("nan"), device=device, dtype=dtype)

    now, norm = torch.tensor([1, position, 0], dtype=torch.int32, device=device), torch.ones_like(x[0])
    down, rows = full(n, len(attention.down)), attention.rows
    ops.norm_linear(x, norm, attention.down, None, down, None, shape.norm_eps)
    queries, kept = down.split([len(attention.q), latent.row], 1)
    if attention.q_b is not None and attention.q_a_norm is not None:
        expanded = full(n, len(attention.q_b))
        ops.norm_linear(queries, attention.q_a_norm, attention.q_b, None, expanded, None, LATENT_EPS)
        queries = expanded
    q = full(n, shape.heads, latent.row, dtype=x.dtype)
    key_up, tables = attention.key_up, attention.rotary
    ops.fold_store(queries, kept, attention.kv_a_norm, tables, now, key_up, q, rows, LATENT_EPS)
    scratch = AttentionScratch.on(device, n, shape.heads, latent.rank, CONTEXT)
    mixed, values = full(n, shape.heads * latent.rank), full(n, shape.heads * latent.value_dim, dtype=x.dtype)
    ops.latent_attend(q, rows, now, scratch, mixed, attention.value_up, values, shape.score_scale)
    out = torch.empty_like(x)
    ops.linear_residual(values, attention.o, None, torch.zeros_like(x), out)
    return Step(*(tensor.float().cpu() for tensor in (q, rows, mixed, out)))


def inputs(n: int, hidden: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(n)).to(dtype)


@pytest.mark.unit
@pytest.mark.parametrize("position", [0, 63, 150])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_attention(dtype: torch.dtype, name: str, position: int) -> None:
    """Rows that are the first, that begin a chunk, and that lie in the third; as the block itself has it."""
    assert chunk_tokens(CONTEXT) == 64
    shape, n = SHAPES[name], 2
    x = inputs(n, shape.hidden, dtype)
    expected = stepped(REFERENCE, block(shape, torch.device("cpu"), dtype), x, position)
    found = stepped(OPS, block(shape, DEVICE, dtype), x.to(DEVICE), position)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05  # the interpreter rounds to bfloat16 toward zero
    check: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    products = dtype == torch.float32 or DEVICE.type == "cuda"  # the interpreter has none of bfloat16
    for field in ("q", "rows", "mixed", "out") if products else ("q", "rows"):
        torch.testing.assert_close(getattr(found, field), getattr(expected, field), **check)
    assert not products or torch.isfinite(found.out).all()
    if dtype == torch.float32:  # in bfloat16 the block rounds in between
        whole = block(shape, torch.device("cpu"), dtype)
        normed = torch.nn.functional.rms_norm(x, (shape.hidden,), None, shape.norm_eps)
        torch.testing.assert_close(expected.out, whole.attend(normed, position), **check)


@pytest.mark.unit
@pytest.mark.parametrize("ops", [REFERENCE, OPS])
@pytest.mark.parametrize("name", SHAPES)
def test_a_row_does_not_depend_on_the_number_of_rows(name: str, ops: Ops) -> None:
    shape, device = SHAPES[name], torch.device("cpu") if ops is REFERENCE else DEVICE
    x = inputs(3, shape.hidden, torch.float32).to(device)
    alone, among = (stepped(ops, block(shape, device, torch.float32), x[:n], 127) for n in (1, 3))
    for field in ("q", "mixed", "out"):
        assert torch.equal(getattr(alone, field)[0], getattr(among, field)[0])
