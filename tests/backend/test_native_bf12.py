"""The native kernels of bf12: the bits of bf16, and outliers."""

from __future__ import annotations

from copy import copy
from itertools import product
from typing import get_args

import pytest
import torch
from test_native import EXPERTS, ISAS, TOLERANCE, Case, shape_of

from foreload.backend.experts.blocks import BlockCodec
from foreload.backend.native import Isa
from foreload.formats import BF12_OUTLIERS, block_layout, row_bytes
from foreload.shape import Activation, ModelShape

BASE = 113
"""The exponent below those that most weights have."""
SIZES = [(160, 48), (20, 12), (33, 95), (576, 320)]

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not there: no C compiler")


def in_bf12(case: Case) -> Case:
    """The same experts in bf12."""
    codec, twin = BlockCodec(case.layout, case.shape, torch.bfloat16), copy(case)
    twin.layout = block_layout("bf12", case.shape)
    twin.blocks = torch.zeros(EXPERTS, twin.layout.bytes, dtype=torch.uint8)
    packed = BlockCodec(twin.layout, case.shape, torch.bfloat16)
    for block, views in zip(twin.blocks, map(codec.views, case.blocks), strict=True):
        for part, tensor in zip(("gate_up", "down", "gate_up_bias", "down_bias"), views[:4], strict=True):
            if tensor is not None:
                packed.write(block, part, tensor)
    return twin


def outliers(twin: Case) -> torch.Tensor:
    """How many every row of gate_up has, [experts, rows]."""
    rows, hidden = 2 * twin.shape.expert_width, twin.shape.hidden
    return twin.blocks[:, : rows * row_bytes("bf12", hidden)].view(EXPERTS, rows, -1)[:, :, 1]


def cases(shape: ModelShape, hidden: int, width: int, others: bool) -> list[Case]:
    """bf16 experts of a few exponents, with zeros of both signs and subnormals, and up to eleven others in a row."""
    found = []
    for activation, bf16 in product(get_args(Activation), (False, True)):
        case = Case(shape_of(shape, hidden, width, activation, activation != "silu"), "bf16", bf16)
        codec = BlockCodec(case.layout, case.shape, torch.bfloat16)
        for matrix in (views[i] for views in map(codec.views, case.blocks) for i in (0, 1)):
            matrix[matrix.abs() < 2.0 ** (BASE + 1 - 127)] = 0
            for i, value in enumerate((0.0, -0.0, 2.0**-130, -(2.0**-127))):
                matrix.view(-1)[i :: 17 + i] = value
            for i in range(min(BF12_OUTLIERS, matrix.shape[1]) if others else 0):
                matrix[i :: 2 + i, 5 * i % matrix.shape[1]] = (-1.0) ** i * 2.0 ** (3 - 9 * (i % 3))
                matrix[i :: 5 + i, -1] = 3.0
        case.expect()
        found.append(case)
    return found


@pytest.mark.unit
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize(("hidden", "width"), SIZES)
def test_bf12_gives_the_bits_of_bf16(shape: ModelShape, isa: Isa, hidden: int, width: int) -> None:
    for case in cases(shape, hidden, width, False):
        twin = in_bf12(case)
        assert not outliers(twin).any(), "outliers come last"
        assert torch.equal(twin.run(isa, 2), case.run(isa, 1))


@pytest.mark.unit
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize(("hidden", "width"), SIZES)
def test_outliers_equal_float64(shape: ModelShape, isa: Isa, hidden: int, width: int) -> None:
    for case in cases(shape, hidden, width, True):
        twin = in_bf12(case)
        assert outliers(twin).any(), "no outliers"
        together = twin.run(isa, 1)
        assert twin.off(together) < TOLERANCE["same"]
        assert torch.equal(together, twin.run(isa, 4))
        assert torch.equal(together, twin.run(isa, 2, slice(0, None)))
