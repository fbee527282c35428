"""Calibration: default vectors against a direct mean, an estimator that learns, splits, and the same twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import words

from foreload.backend.calibrate import Plan, Splits, calibrate
from foreload.backend.engine import Engine
from foreload.backend.experts.blocks import run_expert
from foreload.backend.predict.calibration import META, Calibration, as_stored
from foreload.backend.predict.recall import NAMES, RecallSums, choose_hybrid, recall_report, recalled
from foreload.backend.predict.training import DefaultVectors, Trainer, Watch
from foreload.backend.recorder import Prompt
from foreload.backend.texts import Texts
from foreload.errors import UsageError

MakeEngine = Callable[..., Engine]
RNG = np.random.default_rng(0)
TEXTS = Texts([Prompt("", words(*RNG.integers(0, 64, 200).tolist())) for _ in range(8)], ("made up",))
PLAN = Plan(train=1024, vectors=512, selection=128, report=128, window=32, batch=64, seed=1)


@pytest.mark.integration
def test_default_vectors_are_the_mean_output(make_engine: MakeEngine) -> None:
    engine, lens, watch = make_engine(), DefaultVectors(3, 8, 32, torch.device("cpu")), Watch()
    ids = RNG.integers(0, 64, 40).tolist()
    engine.score(ids, lens)
    engine.score(ids, watch)
    for at, seen in enumerate(watch.seen):
        for expert in range(8):
            mine = (seen.ids == expert).any(-1)
            assert int(lens.counts[at, expert]) == int(mine.sum())
            direct = torch.zeros(32)
            if mine.any():
                direct = run_expert(seen.h[mine], *engine.slab.views(at, expert)).mean(0)
            torch.testing.assert_close(lens.means()[at, expert], direct, atol=1e-5, rtol=1e-4)
    assert not lens.shared_means().any()


@pytest.mark.unit
def test_unseen_experts_and_shared_means() -> None:
    lens = DefaultVectors(1, 4, 2, torch.device("cpu"))
    out = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    lens.ran(0, torch.tensor([[0, 2], [2, 0]]), out, torch.tensor([[1.0, 0.0], [3.0, 2.0]]))
    assert lens.means()[0].tolist() == [[4.0, 5.0], [0.0, 0.0], [4.0, 5.0], [0.0, 0.0]]
    assert lens.shared_means().tolist() == [[2.0, 1.0]]


@pytest.mark.integration
def test_a_calibration_of_the_engine(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine, steps = make_engine(), []
    found = calibrate(engine, TEXTS, PLAN, lambda *step: steps.append(step))
    meta = found.meta
    assert {what for what, _, _ in steps} == {"default vectors", "estimator", "choosing", "recall"}
    assert meta.weights_hash == engine.checkpoint.weights_hash
    assert meta.tokens == {"train": 1024, "selection": 128, "report": 128}
    assert [len(row) for row in meta.hybrid] == [3, 3]
    assert meta.hybrid[0][0] is None
    assert meta.hybrid[1][:2] == (None, None)
    for name in (*NAMES, "hybrid"):
        for form in ("plain", "rolled"):
            assert set(meta.recall[name][form]) == {"depth_1", "depth_2"}
            assert len(meta.recall[name][form]["depth_1"]["recall"]) == 2
    one = {form: meta.recall["gate"][form]["depth_1"]["mean"] for form in ("plain", "rolled")}
    assert one["plain"] == one["rolled"]
    read = Calibration.load(found.save(tmp_path / "c") and tmp_path / "c")
    assert torch.equal(read.dv, found.dv)
    assert all(
        torch.equal(a, b) for a, b in zip(read.estimator.parameters(), found.estimator.parameters(), strict=True)
    )
    json.loads((tmp_path / "c" / META).read_text())


@pytest.mark.integration
def test_the_same_text_and_seed_give_the_same(make_engine: MakeEngine) -> None:
    one, two = (calibrate(make_engine(), TEXTS, PLAN) for _ in range(2))
    assert torch.equal(one.dv, two.dv)
    assert one.meta == two.meta


@pytest.mark.integration
@pytest.mark.parametrize("scoring", ["softmax_topk", "sigmoid_topk"])
def test_the_estimator_learns_what_gates_say(make_engine: MakeEngine, calibration: Path, scoring: str) -> None:
    engine, found = make_engine(), as_stored(Calibration.load(calibration))
    trainer = Trainer(engine.forward.decoder, scoring, found, 200)
    watch = Watch()
    engine.score(np.random.default_rng(6).integers(0, 64, 64).tolist(), watch)
    q, target = (side.clone() for side in trainer.pairs(watch.seen))
    assert q.shape == (2, 64, 32)
    seen = watch.seen[1]
    expected = seen.h @ engine.forward.decoder.layers[1].gate.T
    torch.testing.assert_close(target[0], expected, atol=1e-5, rtol=1e-4)
    losses = [trainer.step(q, target) for _ in range(200)]
    assert losses[-1] < 0.2 * losses[0]
    assert min(losses) >= 0


@pytest.mark.unit
def test_splits_share_no_window(make_engine: MakeEngine) -> None:
    splits = Splits.of(TEXTS, make_engine(), PLAN)
    seen = [tuple(ids) for part in (splits.train, splits.selection, splits.report) for ids in part]
    assert len(set(seen)) == len(seen)
    assert {len(ids) for ids in seen} == {32}


@pytest.mark.integration
def test_too_little_text_or_too_long_a_window(make_engine: MakeEngine) -> None:
    with pytest.raises(UsageError, match="the text gives 2 windows of 32 tokens: at least 5 are needed"):
        calibrate(make_engine(), Texts([Prompt("", words(*range(64)))], ()), PLAN)
    with pytest.raises(UsageError, match="a window of 97 tokens exceeds the context of 96 tokens"):
        calibrate(make_engine(), TEXTS, Plan(window=97))


@pytest.mark.unit
def test_recall_counts_experts_and_weights() -> None:
    ids, weights = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[0.6, 0.4], [0.7, 0.3]])
    assert [float(x) for x in recalled(ids, ids, weights, 5)] == [2.0, 2.0]
    half = recalled(torch.tensor([[1, 4], [3, 1]]), ids, weights, 5)
    assert [float(x) for x in half] == pytest.approx([1.0, 1.3])


@pytest.mark.unit
def test_hybrid_takes_the_best_on_the_selection_split() -> None:
    table = torch.zeros(3, 2, 2, 3, 4)
    table[NAMES.index("estimator"), 0, 0, 1, 0] = 0.9
    table[NAMES.index("gate"), 0, 0, 2, 0] = 0.8
    table[:, 1, 0, 2, 0] = 1.0  # rolled forms do not choose
    choice = choose_hybrid(table)
    assert choice == ((None, "estimator", "gate"), (None, None, "quasi_hidden"))
    report = recall_report(table, choice)
    assert report["hybrid"]["plain"]["depth_1"]["recall"] == [0.9, 0.8]
    assert report["hybrid"]["plain"]["depth_1"]["mean"]["recall"] == 0.85


@pytest.mark.integration
def test_recall_sums_equal_a_count(make_engine: MakeEngine, calibration: Path) -> None:
    engine, watch = make_engine(calibration=calibration), Watch()
    engine.score(RNG.integers(0, 64, 24).tolist(), watch)
    sums = RecallSums(engine.forward.decoder, Calibration.load(calibration), 4)
    with torch.inference_mode():
        sums.add(watch.seen)
    table = sums.table()
    assert table.shape == (3, 2, 2, 3, 4)
    before, after = watch.seen[0], watch.seen[2]
    scores = engine.predictor("gate").ahead(0, before.r, before.ids, before.weights, 2)[1][0]
    guesses, hits = scores.topk(2, -1).indices.tolist(), 0
    for guess, true in zip(guesses, after.ids.tolist(), strict=True):
        hits += len(set(guess) & set(true))
    assert float(table[NAMES.index("gate"), 0, 1, 2, 0]) == pytest.approx(hits / (2 * 24))
