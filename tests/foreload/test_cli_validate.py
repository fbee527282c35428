"""What `foreload validate` prints of settings whose own turns spread too far to count."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from foreload.cli import validate
from foreload.settings import Settings
from foreload.simulator.validation import Comparison, Figures, compare, summarise

pytestmark = pytest.mark.unit
LONG = Settings(
    eviction="lfu", miss_action="cpu", cpu_threads=2, predictor="quasi_hidden", prefetch_depth=1, prefetch_width=8
)  # fmt: skip


def shown(*measured: tuple[Settings, float], width: int = 100) -> str:
    """What is printed of settings and their slower turn, in ms, beside one of 1 ms."""
    figures = Figures(1e6, 0.5, 0.0, 1000.0, time_ns={"wait_link": 10**6})
    table = compare([Comparison(settings, figures, [1e6, slow * 1e6]) for settings, slow in measured])
    values = {
        "model": "mini", "machine": "a 486", "repeats": 2, "emulated_link_bytes_per_s": None,
        "rows": table.to_dict(orient="records"), "summary": summarise(table).as_dict(),
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=width, highlight=False)
    validate._show(console, values)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_settings_that_are_not_counted_are_named_with_the_reason() -> None:
    flat = " ".join(shown((LONG, 1.2), (Settings(), 1.01)).split())
    assert "not counted as their own turns spread by more than 5 %: eviction=lfu" in flat
    assert "(18.2 %)" in flat


@pytest.mark.parametrize("width", [80, 100])
def test_long_settings_wrap_between_words(width: int) -> None:
    text = shown((LONG, 1.2), (Settings(), 1.01), width=width)
    for word in LONG.describe().split():
        assert text.count(word) == 2, f"{word} is cut among the settings or those that are not counted"
    assert [line.split()[:2] for line in text.splitlines() if "link " in line][:2] == [["1", "link"], ["2", "link"]]


def test_where_all_or_none_spread() -> None:
    assert "none, though the turns of every setting spread by more than 5 %" in shown((LONG, 1.2), (Settings(), 1.2))
    assert "none: every setting's own turns spread by at most 5 %" in shown((LONG, 1.0), (Settings(), 1.01))
