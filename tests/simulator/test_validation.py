"""Errors, regimes, ranks and regret from made-up pairs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau
from sim_inputs import make_profile, make_shape, make_trace

from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.simulator.compiled import simulate
from foreload.simulator.validation import (
    CPU,
    GPU,
    LINK,
    MIXED,
    Comparison,
    Figures,
    compare,
    rank_agreement,
    regime,
    summarise,
)

pytestmark = pytest.mark.unit


def figures(ms: float, hits: float = 0.0, late: float = 0.0, kind: str = "wait_link") -> Figures:
    return Figures(ms * 1e6, hits, late, 1000.0, time_ns={kind: int(ms * 1e6)})


def pair(
    predicted: Figures, *measured_ms: float, measured: Figures | None = None, settings: Settings | None = None
) -> Comparison:
    return Comparison(settings or Settings(), predicted, [ms * 1e6 for ms in measured_ms], measured)


PAIRS = [
    pair(figures(1.1, 0.25, 0.05), 1.0, 0.99, 1.01, measured=figures(1.0, 0.24, 0.02)),
    pair(figures(1.8, kind="wait_cpu"), 2.0, settings=Settings(eviction="lfu")),
    pair(figures(1.0, kind="head"), 1.25, settings=Settings(admission="none")),
    pair(figures(0.1), 3.0, 1.0, 2.0, settings=Settings(eviction="random")),
]


def test_rows() -> None:
    table = compare(PAIRS)
    assert table["error_pct"].tolist() == pytest.approx([10, -10, -20, -95])
    assert table["measured_spread_pct"].tolist() == pytest.approx([2, 0, 0, 100])
    assert table["settings"].tolist() == ["default", "eviction=lfu", "admission=none", "eviction=random"]
    assert table["regime"].tolist() == [LINK, CPU, GPU, LINK]
    assert table["measured_hit_rate"].isna().tolist() == [False, True, True, True]
    assert table["predicted_late_rate"].tolist() == [0.05, 0, 0, 0]
    assert table["predicted_ttft_ms"].isna().all()


def test_summary() -> None:
    """The setting whose own turns spread by 100 % is named apart and spoils nothing."""
    summary = summarise(compare(PAIRS))
    assert summary.settings == 4
    assert summary.apart == ("eviction=random",)
    assert summary.mean_error_pct == pytest.approx(-20 / 3)
    assert (summary.p50_error_pct, summary.worst_error_pct) == (pytest.approx(10), pytest.approx(-20))
    assert summary.p90_error_pct == pytest.approx(18)
    assert (summary.rank_agreement, summary.ranked_pairs) == (pytest.approx(1 / 3), 3)
    assert (summary.pick, summary.regret_pct) == ("admission=none", pytest.approx(25))
    assert summary.errors["tpot_pct"][CPU].mean == pytest.approx(-10)
    assert summary.errors["tpot_pct"]["all"].settings == 3
    assert summary.errors["hits_and_late_points"]["all"].worst == pytest.approx(4)
    assert summary.errors["late_points"][LINK].mean == pytest.approx(3)
    assert "ttft_pct" not in summary.errors
    assert summary.all_settings is not None
    assert summary.all_settings.worst == pytest.approx(-95)
    assert summary.calibrated is None
    assert summary.as_dict()["errors"]["tpot_pct"]["all"]["p50"] == pytest.approx(10)


def test_one_point_is_reported_beside() -> None:
    """Scaled so that the first is exact; the figures of the predictions stay."""
    summary = summarise(compare(PAIRS), one_point=True)
    assert summary.calibrated is not None
    assert summary.calibrated.by == "default"
    assert summary.calibrated.factor == pytest.approx(1 / 1.1)
    assert summary.calibrated.others is not None
    assert summary.calibrated.others.worst == pytest.approx(100 * (1 / 1.1 / 1.25 - 1))
    assert summary.mean_error_pct == pytest.approx(-20 / 3)


def test_all_noisy_leaves_none_out() -> None:
    summary = summarise(compare([pair(figures(1.0), 1.0, 2.0), pair(figures(2.0), 2.0, 3.0)]))
    assert summary.apart == ()
    assert summary.errors["tpot_pct"]["all"].settings == 2


def test_one_row_has_no_rank() -> None:
    summary = summarise(compare([pair(figures(5), 5.0)]))
    assert (summary.rank_agreement, summary.regret_pct, summary.mean_error_pct) == (None, 0, 0)


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing was compared"):
        summarise(compare([]))
    with pytest.raises(UsageError, match="no measured time above 0 for default"):
        compare([pair(figures(5))])


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 20)), min_size=2, max_size=12, unique_by=lambda pair: pair[1])
)
def test_ranks_are_kendalls_where_all_pairs_tell(pairs: list[tuple[int, int]]) -> None:
    """Whole numbers up to 20 differ by 5 % at least; ties of predictions agree with nothing."""
    predicted, measured = zip(*pairs, strict=True)
    found, count = rank_agreement(predicted, measured)
    assert count == len(pairs) * (len(pairs) - 1) // 2
    if len(set(predicted)) == len(predicted):
        assert found == pytest.approx(kendalltau(predicted, measured).statistic)


def test_pairs_that_measure_alike_have_no_order() -> None:
    assert rank_agreement([1.0, 2.0, 3.0], [10.0, 9.9, 12.0]) == (1.0, 2)
    assert rank_agreement([1.0, 2.0], [1.0, 1.01]) == (None, 0)


def test_regimes() -> None:
    assert regime({"wait_link": 3, "wait_issue": 3, "head": 5}) == LINK
    assert regime({"wait_cpu": 6, "head": 5}) == CPU
    assert regime({"wait_gpu": 6, "wait_link": 5}) == GPU
    assert regime({"wait_link": 4, "wait_cpu": 4, "head": 4}) == MIXED
    assert regime({}) == MIXED


def test_figures_of_a_simulation() -> None:
    shape = make_shape()
    result = simulate(make_trace(shape), make_profile(shape), shape, Settings(cache_ratio=0.25), (2,) * 4)
    found = Figures.of(result)
    assert found.tpot_ns == result.tpot_ns
    assert found.hit_rate == result.hit_rate
    assert found.bytes_per_token == result.bytes_per_token()
    assert found.ttft_ns == pytest.approx(float(np.mean(result.ttft_ns)))
    assert sum(found.time_ns.values()) == result.total_ns
