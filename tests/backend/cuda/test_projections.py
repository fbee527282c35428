"""However many tokens a program of a projection computes at once, the numbers are the same."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from torch import Tensor

from benchmarks.projections import TOGETHER, Chain, alike, difference
from foreload.backend.cuda.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Wrong(TritonOps):
    def linear_residual(self, x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor, y: Tensor) -> None:
        y.copy_(residual)


@pytest.mark.unit
def test_a_token_does_not_depend_on_those_beside_it() -> None:
    chain = Chain((72, 40, 56, 24), 1, DEVICE, torch.float32)
    found = []
    for together in TOGETHER:
        ops = TritonOps(together=together)
        assert difference(chain, ops, 3) < 1e-5
        assert alike(chain, ops, (1, 2, 3, 5, 7))
        found.append(chain.results(ops, 7))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert difference(chain, Wrong(), 3) > 0.1
