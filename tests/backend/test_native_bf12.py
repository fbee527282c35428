"""The native kernels of bf12: the bits of bf16, and outliers."""

from __future__ import annotations

from copy import copy
from itertools import accumulate, product
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from test_native import EXPERTS, ISAS, TOLERANCE, Case, shape_of
from torch import Tensor

from foreload.backend.experts.blocks import BlockCodec
from foreload.backend.native import Isa, pool
from foreload.formats import FORMATS, BlockLayout
from foreload.shape import Activation, ModelShape

CHUNK, HEAD, MOST, BASE = 32, 48, 11, 113
SIZES = [(160, 48), (20, 12), (33, 95), (576, 320)]

pytestmark = pytest.mark.skipif(not ISAS, reason="the native library is not there: no C compiler")


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FORMATS", (*(one for one in FORMATS if one != "bf12"), "bf12"))


def pack_rows(weights: Tensor, format: str) -> tuple[Tensor, None]:
    """bf16 [rows, columns] as uint8 [rows, 48 (ceil(columns / 32) + 1)]; codes count exponents from BASE."""
    assert format == "bf12"
    bits = F.pad(weights, (0, -weights.shape[1] % CHUNK)).view(torch.int16).numpy().view(np.uint16).astype(np.int32)
    exponents, codes = bits >> 7 & 255, (bits >> 7 & 255) - BASE
    fits = (exponents == 0) | ((codes > 0) & (codes < 16))
    codes = np.where(fits & (exponents > 0), codes, 0).reshape(len(bits), -1, 2, CHUNK // 2)
    rest = np.where(fits, bits >> 8 & 128 | bits & 127, 0).reshape(len(bits), -1, CHUNK)
    chunks = np.concatenate([codes[:, :, 0] | codes[:, :, 1] << 4, rest], 2).astype(np.uint8)
    heads = np.zeros((len(bits), HEAD // 2), np.uint16)
    for head, row, fit in zip(heads, bits, fits, strict=True):
        columns = np.nonzero(~fit)[0]
        assert len(columns) <= MOST
        head[0] = BASE | len(columns) << 8
        head[2 : 2 + 2 * len(columns)] = np.stack([columns, row[columns]], 1).ravel()
    return torch.from_numpy(np.concatenate([heads.view(np.uint8), chunks.reshape(len(bits), -1)], 1)), None


def in_bf12(case: Case) -> Case:
    """The same experts in bf12."""
    codec, blocks = BlockCodec(case.layout, case.shape, torch.bfloat16), []
    for block in case.blocks:
        views = codec.views(block)
        biases = [bias.float().view(torch.uint8) for bias in views[2:4] if bias is not None]
        parts = [pack_rows(views.gate_up, "bf12")[0], pack_rows(views.down, "bf12")[0], *biases]
        parts = [F.pad(part.flatten(), (0, -part.numel() % 64)) for part in parts]
        blocks.append(torch.cat(parts))
    at = list(accumulate(map(len, parts), initial=0))
    gate_up_bias, down_bias = at[2:4] if biases else (-1, -1)
    twin = copy(case)
    hidden, width = case.shape.hidden, case.shape.expert_width
    twin.layout = BlockLayout("bf12", hidden, width, 0, at[1], -1, -1, gate_up_bias, down_bias, at[-1])
    twin.blocks = torch.stack(blocks)
    return twin


def cases(shape: ModelShape, hidden: int, width: int, outliers: bool) -> list[Case]:
    """bf16 experts of a few exponents, with zeros of both signs and subnormals, and up to eleven others in a row."""
    found = []
    for activation, bf16 in product(get_args(Activation), (False, True)):
        case = Case(shape_of(shape, hidden, width, activation, activation != "silu"), "bf16", bf16)
        codec = BlockCodec(case.layout, case.shape, torch.bfloat16)
        for matrix in (views[i] for views in map(codec.views, case.blocks) for i in (0, 1)):
            matrix[matrix.abs() < 2.0 ** (BASE + 1 - 127)] = 0
            for i, value in enumerate((0.0, -0.0, 2.0**-130, -(2.0**-127))):
                matrix.view(-1)[i :: 17 + i] = value
            for i in range(min(MOST, matrix.shape[1]) if outliers else 0):
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
        assert (twin.blocks[:, 1] == 0).all()
        assert torch.equal(twin.run(isa, 2), case.run(isa, 1))


@pytest.mark.unit
@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name.lower())
@pytest.mark.parametrize(("hidden", "width"), SIZES)
def test_outliers_equal_float64(shape: ModelShape, isa: Isa, hidden: int, width: int) -> None:
    for case in cases(shape, hidden, width, True):
        twin = in_bf12(case)
        heads = twin.blocks[:, : twin.layout.down].view(EXPERTS, -1)
        assert heads[:, 1].any()
        together = twin.run(isa, 1)
        assert twin.off(together) < TOLERANCE["same"]
        assert torch.equal(together, twin.run(isa, 4))
        assert torch.equal(together, twin.run(isa, 2, slice(0, None)))
