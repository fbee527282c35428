"""Drafts by look-up against a plain search, and the rejection rule against the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from foreload.backend.sampling import Sampler, Sampling
from foreload.backend.speculate.accept import Verdict, judge
from foreload.backend.speculate.base import NOTHING, Proposal
from foreload.backend.speculate.ngram import LONGEST, SHORTEST, NgramDrafter

GREEDY = Sampler(Sampling())


def searched(text: list[int], gamma: int) -> list[int]:
    """The same by looking at every place of the text, the longest ends first and the latest place first."""
    for size in range(LONGEST, SHORTEST - 1, -1):
        for at in range(len(text) - size - 1, -1, -1):
            if len(text) > size and text[at : at + size] == text[-size:]:
                grown = list(text)
                for n in range(gamma):
                    grown.append(grown[at + size + n])
                return grown[len(text) :]
    return []


@pytest.mark.unit
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 9), st.data())
def test_ngram_finds_what_a_search_finds(text: list[int], gamma: int, data: st.DataObject) -> None:
    """Also when it has followed the text in pieces, and when it comes into a running text."""
    expected = searched(text, gamma)
    fresh, following = NgramDrafter(), NgramDrafter()
    fresh.start(text)
    ends = sorted(data.draw(st.lists(st.integers(1, len(text)), min_size=1, max_size=4)))
    following.start(text[: ends[0]])
    for end in ends[1:]:
        following.propose(text[:end], 1, GREEDY)
    assert fresh.propose(text, gamma, GREEDY).tokens == expected
    assert following.propose(text, gamma, GREEDY).tokens == expected


@pytest.mark.unit
def test_ngram_forgets_the_text_before() -> None:
    drafter = NgramDrafter()
    drafter.start([1, 2, 3, 1, 2])
    assert drafter.propose([1, 2, 3, 1, 2], 2, GREEDY).tokens == [3, 1]
    drafter.start([1, 2])
    assert drafter.propose([1, 2], 2, GREEDY) is NOTHING


@pytest.mark.unit
@given(st.lists(st.integers(0, 4), min_size=0, max_size=6), st.integers(0, 2**31))
def test_greedy_keeps_the_targets_choices(drafts: list[int], seed: int) -> None:
    logits = torch.randint(0, 3, (len(drafts) + 1, 5), generator=torch.Generator().manual_seed(seed)).float()
    expected: list[int] = []
    for row in range(len(drafts) + 1):
        expected.append(int(np.argmax(logits[row].numpy())))  # numpy: the first of equals
        if row == len(drafts) or drafts[row] != expected[-1]:
            break
    verdict = judge(GREEDY, logits, Proposal(drafts))
    assert (verdict.accepted, [*drafts[: verdict.accepted], verdict.token]) == (len(expected) - 1, expected)


@pytest.mark.unit
def test_a_window_ends_at_the_end_token() -> None:
    proposal = Proposal([7, 0, 8])
    assert Verdict(3, 9).emitted(proposal, frozenset([0])) == [7, 0]
    assert Verdict(3, 9).emitted(proposal, frozenset()) == [7, 0, 8, 9]
    assert Verdict(1, 9).emitted(proposal, frozenset([0])) == [7, 9]


# A toy language: five tokens, each drawn by the one before it.

VOCAB, DRAWS, WINDOW, LENGTH = 5, 20_000, 2, 2
Rule = Callable[[Sampler, Tensor, Proposal], Verdict]


def chain(seed: int) -> Tensor:
    """Logits [token before, token]."""
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def drawn_texts(rule: Rule, sampling: Sampling, point_mass: bool) -> np.ndarray:
    """How often each text of two tokens after token 0 came out of verify steps of `WINDOW` drafts."""
    target, draft, sampler = chain(1), chain(2), Sampler(sampling)
    seen = np.zeros((VOCAB,) * LENGTH)
    likeliest = draft.argmax(-1).tolist()
    q = [sampler.distribution(draft[token]) for token in range(VOCAB)]
    for _ in range(DRAWS):
        text = [0]
        while len(text) <= LENGTH:
            tokens: list[int] = []
            for _ in range(WINDOW):
                before = (text + tokens)[-1]
                tokens.append(likeliest[before] if point_mass else sampler.choose(q[before]))
            rows = [text[-1], *tokens]
            proposal = Proposal(tokens, None if point_mass else torch.stack([q[row] for row in rows[:-1]]))
            text += rule(sampler, target[rows], proposal).emitted(proposal, frozenset())
        seen[tuple(text[1 : LENGTH + 1])] += 1
    return seen


def p_value(seen: np.ndarray, sampling: Sampling) -> float:
    """Of the counts under the target's own distribution; texts it never draws must not be there."""
    sampler, target = Sampler(sampling), chain(1)
    p = torch.stack([sampler.distribution(row) for row in target]).numpy()
    expected = np.zeros_like(seen)
    for a, b in product(range(VOCAB), repeat=LENGTH):
        expected[a, b] = DRAWS * p[0, a] * p[a, b]
    assert (seen[expected == 0] == 0).all()
    frequent = expected >= 5
    counts, wanted = [*seen[frequent], seen[~frequent].sum()], [*expected[frequent], expected[~frequent].sum()]
    if wanted[-1] == 0:
        counts, wanted = counts[:-1], wanted[:-1]
    return float(chisquare(counts, wanted).pvalue)


SAMPLINGS = [Sampling(0.7, 1.0, seed=3), Sampling(1.0, 0.95, seed=5)]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("sampling", "point_mass"),
    [(SAMPLINGS[0], True), (SAMPLINGS[0], False), (SAMPLINGS[1], False)],
    ids=["temperature-sure_drafts", "temperature-drawn_drafts", "top_p-drawn_drafts"],
)
def test_sampled_text_has_the_targets_distribution(sampling: Sampling, point_mass: bool) -> None:
    found = p_value(drawn_texts(judge, sampling, point_mass), sampling)
    print(f"chi-square over {DRAWS} texts of {LENGTH} tokens: p = {found:.3f}")
    assert found > 0.001


@pytest.mark.unit
def test_a_wrong_rule_shows() -> None:
    """Keeping a draft with probability p(x) and then drawing from p, not from what is left of it."""

    def careless(sampler: Sampler, logits: Tensor, proposal: Proposal) -> Verdict:
        for at, token in enumerate(proposal.tokens):
            if sampler.uniform() >= float(sampler.distribution(logits[at])[token]):
                return Verdict(at, sampler.draw(logits[at]))
        return Verdict(len(proposal.tokens), sampler.draw(logits[-1]))

    assert p_value(drawn_texts(careless, SAMPLINGS[0], True), SAMPLINGS[0]) < 1e-6
