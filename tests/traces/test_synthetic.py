"""Generated recordings have the statistics that were asked for; tolerances are stated beside each target."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreload.cli import main
from foreload.errors import UsageError
from foreload.simulator.curves import Curves, curve_steps, curves
from foreload.traces.fitting import fit
from foreload.traces.io import TraceReader, read_trace
from foreload.traces.schema import Trace, concatenate
from foreload.traces.statistics import Gatherer, Statistics
from foreload.traces.synthetic import (
    Synthetic,
    chunks,
    even_recall,
    hard,
    qwen3,
    shape_of,
    write_synthetic,
)

SMALL = Synthetic(shape_of(4, 32, 4), tokens=300, recall=even_recall((0.9, 0.7), 4), seed=3)


def made(spec: Synthetic) -> Trace:
    return concatenate(spec.meta(), chunks(spec))


def judged(trace: Trace, policies: Iterable[str] = ("lru", "lfru", "belady")) -> tuple[Statistics, Curves]:
    gathered = Gatherer(trace.meta, trace.rows)
    gathered.add(trace)
    return gathered.statistics(), curves(curve_steps([trace], trace.meta), tuple(policies))


def some_layers(spec: Synthetic, layers: int, tokens: int) -> Synthetic:
    """The same in its first layers; the last one's recall is the last one's of the whole."""
    shape = replace(spec.shape, layers=layers, moe_layers=tuple(range(layers)))
    recall = tuple((*row[: layers - 1], row[-1]) for row in spec.recall)
    return replace(spec, shape=shape, recall=recall, tokens=tokens)


@pytest.mark.integration
def test_preset_qwen3_hits() -> None:
    spec = qwen3()
    assert (spec.shape.n_moe_layers, spec.shape.experts, spec.shape.top_k) == (48, 128, 8)
    _, found = judged(made(replace(spec, tokens=1000, recall=())))
    slots = round(0.4 * 128)
    assert found.rate("lfru")[slots] == pytest.approx(0.82, abs=0.02)
    assert found.rate("belady")[slots] == pytest.approx(0.90, abs=0.02)


@pytest.mark.integration
def test_preset_qwen3_recall() -> None:
    spec = some_layers(qwen3(), 8, 500)
    found, _ = judged(made(spec), ())
    by_layer = found.predictions[found.predictions["depth"] == 1].set_index("layer")["recall"]
    for layer in (3, 4, 5, 6):
        assert by_layer[layer] == pytest.approx(0.90, abs=0.02)
    for layer in (1, 2, 7):
        assert by_layer[layer] == pytest.approx(0.65, abs=0.03)


@pytest.mark.integration
def test_preset_hard() -> None:
    spec = hard()
    assert (spec.shape.n_moe_layers, spec.shape.experts) == (48, 512)
    trace = made(some_layers(spec, 6, 1000))
    found, hits = judged(trace, ("lru",))
    assert found.overall["next_token_overlap"] == pytest.approx(0.37, abs=0.02)
    assert hits.rate("lru")[64] == pytest.approx(0.67, abs=0.02)
    recall = found.recall().set_index("depth")["recall"]
    for depth, target in enumerate((0.78, 0.66, 0.56, 0.50), 1):
        assert recall[depth] == pytest.approx(target, abs=0.02)
    # A list of the first half's 64 most popular experts serves the second half hardly better than any 64 of 512.
    shares = []
    for layer in range(6):
        uses = np.bincount(trace.experts[:500, layer].ravel(), minlength=512)
        shares.append(np.isin(trace.experts[500:, layer], np.argsort(-uses)[:64]).mean())
    assert 64 / 512 - 0.01 < np.mean(shares) < 64 / 512 + 0.06


@pytest.mark.integration
@pytest.mark.parametrize(("field", "values"), [("skew", (0.0, 1.0, 2.0)), ("recency", (0.0, 1.5, 3.0))])
def test_knobs_do_what_they_say(field: str, values: tuple[float, ...]) -> None:
    base = replace(SMALL, skew=0.0, recency=0.0, recall=())
    found = [judged(made(replace(base, **{field: value})), ())[0].overall for value in values]
    name = "busiest_eighth" if field == "skew" else "next_token_overlap"
    assert found[0][name] < found[1][name] < found[2][name]
    # Neither: each token draws 4 of 32 at random.
    assert found[0]["next_token_overlap"] == pytest.approx(4 / 32, abs=0.02)


@pytest.mark.unit
def test_recall_and_prefixes() -> None:
    trace = made(replace(SMALL, tokens=600))
    found, _ = judged(trace, ())
    for row in found.recall().itertuples():
        target = {1: 0.9, 2: 0.7}[row.depth]
        assert row.recall == pytest.approx(target, abs=0.02)
        assert row.recall_2k == pytest.approx(target + 0.6 * (1 - target), abs=0.02)
    for (_, depth), block in trace.predictions.items():
        assert (block[:, :depth] == -1).all()
        assert (block[:, depth:] >= 0).all()
        ordered = np.sort(block[:, depth:], axis=2)
        assert (ordered[:, :, 1:] != ordered[:, :, :-1]).all()


@pytest.mark.unit
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 3), (3, 5, 4), (2, 1024, 10)])
def test_any_shape(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    layers, experts, top_k = sizes
    recall = even_recall((0.5,) * (layers - 1), layers)
    spec = Synthetic(shape_of(layers, experts, top_k), tokens=20, requests=2, recall=recall)
    assert write_synthetic(tmp_path / "t.parquet", spec) == 40
    assert read_trace(tmp_path / "t.parquet").experts.shape == (40, layers, top_k)


@pytest.mark.integration
def test_subjects_drift() -> None:
    base = replace(SMALL, skew=2.0, recency=0.5, recall=(), tokens=512)
    steady, _ = judged(made(base), ())
    changing, _ = judged(made(replace(base, subject_every=128)), ())
    assert steady.overall["window_cosine"] > changing.overall["window_cosine"] + 0.1
    three, _ = judged(made(replace(base, requests=3)), ())
    assert three.subjects["a"].tolist() == ["subject 0", "subject 0", "subject 1"]
    assert three.overall["subject_cosine"] < steady.overall["window_cosine"] - 0.1


@pytest.mark.unit
def test_same_seed_same_recording(tmp_path: Path, capsys: Any) -> None:
    command = ["trace", "synthesize", "--layers", "2", "--experts", "8", "--top-k", "2", "--tokens", "50"]
    command += ["--predictability", "0.8", "--json"]
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main([*command, "--seed", seed, "--out", str(tmp_path / name)]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[0])
    assert shown["rows"] == 50
    assert shown["recall"] == [0.8]
    a, b, c = (read_trace(tmp_path / name) for name in "abc")
    assert np.array_equal(a.experts, b.experts)
    assert np.array_equal(a.predictions["gate", 1], b.predictions["gate", 1])
    assert not np.array_equal(a.experts, c.experts)
    assert "synthetic" in a.meta.source
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.integration
@pytest.mark.parametrize(("skew", "recency", "persistence"), [(0.8, 2.5, 16.0), (1.5, 1.0, 40.0), (0.2, 3.0, 6.0)])
def test_like_a_recording(skew: float, recency: float, persistence: float, tmp_path: Path) -> None:
    shape = shape_of(12, 32, 4)
    original = Synthetic(shape, 600, 1, skew, recency, persistence, even_recall((0.9, 0.7), 12), seed=3)
    write_synthetic(tmp_path / "t.parquet", original)
    with TraceReader(tmp_path / "t.parquet") as reader:
        fitted = replace(fit(reader), tokens=600, seed=9)
    assert fitted.shape == original.shape
    (before, cached), (after, again) = judged(made(original)), judged(made(fitted))
    for name in ("next_token_overlap", "busiest_eighth"):
        assert after.overall[name] == pytest.approx(before.overall[name], abs=0.04)
    for policy in ("lru", "lfru", "belady"):
        assert again.rate(policy)[8] == pytest.approx(cached.rate(policy)[8], abs=0.04)
    for depth in (0, 1):
        assert after.recall()["recall"][depth] == pytest.approx(before.recall()["recall"][depth], abs=0.02)


@pytest.mark.integration
def test_like_and_preset_on_the_command_line(tmp_path: Path, make_trace: Any, write_trace: Any, capsys: Any) -> None:
    write_trace(tmp_path / "real.parquet", make_trace(requests=2, tokens=40))
    out = str(tmp_path / "like.parquet")
    assert main(["trace", "synthesize", "--like", str(tmp_path / "real.parquet"), "--tokens", "30", "--out", out]) == 0
    assert "synthetic, like mini" in capsys.readouterr().out
    assert read_trace(Path(out)).meta.shape_hash == make_trace().meta.shape_hash
    out = str(tmp_path / "preset.parquet")
    assert main(["trace", "synthesize", "--preset", "qwen3", "--tokens", "3", "--out", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == 128
    assert [p.depth for p in read_trace(Path(out)).meta.predictions] == [1, 2, 3]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "qwen3", "--experts", "8"], "--layers, --experts and --top-k are those of --like or --preset"),
        (["--preset", "qwen3", "--like", "x"], "--like and --preset exclude each other"),
        (["--preset", "easy"], "'easy' is not one of 'qwen3', 'hard'"),
        (["--like", "none.parquet"], "trace cannot be read"),
        (["--experts", "4", "--top-k", "8"], "top_k is 8: it must be 1 to 4"),
        (["--predictability", "high"], "--predictability is 'high': numbers like .9,.8,.7 are needed"),
        (["--predictability", "1.2"], "predictability must be 0 to 1"),
        (["--layers", "2", "--predictability", ".9,.8"], "depths of predictability is 2: it must be 0 to 1"),
        (["--skew", "-1"], "skew is -1: it must be 0 to 20"),
        (["--tokens", "0"], "Input should be greater than or equal to 1"),
    ],
)
def test_wrong_use(flags: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["trace", "synthesize", "--out", str(tmp_path / "t.parquet"), *flags]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.unit
def test_too_short_to_fit(tmp_path: Path, make_trace: Any, write_trace: Any) -> None:
    write_trace(tmp_path / "t.parquet", make_trace(requests=1, tokens=5))
    with TraceReader(tmp_path / "t.parquet") as reader, pytest.raises(UsageError, match="a fit needs 32"):
        fit(reader)
