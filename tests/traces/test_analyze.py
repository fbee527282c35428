"""`foreload trace analyze`: its numbers, recomputed here in a few plain lines from the CSV's contents."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreload.cli import main
from foreload.traces.io import TraceReader
from foreload.traces.schema import DECODE, DRAFT_VERIFY, PredictionColumn, Trace
from foreload.traces.statistics import Gatherer, analyze

PREDICTIONS = (
    PredictionColumn(predictor="gate", depth=1, width=4),
    PredictionColumn(predictor="gate", depth=2, width=2),
)
LAYERS = (1, 2, 3)  # the model's numbers


@pytest.fixture
def trace(make_trace: Any) -> Trace:
    made: Trace = make_trace(
        requests=3,
        tokens=150,
        predictions=PREDICTIONS,
        has_weights=True,
        subjects=("code", "prose", "code"),
    )
    made.experts[made.request == 1] = made.experts[made.request == 1] // 2 * 2 % 8  # a subject that differs
    made.experts[:, :, 1] = np.where(
        made.experts[:, :, 0] == made.experts[:, :, 1], made.experts[:, :, 1] + 1, made.experts[:, :, 1]
    )
    return made


@pytest.fixture
def file(tmp_path: Path, trace: Trace, write_trace: Any) -> Path:
    write_trace(tmp_path / "t.parquet", trace, flush_rows=70)
    return tmp_path / "t.parquet"


def tokens_of(trace: Trace, layer: int) -> list[tuple[int, int, list[int]]]:
    """(request, position, experts) of every decoded token."""
    rows = [row for row in range(trace.rows) if trace.phase[row] == DECODE]
    return [(int(trace.request[row]), int(trace.position[row]), trace.experts[row, layer].tolist()) for row in rows]


def cosine(a: Counter[int], b: Counter[int]) -> float:
    dot = sum(a[e] * b[e] for e in a)
    return float(dot / (sum(v * v for v in a.values()) * sum(v * v for v in b.values())) ** 0.5)


def quantile(values: list[int], share: float) -> int:
    return sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]


@pytest.mark.integration
def test_load_reuse_and_drift_per_layer(file: Path, trace: Trace, capsys: Any) -> None:
    assert main(["trace", "analyze", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["tokens"], shown["rows"], shown["requests"]) == (450, trace.rows, 3)
    gaps_of_all: list[int] = []
    for index, row in enumerate(shown["layers"]):
        tokens = tokens_of(trace, index)
        load = Counter(e for _, _, experts in tokens for e in experts)
        total = sum(load.values())
        again = [len(set(a) & set(b)) for (q, p, a), (r, s, b) in pairwise(tokens) if q == r and s == p + 1]
        gaps, last = [], {}
        for request, position, experts in tokens:
            for e in experts:
                if (request, e) in last:
                    gaps.append(position - last[request, e])
                last[request, e] = position
        gaps_of_all += gaps
        by_subject = {
            name: Counter(e for q, _, experts in tokens if trace.meta.subjects[q] == name for e in experts)
            for name in ("code", "prose")
        }
        windows = [Counter(e for _, _, x in tokens[at : at + 128] for e in x) for at in (0, 128, 256)]
        bits = -sum(n / total * log2(n / total) for n in load.values())
        expected = {
            "layer": LAYERS[index],
            "unused": 8 - len(load),
            "top_share": max(load.values()) / total,
            "busiest_eighth": max(load.values()) / total,
            "entropy_bits": bits,
            "effective_experts": 2**bits,
            "next_token_overlap": sum(again) / (2 * len(again)),
            "reuse_p50": quantile(gaps, 0.5),
            "reuse_p90": quantile(gaps, 0.9),
            "first_uses": len(last) / total,
            "subject_cosine": cosine(by_subject["code"], by_subject["prose"]),
            "window_cosine": sum(cosine(a, b) for a, b in pairwise(windows)) / 2,
        }
        assert row == pytest.approx(expected)
    overall = shown["overall"]
    assert overall["reuse_p90"] == quantile(gaps_of_all, 0.9)
    for name in ("entropy_bits", "next_token_overlap", "subject_cosine"):
        assert overall[name] == pytest.approx(sum(row[name] for row in shown["layers"]) / 3)
    assert [(row["a"], row["b"]) for row in shown["subjects"]] == [("code", "prose")]
    assert [row["first_token"] for row in shown["windows"]] == [128, 256]


@pytest.mark.integration
def test_recall_per_predictor_depth_and_layer(file: Path, trace: Trace, capsys: Any) -> None:
    assert main(["trace", "analyze", str(file), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert trace.weights is not None
    rows = np.flatnonzero(trace.phase == DECODE)
    expected = []
    for p in PREDICTIONS:
        for index in range(p.depth, 3):
            at_k, at_2k, covered, total = 0, 0, 0.0, 0.0
            for row in rows:
                ranked = trace.predictions[p.predictor, p.depth][row, index].tolist()
                for expert, weight in zip(trace.experts[row, index], trace.weights[row, index], strict=True):
                    at_k += expert in ranked[:2]
                    at_2k += expert in ranked[:4]
                    covered += float(weight) * (expert in ranked[:2])
                    total += float(weight)
            uses = 2 * len(rows)
            wide = at_2k / uses if p.width == 4 else None
            expected.append(("gate", p.depth, LAYERS[index], len(rows), at_k / uses, covered / total, wide))
    names = ("predictor", "depth", "layer", "tokens", "recall", "weighted_recall", "recall_2k")
    for row, values in zip(shown["predictions"], expected, strict=True):
        assert row == pytest.approx(dict(zip(names, values, strict=True)))
    assert [(row["predictor"], row["depth"]) for row in shown["recall"]] == [("gate", 1), ("gate", 2)]


@pytest.mark.integration
def test_hit_rates_of_lru_by_hand(make_trace: Any, write_trace: Any, tmp_path: Path, capsys: Any) -> None:
    trace = make_trace(requests=1, prompt=0, tokens=60)
    write_trace(tmp_path / "t.parquet", trace)
    assert main(["trace", "analyze", str(tmp_path / "t.parquet"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["hit_rate"]
    for slots in range(9):
        hits = 0
        for layer in range(3):
            kept: list[int] = []  # least recently used last
            for row in trace.experts[:, layer].tolist():
                hits += len(set(row) & set(kept))
                kept = (sorted(row) + [e for e in kept if e not in row])[:slots]
        assert shown["overall"]["lru"][slots] == pytest.approx(hits / (3 * 60 * 2))
    assert shown["slots"] == list(range(9))
    assert shown["whole_recording"]


@pytest.mark.integration
def test_pieces_add_up(file: Path, trace: Trace) -> None:
    with TraceReader(file) as reader:
        found = analyze(reader)
    gathered = Gatherer(trace.meta, trace.rows)
    for at in range(0, trace.rows, 37):
        gathered.add(trace.take(slice(at, at + 37)))
    again = gathered.statistics()
    assert found.layers.equals(again.layers)
    assert found.predictions.equals(again.predictions)
    assert found.windows.equals(again.windows)
    assert found.overall == pytest.approx(again.overall)


@pytest.mark.unit
def test_rejected_drafts_and_missing_predictions_are_left_out(make_trace: Any) -> None:
    trace = make_trace(requests=1, prompt=0, tokens=40, predictions=PREDICTIONS[:1])
    trace.phase[:] = DRAFT_VERIFY
    trace.accepted[5:10] = False
    trace.predictions["gate", 1][:30] = -1
    gathered = Gatherer(trace.meta, trace.rows)
    gathered.add(trace)
    found = gathered.statistics()
    assert found.tokens == 35
    assert found.predictions["tokens"].tolist() == [10, 10]


@pytest.mark.integration
def test_page_is_self_contained_and_tables_show(file: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["trace", "analyze", str(file), "--out", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr()
    assert "over decoded tokens, prompts left out" in " ".join(shown.out.split())
    assert "over decoded tokens, prompts left out" in (tmp_path / "page.html").read_text()
    for text in ("Hit rate against slots", "belady: the best possible", "Recall of predictions", "entropy"):
        assert text in " ".join(shown.out.split())
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 4
    assert "Drift over time" in page
    assert page.replace("http://www.w3.org/2000/svg", "").count("http") == 0
    assert "nan" not in page.lower().replace("dominant", "")


@pytest.mark.integration
def test_a_short_recording_without_predictions(make_trace: Any, write_trace: Any, tmp_path: Path, capsys: Any) -> None:
    write_trace(tmp_path / "t.parquet", make_trace(requests=1, tokens=1))
    assert main(["trace", "analyze", str(tmp_path / "t.parquet"), "--out", str(tmp_path / "page.html")]) == 0
    assert "not known" in capsys.readouterr().out
    assert (tmp_path / "page.html").read_text().count("<svg") == 2


@pytest.mark.unit
def test_wrong_use(make_trace: Any, write_trace: Any, tmp_path: Path, capsys: Any) -> None:
    write_trace(tmp_path / "prompts.parquet", make_trace(requests=1, tokens=0))
    (tmp_path / "bad.parquet").write_text("no Parquet")
    for name, message in (
        ("prompts.parquet", "holds no decoded token: there is nothing to analyse"),
        ("bad.parquet", "trace is not a Parquet file"),
        ("none.parquet", "trace cannot be read"),
    ):
        assert main(["trace", "analyze", str(tmp_path / name)]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert message in shown.err
