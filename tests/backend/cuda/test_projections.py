"""Every way to compute projections that the benchmark times gives the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.projections import Chain, Way, alike, by_rows, by_tiles, difference, in_use, ways

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.unit
@pytest.mark.parametrize(
    "way",
    [in_use, lambda pdl: by_tiles(pdl, 16, 32, 16, 4, 3), lambda pdl: by_rows(pdl, 4, 64, 4, False),
     lambda pdl: by_rows(pdl, 2, 32, 4, True)],
)  # fmt: skip
def test_ways_agree_whatever_the_number_of_tokens(way: Callable[[bool], Way]) -> None:
    chain = Chain((72, 40, 56, 24), 1, DEVICE, torch.float32)
    assert difference(chain, way(False), 3) < 1e-5
    assert alike(chain, way(False), (1, 2, 3, 5))
    wrong = Way("wrong", way(False).norm_linear, lambda x, weights, residual, y: y.copy_(residual))
    assert difference(chain, wrong, 3) > 0.1


@pytest.mark.unit
def test_names_tell_ways_apart() -> None:
    names = [way.name for way in ways(False)]
    assert names[0] == "in use"
    assert len(set(names)) == len(names)
