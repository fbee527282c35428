"""Slots that a memory budget holds."""

import pytest
from sim_inputs import make_shape

from foreload.budget import fixed_bytes, slot_budget, working_bytes
from foreload.errors import BudgetError
from foreload.settings import Settings

SHAPE = make_shape()
SIZE = SHAPE.expert_bytes("float32")


@pytest.mark.unit
def test_what_is_left_is_slots():
    fixed = fixed_bytes(SHAPE, "float32", 100)
    assert fixed == SHAPE.dense_weights * 4 + SHAPE.kv_bytes("float32", 100) + working_bytes(SHAPE, "float32", 100)
    assert fixed_bytes(SHAPE, "float32", 101) - fixed == SHAPE.kv_bytes_per_token("float32") + 2 * SHAPE.head_dim * 4
    assert slot_budget(SHAPE, "float32", fixed + 5 * SIZE, 100) == 5
    assert slot_budget(SHAPE, "float32", fixed + 6 * SIZE - 1, 100) == 5
    assert slot_budget(SHAPE, "float32", fixed + 6 * SIZE, 100, Settings(headroom_bytes=1)) == 5
    half = fixed_bytes(SHAPE, "bfloat16", 100)
    assert slot_budget(SHAPE, "bfloat16", half + 5 * SIZE, 100) == 10


@pytest.mark.unit
def test_the_shortfall_is_the_smallest_increase_that_would_do():
    deep = Settings(predictor="gate", prefetch_depth=2)
    with pytest.raises(BudgetError, match="6 staging slots") as refused:
        slot_budget(SHAPE, "float32", 1000, 100, deep)
    enough = 1000 + refused.value.shortfall_bytes
    assert slot_budget(SHAPE, "float32", enough, 100, deep) == 6
    with pytest.raises(BudgetError):
        slot_budget(SHAPE, "float32", enough - 1, 100, deep)
