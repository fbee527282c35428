"""The tables of both models' predictions, from the files that are in the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculating_tables
from benchmarks.speculating_tables import RESULTS, TOPO, main, of_mini, of_topo


@pytest.mark.unit
def test_the_file_is_what_the_figures_say(tmp_path: Path) -> None:
    """`benchmarks/results/speculating.md` is current; every predictor, variant and layer is in it."""
    text = main(["--out", str(tmp_path / "s.md")])
    assert (tmp_path / "s.md").read_text() == text == (RESULTS / "speculating.md").read_text()
    for section, layers in (("## mini", 7), ("## topo", 47)):
        part = text.split(section)[1].split("\n## ")[0]
        for name in speculating_tables.PREDICTORS:
            assert part.count(f"\n| {name} |") == 4
        for name in speculating_tables.VARIANTS:
            assert part.count(f"\n| {name} |") == 1
        assert all(f"\n| {layer} |" in part for layer in range(1, layers + 1))
    assert "| GSM8K | 0.950 | 0.576 |" in text


@pytest.mark.unit
def test_figures_are_those_of_the_files() -> None:
    mini = of_mini(json.loads((RESULTS / "speculating-mini.json").read_text()))
    topo = of_topo(json.loads(TOPO.read_text()))
    assert mini.loss("router_pf") == pytest.approx(41.1, abs=0.1)
    assert 1 - mini.loss("hybrid_pf") / mini.loss("router_pf") == pytest.approx(0.5686, abs=1e-3)
    for one in (mini, topo):
        assert one.loss("exact") == 0
        for name in speculating_tables.ALONE:
            measured = [kl for kl in one.alone[name] if kl is not None]
            assert len(measured) > 0
            assert min(measured) >= 0
        assert len(one.hybrid) == len(one.layers) + 1 == len(one.alone["estimator"]) + 1


@pytest.mark.unit
def test_layers_that_were_not_measured_are_left_open(tmp_path: Path) -> None:
    """A run that ran out of time says nothing of the last layers."""
    values = json.loads(TOPO.read_text())
    for name in values["layers_alone"]:
        values["layers_alone"][name][3:] = [None] * 45
    (tmp_path / "topo.json").write_text(json.dumps(values))
    text = main(["--topo", str(tmp_path / "topo.json"), "--out", str(tmp_path / "s.md")])
    assert "at 1 of 2 layers (1)" in text.split("## topo")[1]
