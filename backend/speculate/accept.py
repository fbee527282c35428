"""Which drafts the target keeps, and the token it adds (the standard rejection rule, arXiv 2211.17192, section 2.3).

Greedy: drafts are kept as long as each is the target's first choice; among equal logits the lowest id is first, as in
plain decoding. Sampled: draft x is kept with probability min(1, p(x) / q(x)); at the first one that is not, the token
is drawn from max(0, p - q) normalised, and from p after the last. Either way the text is distributed as the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from foreload.backend.sampling import Sampler
from foreload.backend.speculate.base import Proposal


@dataclass(frozen=True)
class Verdict:
    """How many drafts are kept, and the target's own token after them."""

    accepted: int
    token: int

    def emitted(self, proposal: Proposal, stop_ids: frozenset[int]) -> list[int]:
        """The tokens the step adds to the text, ending with the first of `stop_ids`."""
        tokens = [*proposal.tokens[: self.accepted], self.token]
        ends = [at for at, token in enumerate(tokens) if token in stop_ids]
        return tokens[: ends[0] + 1] if ends else tokens


def judge(sampler: Sampler, logits: Tensor, proposal: Proposal) -> Verdict:
    """The verdict on a window: logits [drafts + 1, vocab] after the text and after each draft."""
    if sampler.greedy:
        choices = logits.argmax(-1).tolist()
        accepted = 0
        while accepted < len(proposal.tokens) and choices[accepted] == proposal.tokens[accepted]:
            accepted += 1
        return Verdict(accepted, choices[accepted])
    for at, token in enumerate(proposal.tokens):
        target = sampler.distribution(logits[at])
        draft = None if proposal.distributions is None else proposal.distributions[at]
        offered = 1.0 if draft is None else float(draft[token])
        if sampler.uniform() * offered >= float(target[token]):
            return Verdict(at, sampler.choose(_residual(target, token, draft)))
    return Verdict(len(proposal.tokens), sampler.draw(logits[-1]))


def _residual(target: Tensor, token: int, draft: Tensor | None) -> Tensor:
    """max(0, p - q) normalised; q is a point mass on `token` without a distribution."""
    if draft is None:
        left = target.clone()
        left[token] = 0.0
    else:
        left = (target - draft).clamp_(min=0.0)
    total = float(left.sum())
    return left / total if total > 0 else target
