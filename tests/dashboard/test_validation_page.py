"""The page of a validation stands alone and shows what the rows say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreload.dashboard.svg import decades
from foreload.dashboard.validation import render, write_page
from foreload.settings import Settings
from foreload.simulator.validation import Comparison, Figures, compare, summarise

pytestmark = pytest.mark.unit


@pytest.fixture
def found() -> dict[str, Any]:
    pairs = [
        Comparison(
            Settings(), Figures(11e6, 0.5, 0.1, 9.0, time_ns={"wait_link": 9}), [10e6], Figures(10e6, 0.5, 0.1, 9.0)
        ),
        Comparison(Settings(eviction="lfu"), Figures(2e6, 0.5, 0.1, 9.0, time_ns={"head": 9}), [1e6, 3e6]),
    ]
    rows = compare(pairs)
    plain = [{k: None if v != v else v for k, v in row.items()} for row in rows.to_dict(orient="records")]
    return {
        "model": "a <b> model",
        "machine": "two cores",
        "emulated_link_bytes_per_s": 10**8,
        "profile_date": "2026-01-02T03:04:05",
        "profile_hash": "abc",
        "repeats": 3,
        "summary": summarise(rows, one_point=True).as_dict(),
        "rows": plain,
    }


def test_page(found: dict[str, Any], tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", found)
    text = (tmp_path / "page.html").read_text()
    assert "a &lt;b&gt; model" in text
    assert "two cores, link emulated at 0.1 GB/s" in text
    assert "eviction=lfu: measured 2 ms, predicted 2 ms (+0.0 %)" in text
    assert text.count("<circle") == 2
    assert "are off by 5.0 % in the median" in text  # of both, though one is left out of the figures below
    assert "leave out 1 setting whose" in text
    assert "spread over 5 %: eviction=lfu" in text
    assert "Calibrated: no prediction" in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_without_calibration(found: dict[str, Any]) -> None:
    found["summary"]["calibrated"] = None
    assert "Calibrated" not in render(found)


def test_round_values_of_a_logarithmic_axis() -> None:
    assert decades(0.4, 30) == [0.5, 1, 2, 5, 10, 20]
    assert decades(2.6, 3.5) == [2.6, 2.8, 3.0, 3.2, 3.4]


@given(value=st.floats(1e-6, 1e6))
def test_an_axis_about_one_value_has_numbers(value: float) -> None:
    found = decades(value / 1.15, value * 1.15)
    assert 2 <= len(found) <= 8
    assert all(value / 1.151 <= one <= value * 1.151 for one in found)


def test_one_setting(found: dict[str, Any]) -> None:
    found["rows"] = found["rows"][:1]
    found["rows"][0] |= {"measured_tpot_ms": 3.0, "predicted_tpot_ms": 3.0}
    found["summary"] |= {"settings": 1, "apart": []}
    text = render(found)
    assert "1 setting, simulated from the profile" in text
    assert text.count("<circle") == 1
    assert ">3</text>" in text
