"""What one generated request was and cost."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE


@dataclass(frozen=True)
class DecodeStep:
    """One decode step: what it took, drafting included, how many tokens were drafted, and how many it added."""

    duration_ns: int
    drafted: int
    emitted: int


@dataclass(frozen=True)
class Generation:
    """One finished request. Its decode steps come after the first token, which prefill gives."""

    prompt_tokens: int
    token_ids: list[int]
    ttft_ns: int
    steps: list[DecodeStep]
    counters: NDArray[np.int64] = field(repr=False)  # [3 phases, MoE layers, counters] of this request alone

    @property
    def decode_ns(self) -> int:
        """Time of all decode steps."""
        return sum(step.duration_ns for step in self.steps)

    @property
    def decode_tokens(self) -> int:
        """Tokens that decode steps added."""
        return sum(step.emitted for step in self.steps)

    @property
    def tpot_ms(self) -> float:
        """Milliseconds of decode per token after the first; nan without one."""
        return self.decode_ns / self.decode_tokens / 1e6 if self.steps else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a decode step adds; nan without a step. 1 without drafts."""
        return self.decode_tokens / len(self.steps) if self.steps else float("nan")

    @property
    def acceptance(self) -> list[float]:
        """Share of drafts kept by their place in the window, the first draft first; empty without drafts."""
        deepest = max((step.drafted for step in self.steps), default=0)
        return [self._accepted_at(place) for place in range(1, deepest + 1)]

    def _accepted_at(self, place: int) -> float:
        offered = [step for step in self.steps if step.drafted >= place]
        return sum(step.emitted > place for step in offered) / len(offered)

    @property
    def experts_per_layer_step(self) -> float:
        """Mean distinct experts that a layer-step demanded; nan without a step."""
        demanded = self.counters[DECODE, :, [Counter.HITS, Counter.LATE, Counter.MISSES]].sum()
        return float(demanded) / (len(self.steps) * self.counters.shape[1]) if self.steps else float("nan")
