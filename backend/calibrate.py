"""Calibration of a model from text (design: section 4): default vectors, estimator, recall, and the hybrid's choice.

Three splits that share no window: default vectors and estimator learn from the first, the second chooses per layer,
the third reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foreload.backend.engine import Engine
from foreload.backend.predict.calibration import Calibration, CalibrationMeta, as_stored
from foreload.backend.predict.lens import Seen
from foreload.backend.predict.network import Estimator
from foreload.backend.predict.recall import RecallSums, choose_hybrid, recall_report
from foreload.backend.predict.training import DefaultVectors, Trainer, Watch
from foreload.backend.texts import Texts, windows
from foreload.errors import UsageError
from foreload.machine import software
from foreload.settings import MAX_PREFETCH_DEPTH

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """How much text, in tokens. Default vectors see the first `vectors` of `train`; the estimator all of it."""

    train: int = 400_000
    vectors: int = 200_000
    selection: int = 16_384
    report: int = 16_384
    window: int = 256
    batch: int = 512  # tokens of a training step
    depth: int = MAX_PREFETCH_DEPTH
    seed: int = 0


@dataclass(frozen=True)
class Splits:
    """Windows of tokens."""

    train: list[list[int]]
    selection: list[list[int]]
    report: list[list[int]]

    @classmethod
    def of(cls, texts: Texts, engine: Engine, plan: Plan) -> Splits:
        """Report, selection, then training, from documents in an order drawn by the seed; UsageError for too little."""
        if plan.window > engine.options.context_tokens:
            raise UsageError(
                f"a window of {plan.window} tokens exceeds the context of {engine.options.context_tokens} tokens"
            )
        sizes = [max(1, tokens // plan.window) for tokens in (plan.report, plan.selection, plan.train)]
        documents = (document.text for document in texts.shuffled(plan.seed).documents)
        found = windows(documents, engine.tokenizer, plan.window, sum(sizes))
        if len(found) < 5:
            raise UsageError(
                f"the text gives {len(found)} windows of {plan.window} tokens: at least 5 are needed, "
                "one to report, one to choose by, the others to learn from"
            )
        report, selection = (max(1, min(size, len(found) // 5)) for size in sizes[:2])
        return cls(found[report + selection :], found[report : report + selection], found[:report])


def calibrate(engine: Engine, texts: Texts, plan: Plan, progress: Progress | None = None) -> Calibration:
    """The calibration of an engine's model, ready to be saved. The engine's settings decide nothing but speed.

    UsageError for a model with one MoE layer, or too little text.
    """
    if engine.shape.n_moe_layers < 2:
        raise UsageError("a model with one MoE layer has nothing to predict from: calibration needs two or more")
    splits = Splits.of(texts, engine, plan)
    run = _Calibrating(engine, splits, plan, texts.sources, progress or (lambda what, done, total: None))
    return run.all()


class _Calibrating:
    def __init__(
        self, engine: Engine, splits: Splits, plan: Plan, sources: tuple[str, ...], progress: Progress
    ) -> None:
        self._engine, self._splits, self._plan, self._sources = engine, splits, plan, sources
        self._progress = progress
        self._gates = engine.forward.decoder

    def all(self) -> Calibration:
        """Learn, choose, report."""
        learnt, unseen = self._vectors()
        learnt, trained = self._train(learnt)
        learnt = as_stored(learnt)  # so that what is reported is what will be read
        choice = choose_hybrid(self._recall(learnt, self._splits.selection, "choosing"))
        report = recall_report(self._recall(learnt, self._splits.report, "recall"), choice)
        update = {"hybrid": choice, "recall": report, "estimator": trained, "unseen_experts": unseen}
        return replace(learnt, meta=learnt.meta.model_copy(update=update))

    def _meta(self) -> CalibrationMeta:
        shape, checkpoint, splits = self._engine.shape, self._engine.checkpoint, self._splits
        pairs = (("train", splits.train), ("selection", splits.selection), ("report", splits.report))
        return CalibrationMeta(
            model=checkpoint.name,
            weights_hash=checkpoint.weights_hash,
            moe_layers=shape.n_moe_layers,
            experts=shape.experts,
            hidden=shape.hidden,
            texts=self._sources,
            tokens={name: sum(map(len, found)) for name, found in pairs},
            seed=self._plan.seed,
            unseen_experts=0,
            estimator={},
            hybrid=(),
            recall={},
            software=software(),
        )

    def _vectors(self) -> tuple[Calibration, int]:
        shape, device = self._engine.shape, self._engine.device
        lens = DefaultVectors(shape.n_moe_layers, shape.experts, shape.hidden, device)
        chosen = self._splits.train[: max(1, self._plan.vectors // self._plan.window)]
        for done, ids in enumerate(chosen):
            self._progress("default vectors", done, len(chosen))
            self._engine.score(ids, lens, logits=False)
        torch.manual_seed(self._plan.seed)
        estimator = Estimator(shape.hidden, shape.experts, shape.n_moe_layers).to(device)
        learnt = Calibration(self._meta(), lens.means(), lens.shared_means(), estimator)
        return learnt, int((lens.counts == 0).sum())

    def _train(self, learnt: Calibration) -> tuple[Calibration, dict[str, float]]:
        each = max(1, self._plan.batch // self._plan.window)
        batches = [self._splits.train[at : at + each] for at in range(0, len(self._splits.train), each)]
        trainer = Trainer(self._gates, self._engine.shape.scoring, learnt, len(batches))
        first = last = float("nan")
        for done, batch in enumerate(batches):
            self._progress("estimator", done, len(batches))
            pairs = [trainer.pairs(self._watch(ids)) for ids in batch]
            last = trainer.step(*(torch.cat(side, dim=1).clone() for side in zip(*pairs, strict=True)))
            first = last if done == 0 else first
        parameters = sum(p.numel() for p in learnt.estimator.parameters())
        learnt.estimator.requires_grad_(False)
        facts = {"steps": trainer.steps, "parameters": parameters, "first_kl_nats": first, "last_kl_nats": last}
        return learnt, {name: round(value, 4) for name, value in facts.items()}

    def _watch(self, ids: list[int]) -> list[Seen]:
        lens = Watch()
        self._engine.score(ids, lens, logits=False)
        return lens.seen

    @torch.inference_mode()
    def _recall(self, learnt: Calibration, chosen: Sequence[list[int]], what: str) -> Tensor:
        sums = RecallSums(self._gates, learnt, self._plan.depth)
        for done, ids in enumerate(chosen):
            self._progress(what, done, len(chosen))
            sums.add(self._watch(ids))
        return sums.table()
