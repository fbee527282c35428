"""What a prompt copies before it is routed: which experts, how many, and what becomes of those copied in vain."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreload.backend.policy import Brain, Counter
from foreload.backend.policy.prompt import SURE
from foreload.backend.policy.state import ABSENT, KEPT, LANDED, PREFILL
from foreload.settings import Settings
from foreload.traces.synthetic import shape_of

EXPERTS, LAYERS, K = 8, 3, 2
SHAPE = shape_of(LAYERS, EXPERTS, K)


def brain_of(slots: int = 2) -> Brain:
    return Brain(SHAPE, Settings(slots_per_layer=(slots,) * LAYERS), (slots,) * LAYERS)


def counts_of(tokens: dict[int, int]) -> np.ndarray:
    counts = np.zeros(EXPERTS, np.int32)
    for expert, n in tokens.items():
        counts[expert] = n
    return counts


def land(brain: Brain) -> None:
    while (key := brain.next_copy(PREFILL)) >= 0:
        brain.complete(key)


@pytest.mark.unit
def test_a_long_first_chunk_wants_any_a_short_one_none() -> None:
    brain = brain_of()
    assert brain.prefill_ahead(1, SURE * EXPERTS - 1).tolist() == []
    assert brain.prefill_ahead(1, SURE * EXPERTS).tolist() == [0, 1]  # as many as staging holds


@pytest.mark.unit
@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=EXPERTS, max_size=EXPERTS), st.sets(st.integers(0, EXPERTS - 1)))
def test_most_tokens_so_far_come_first(tokens: list[int], resident: set[int]) -> None:
    brain = brain_of()
    brain.prefill_targets(1, np.array(tokens, np.int32), False)
    brain.state.status[1, list(resident)] = KEPT
    absent = [e for e in range(EXPERTS) if tokens[e] and e not in resident]
    expected = sorted(absent, key=lambda e: (-tokens[e], e))[:K]
    assert brain.prefill_ahead(1, K).tolist() == expected


@pytest.mark.unit
def test_what_was_copied_in_vain_is_counted_and_its_slot_comes_back() -> None:
    brain = brain_of()
    free = brain.state.scalars.copy()
    assert brain.prefill_fetch(1, 3, True)
    assert brain.prefill_fetch(1, 4, True)
    assert not brain.prefill_fetch(1, 5, True)
    land(brain)
    assert brain.status(1, 3) == brain.status(1, 4) == LANDED
    target = brain.prefill_targets(1, counts_of({4: 2}), True)
    for expert in (3, 4):
        brain.prefill_done(1, expert, target)
    assert (brain.status(1, 3), brain.status(1, 4)) == (ABSENT, KEPT)
    found = dict(zip(Counter, brain.counters[PREFILL, 1].tolist(), strict=True))
    assert {c.name: n for c, n in found.items() if n} == {"MISSES": 1, "PREFETCHED": 2, "WASTED": 1}
    brain.check_integrity()
    assert brain.state.scalars[0] == free[0] - 1


@pytest.mark.unit
def test_a_new_request_forgets_the_last_prompt() -> None:
    brain = brain_of()
    brain.prefill_targets(1, counts_of({4: 2}), False)
    assert brain.prefill_ahead(1, K).tolist() == [4]
    brain.start_request()
    assert brain.prefill_ahead(1, K).tolist() == []
