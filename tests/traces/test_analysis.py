"""Figures drawn from a recording."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreload.traces.analysis import expert_load, reuse
from foreload.traces.export import HEAD, write_csv
from foreload.traces.io import TraceReader
from foreload.traces.schema import Trace

pytestmark = pytest.mark.unit


def test_load_and_reuse(make_trace: Any) -> None:
    trace: Trace = make_trace(requests=1, prompt=1, tokens=3)
    trace.experts[:, 0] = [[0, 1], [0, 1], [0, 1], [0, 1]]
    trace.experts[:, 1] = [[0, 1], [2, 3], [3, 4], [4, 5]]
    load = expert_load(trace)
    assert load[0] == {"layer": 1, "unused": 6, "top_share": 0.5}
    assert load[1] == {"layer": 2, "unused": 2, "top_share": 0.25}
    assert reuse(trace)[:2] == [1.0, 0.5]  # the prompt's row is no decoded token


def test_reuse_is_unknown_without_pairs(make_trace: Any) -> None:
    assert reuse(make_trace(requests=1, prompt=3, tokens=1)) == [None, None, None]


def test_csv(tmp_path: Path, make_trace: Any, write_trace: Any) -> None:
    trace = make_trace(requests=1, prompt=1, tokens=1, has_weights=True)
    write_trace(tmp_path / "t.parquet", trace)
    with TraceReader(tmp_path / "t.parquet") as reader:
        assert write_csv(tmp_path / "t.csv", reader) == 12
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == HEAD
    assert [int(row["expert"]) for row in rows] == trace.experts.reshape(-1).tolist()
    assert {row["layer"] for row in rows} == {"1", "2", "3"}
    assert trace.weights is not None
    np.testing.assert_allclose([float(row["weight"]) for row in rows], trace.weights.reshape(-1))
