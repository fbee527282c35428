"""Choosing the next token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from foreload.backend.sampling import Sampler, Sampling
from foreload.errors import UsageError

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5, -3.0])
VALUES = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=20)


@pytest.mark.unit
@settings(deadline=None)
@given(values=VALUES)
def test_greedy_is_the_largest(values: list[float]) -> None:
    logits = torch.tensor(values)
    assert values[Sampler(Sampling()).draw(logits)] == max(values)


@pytest.mark.unit
@settings(deadline=None)
@given(values=VALUES, temperature=st.floats(0.1, 10))
def test_temperature_divides_the_logits(values: list[float], temperature: float) -> None:
    logits = torch.tensor(values)
    found = Sampler(Sampling(temperature)).distribution(logits)
    torch.testing.assert_close(found, (logits.double() / temperature).softmax(0))


@pytest.mark.unit
@settings(deadline=None)
@given(values=VALUES, top_p=st.floats(0.01, 0.99))
def test_top_p_is_the_smallest_set(values: list[float], top_p: float) -> None:
    """The most likely tokens until their probability reaches top_p; among themselves as before."""
    logits = torch.tensor(values)
    full = logits.double().softmax(0)
    found = Sampler(Sampling(1.0, top_p)).distribution(logits)
    kept = found > 0
    assert float(full[kept].sum()) >= top_p - 1e-12
    assert float(full[kept].sum() - full[kept].min()) < top_p
    if (~kept).any():
        assert float(full[kept].min()) >= float(full[~kept].max())
    torch.testing.assert_close(found[kept], full[kept] / full[kept].sum())


@pytest.mark.unit
def test_same_seed_same_draws() -> None:
    def draws(seed: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed))
        return [sampler.draw(LOGITS) for _ in range(50)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


@pytest.mark.unit
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.9), (1.0, 0.6)])
def test_draws_follow_the_distribution(temperature: float, top_p: float) -> None:
    """Chi-square of 4,000 draws; with a fixed seed the outcome is the same every time."""
    sampler, n = Sampler(Sampling(temperature, top_p, seed=11)), 4000
    expected = sampler.distribution(LOGITS)
    found = torch.bincount(torch.tensor([sampler.draw(LOGITS) for _ in range(n)]), minlength=len(LOGITS))
    possible = expected > 0
    assert int(found[~possible].sum()) == 0
    assert chisquare(found[possible].numpy(), (expected[possible] * n).numpy()).pvalue > 0.001


@pytest.mark.unit
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"temperature": -0.1}, "temperature -0.1 must be from 0"),
        ({"temperature": float("nan")}, "temperature nan must be"),
        ({"temperature": 101.0}, "temperature 101.0 must be"),
        ({"top_p": 0.0}, "top_p 0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p 1.1 must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p nan must be"),
    ],
)
def test_impossible_values_are_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Sampling(**fields)
