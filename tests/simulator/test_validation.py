"""Errors, ranks and regret from made-up pairs."""

import dataclasses

import numpy as np
import pytest
from sim_inputs import make_profile, make_shape, manual_trace

from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.simulator import Comparison, compare, simulate, summarise

SHAPE = make_shape(layers=1)


def predicted(tpot_ns):
    result = simulate(manual_trace(SHAPE, [[[0, 1]]]), make_profile(SHAPE), SHAPE, Settings(), (1,))
    return dataclasses.replace(result, token_ns=np.array([tpot_ns]))


@pytest.mark.unit
def test_rows_and_summary():
    pairs = [
        Comparison(Settings(), predicted(1_100_000), [1_000_000.0, 900_000.0, 1_200_000.0], 0.25),
        Comparison(Settings(eviction="lfu"), predicted(1_800_000), [2_000_000.0]),
        Comparison(Settings(admission="none"), predicted(1_000_000), [1_250_000.0]),
    ]
    table = compare(pairs)
    assert table["error_pct"].tolist() == pytest.approx([10, -10, -20])
    assert table["spread_pct"].tolist() == pytest.approx([30, 0, 0])
    assert table["settings"].tolist() == ["default", "eviction=lfu", "admission=none"]
    assert table["hit_rate_difference"].isna().tolist() == [False, True, True]
    summary = summarise(table)
    assert summary.mean_error_pct == pytest.approx(-20 / 3)
    assert summary.p50_error_pct == pytest.approx(10)
    assert summary.worst_error_pct == pytest.approx(-20)
    assert summary.rank_agreement == pytest.approx(1 / 3)
    assert summary.regret_pct == pytest.approx(25)
    assert summary.as_dict()["settings"] == 3


@pytest.mark.unit
def test_one_row_has_no_rank():
    summary = summarise(compare([Comparison(Settings(), predicted(5), [5.0])]))
    assert (summary.rank_agreement, summary.regret_pct, summary.mean_error_pct) == (None, 0, 0)


@pytest.mark.unit
def test_nothing_to_compare_is_refused():
    with pytest.raises(UsageError, match="nothing was compared"):
        summarise(compare([]))
    with pytest.raises(UsageError, match="no measured time above 0 for default"):
        compare([Comparison(Settings(), predicted(5), [])])
