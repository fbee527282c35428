"""Routing functions on toy gates: against a plain reading of each rule, and at their edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import GROUPED
from torch import Tensor

from foreload.backend.models.routing import SCORINGS, choice, route
from foreload.shape import ModelShape


def toy(experts: int, top_k: int, **fields: Any) -> ModelShape:
    return replace(GROUPED, experts=experts, top_k=top_k, **fields)


def logits(rows: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.unit
def test_sigmoid_of_hopeless_logits_keeps_non_zero_weights() -> None:
    """A bias of 12 chooses experts whose score is 1e-8; their weights come from the scores and still add up."""
    shape = toy(8, 3, scoring="sigmoid_topk", normalise_weights=True, routed_scale=1.8)
    correction = torch.tensor([0.0, 12, 0, 12, 0, 12, 0, 0])
    ids, weights = route(torch.full((2, 8), -18.0), correction, shape)
    assert sorted(ids[0].tolist()) == [1, 3, 5]
    torch.testing.assert_close(weights, torch.full((2, 3), 0.6))


@pytest.mark.unit
def test_correction_moves_the_ranking_and_not_the_weights() -> None:
    shape = toy(4, 2, scoring="sigmoid_topk", normalise_weights=False)
    gate = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    ids, weights = route(gate, torch.tensor([0.0, 0, 0, 5]), shape)
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, gate[:, [3, 0]].sigmoid())
    assert route(gate, None, shape)[0].tolist() == [[0, 1]]


@pytest.mark.unit
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("normalise", [True, False])
def test_sums_of_weights(scoring: Any, normalise: bool) -> None:
    shape, gate = toy(16, 4, scoring=scoring, normalise_weights=normalise), logits(50, 16)
    ids, weights = route(gate, None, shape)
    mass = {"softmax_topk": gate.softmax(-1), "sigmoid_topk": gate.sigmoid()}.get(scoring, gate)
    sums = torch.ones(50) if normalise or scoring == "topk_softmax" else mass.gather(1, ids).sum(1)
    torch.testing.assert_close(weights.sum(1), sums)


@pytest.mark.unit
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (1024, 1), (1024, 32), (5, 5)])
def test_sizes(scoring: Any, experts: int, top_k: int) -> None:
    shape = toy(experts, top_k, scoring=scoring)
    gate = logits(7, experts)
    ids, weights = route(gate, None, shape)
    assert ids.shape == weights.shape == (7, top_k)
    assert weights.dtype == torch.float32
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert (weights.diff(dim=1) <= 0).all()
    assert torch.equal(choice(gate, None, shape).topk(top_k).indices, ids)


@pytest.mark.unit
def test_groups_rank_by_their_best_or_by_their_two_best() -> None:
    """One group holds the best expert, another the best pair: the two rules part here."""
    scores = torch.tensor([[0.9, 0.1, 0.1, 0.7, 0.7, 0.1, 0.2, 0.2, 0.2]])
    two = {"groups": 3, "top_groups": 1, "normalise_weights": False}
    sigmoid = toy(9, 2, scoring="sigmoid_topk", **two)
    assert sorted(route(scores.logit(), None, sigmoid)[0][0].tolist()) == [3, 4]
    softmax = toy(9, 2, scoring="softmax_topk", **two)
    assert route(scores.log(), None, softmax)[0][0, 0] == 0
    assert set(route(scores.log(), None, softmax)[0][0].tolist()) <= {0, 1, 2}


@pytest.mark.unit
def test_groups_with_negative_choice_scores() -> None:
    """Experts of other groups are out even where those of the chosen group have negative biased scores."""
    shape = toy(6, 2, scoring="sigmoid_topk", groups=3, top_groups=1)
    correction = torch.tensor([-5.0, -5, -5, -5, -4, -4])
    ids, weights = route(torch.zeros(1, 6), correction, shape)
    assert sorted(ids[0].tolist()) == [4, 5]
    torch.testing.assert_close(weights, torch.full((1, 2), 0.5))


@pytest.mark.unit
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    scoring=st.sampled_from(("softmax_topk", "sigmoid_topk")),
    groups=st.sampled_from((1, 2, 4, 8)),
    used=st.integers(1, 8),
    top_k=st.integers(1, 4),
    scale=st.sampled_from((1.0, 2.5)),
    normalise=st.booleans(),
)
def test_against_a_plain_reading(
    seed: int, scoring: Any, groups: int, used: int, top_k: int, scale: float, normalise: bool
) -> None:
    size = 32 // groups
    used = min(groups, max(used, -(-top_k // size)))
    fields = {"scoring": scoring, "normalise_weights": normalise, "routed_scale": scale}
    shape = toy(32, top_k, **fields, groups=groups, top_groups=used)
    gate, bias = logits(1, 32, seed), torch.rand(32, generator=torch.Generator().manual_seed(seed))
    correction = bias if scoring == "sigmoid_topk" else None
    scores = (gate.softmax(-1) if scoring == "softmax_topk" else gate.sigmoid())[0].tolist()
    ranked = [s + b for s, b in zip(scores, bias.tolist(), strict=True)] if correction is not None else scores
    members = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    best = 2 if correction is not None else 1
    order = sorted(members, key=lambda group: -sum(sorted((ranked[e] for e in group), reverse=True)[:best]))
    allowed = [e for group in order[:used] for e in group] if groups > 1 else list(range(32))
    chosen = sorted(allowed, key=lambda e: -ranked[e])[:top_k]
    expected = torch.tensor([scores[e] for e in chosen])
    ids, weights = route(gate, correction, shape)
    assert ids[0].tolist() == chosen
    torch.testing.assert_close(weights[0], (expected / expected.sum() if normalise else expected) * scale)
