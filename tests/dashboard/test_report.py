"""The page about a run: whole, self-contained, honest about sources."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from foreload.dashboard import svg
from foreload.dashboard.report import render, render_report
from foreload.dashboard.result import load_run
from foreload.errors import FileError, SettingsError

pytestmark = pytest.mark.unit
VOID = {"meta", "link", "br", "hr", "img", "input"}


class Balanced(HTMLParser):
    """Raises on tags that do not close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(folder: Path) -> str:
    out = folder / "report.html"
    render_report(folder, out)
    return out.read_text()


def test_the_page_is_whole_and_self_contained(run_folder: Any) -> None:
    text = page(run_folder())
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"""(src|href)\s*=|@import|url\(|<script""", text)
    assert len(text) < 100_000
    for figure in re.findall(r"<svg.*?</svg>", text, re.S):
        ET.fromstring(figure)


def test_the_page_says_what_matters(run_folder: Any) -> None:
    text = page(run_folder())
    for expected in (
        "1.93 times as fast",
        "7.55 ms",
        "14.6 ms",
        "-3.4 %",
        "+2.3 %",
        "bound: what the best possible cache still moves",
        "4.2 experts per token",
        "emulated, 2.00 GB/s",
        "slots_per_layer",
        "12, 4, 7",
        "integer program, depth 0 (chosen)",
        "measured, on an emulated link",
        "assumed",
        "AMD EPYC 9B14",
        "torch 2.13.0",
        "316510da3bf2",
        "26 tokens of 2 requests",
        "timeline.json",
        "in which nothing is computed: wait for a copy, wait for the CPU",
    ):
        assert expected in text, expected


def test_no_gain_is_said(run_folder: Any) -> None:
    assert "Nothing beats the default settings" in page(run_folder(speedup=1.0))


def test_not_measured_is_said(run_folder: Any) -> None:
    outcome = {"predicted_tpot_ms": 14.1, "hit_rate": 0.4, "bytes_per_token": 0}
    text = page(run_folder(default=outcome, tuned=outcome, error_pct={}, speedup=1.2))
    assert "speed-up, simulated" in text
    assert "not measured" in text
    assert "None" not in text


def test_a_noisy_profile_is_said(run_folder: Any, make_profile: Any) -> None:
    folder = run_folder()
    assert "other work ran meanwhile" not in page(folder)
    make_profile(noise_pct=40.0).save(folder / "profile.json")
    assert "varied by 40.0 %: other work ran meanwhile" in page(folder)


def test_a_folder_with_the_result_alone(run_folder: Any) -> None:
    folder = run_folder(bounds={}, candidates=[], breakdown={})
    for name in ("profile.json", "settings.json", "trace.parquet", "timeline.json"):
        (folder / name).unlink()
    text = page(folder)
    assert "1.93 times as fast" in text
    assert "The machine" not in text
    assert "Settings that were compared" not in text


def test_text_is_escaped(run_folder: Any) -> None:
    folder = run_folder()
    result = json.loads((folder / "result.json").read_text())
    result["meta"]["model"] = "<script>alert(1)</script>"
    result["breakdown"]["default"]["time_ms"] = {"<b>": 1.0}
    (folder / "result.json").write_text(json.dumps(result))
    text = render(load_run(folder))
    assert "<script>" not in text
    assert "<b><" not in text
    assert ">&lt;b&gt;<" in text


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("result.json", "{", "result.json: result is not valid JSON"),
        ("result.json", "[]", "result.json: result must be an object"),
        ("result.json", '{"default": {}}', "result.json: field 'default.predicted_tpot_ms' is missing"),
        ("profile.json", "{}", "profile.json: field 'meta' is missing"),
        ("settings.json", '{"slots": 3}', "settings.json: unknown field 'slots': known are"),
        ("trace.parquet", "x", "trace.parquet: trace is not a Parquet file"),
    ],
)
def test_wrong_files(run_folder: Any, name: str, content: str, expected: str) -> None:
    folder = run_folder()
    (folder / name).write_text(content)
    with pytest.raises((FileError, SettingsError)) as caught:
        render_report(folder, folder / "report.html")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no run here: result.json is missing"):
        render_report(tmp_path, tmp_path / "report.html")


@pytest.mark.parametrize(
    ("top", "expected"), [(0, [0]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (14.6, [0, 5, 10]), (730, [0, 200, 400, 600])]
)
def test_ticks(top: float, expected: list[float]) -> None:
    assert svg.ticks(top) == pytest.approx(expected)


def test_figures_without_values() -> None:
    for figure in (
        svg.bars("t", [svg.Bar("a", 0.0, "0", "#000")], {}, "ms"),
        svg.stacked("t", {"a": {"x": 0.0}}, "ms"),
        svg.columns("t", ["1"], {"a": [0.0]}, ["#000"]),
    ):
        ET.fromstring(figure)
