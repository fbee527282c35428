"""The shipped recordings: complete, small enough, and analysed as a few plain lines over the Parquet file say."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from foreload.cli import main
from foreload.settings import Settings
from foreload.traces.io import TraceReader
from foreload.traces.schema import DECODE, DRAFT_VERIFY

SAMPLES = Path(__file__).parents[2] / "traces" / "samples"
FILES = sorted(SAMPLES.glob("*.parquet"))
LAYER, SLOTS = 20, 32


def analysed(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["trace", "analyze", str(SAMPLES / name), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def column(name: str, what: str, phase: str = "decode") -> list[list[int]]:
    """A list column of the tokens of one phase, straight from the file."""
    table = pq.read_table(SAMPLES / name, columns=["phase", what]).to_pydict()
    return [list(ids) for found, ids in zip(table["phase"], table[what], strict=True) if found == phase]


@pytest.mark.unit
def test_sizes_and_cards() -> None:
    sizes = [path.stat().st_size for path in FILES]
    assert len(FILES) == 15
    assert max(sizes) <= 10e6
    assert sum(sizes) <= 20e6
    for path in FILES:
        with TraceReader(path) as reader:
            shape, weights = reader.meta.shape, reader.meta.weights_hash
        assert (len(shape["moe_layers"]), shape["experts"], shape["top_k"]) == (48, 128, 8)
        assert f"SHA-256 `{weights}" in path.with_suffix(".md").read_text(encoding="utf-8")


@pytest.mark.integration
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows(path: Path) -> None:
    with TraceReader(path) as reader:
        trace = reader.read()
    windows = path.stem.endswith(("-4", "-8"))
    rows = trace.phase == (DRAFT_VERIFY if windows else DECODE)
    if windows:
        assert rows.sum() == 400 * (int(path.stem[-1]) + 1)
        assert 0 < trace.accepted[rows].sum() < rows.sum()
    else:
        assert rows.sum() == (600 if "predictions" in path.stem else 2000)
    assert (trace.weights is not None) == bool(trace.predictions) == ("predictions" in path.stem)
    assert len({tuple(row) for row in trace.experts[rows][:, LAYER].tolist()}) > 100


@pytest.mark.integration
def test_analysis_of_a_layer(capsys: pytest.CaptureFixture[str]) -> None:
    name = "topo-literature.parquet"
    found, routed = analysed(name, capsys), column(name, f"e{LAYER}")
    load = np.bincount(np.ravel(routed), minlength=128) / np.size(routed)
    layer = found["layers"][LAYER]
    assert layer["unused"] == (load == 0).sum()
    assert layer["top_share"] == pytest.approx(load.max())
    assert layer["entropy_bits"] == pytest.approx(-sum(p * np.log2(p) for p in load if p))
    kept = [len({*a} & {*b}) / 8 for a, b in pairwise(routed)]
    assert layer["next_token_overlap"] == pytest.approx(sum(kept) / len(kept))
    at = found["hit_rate"]["layer_slots"].index(SLOTS)
    hits = lru_hits(column(name, f"e{LAYER}", "prefill"), routed)
    assert found["hit_rate"]["per_layer"]["lru"][LAYER][at] == pytest.approx(hits / np.size(routed))


def lru_hits(prompt: list[list[int]], routed: list[list[int]]) -> int:
    """Experts resident when their token comes; of a token's own the lower ids count as used later.

    The prompt's last chunk leaves its most demanded experts, the lower ids among equals.
    """
    chunk = Settings().prefill_chunk_tokens
    uses = Counter(np.ravel(prompt[(len(prompt) - 1) // chunk * chunk :]).tolist())
    kept = sorted(sorted(uses, key=lambda e: (-uses[e], e))[:SLOTS])
    hits = 0
    for experts in routed:
        hits += len({*kept} & {*experts})
        kept = [*sorted(experts), *(e for e in kept if e not in experts)][:SLOTS]
    return hits


@pytest.mark.integration
def test_recall_of_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    name = "topo-code-predictions.parquet"
    found, routed = analysed(name, capsys), column(name, f"e{LAYER}")
    for predictor, depth in (("gate", 1), ("quasi_hidden", 3), ("estimator", 1)):
        guessed = column(name, f"p{LAYER}_{predictor}_{depth}")
        (row,) = [
            r for r in found["predictions"] if (r["predictor"], r["depth"], r["layer"]) == (predictor, depth, LAYER)
        ]
        for width, measure in ((8, "recall"), (16, "recall_2k")):
            hits = [len({*ids} & {*guess[:width]}) for ids, guess in zip(routed, guessed, strict=True)]
            assert row[measure] == pytest.approx(sum(hits) / np.size(routed))
