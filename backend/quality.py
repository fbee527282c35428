"""What executing predicted experts costs: perplexity, KL and agreement beside exact routing, and greedy text.

A window is a prompt and the text after it. One causal forward over both equals decoding the text token by token, so
speculation is a mask: prompt tokens route truly, except where a variant says otherwise to show what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foreload.backend.engine import Engine
from foreload.backend.predict import Predictor
from foreload.backend.predict.lens import Seen
from foreload.backend.predict.training import Watch
from foreload.backend.texts import Texts, windows
from foreload.errors import UsageError
from foreload.machine import machine_name, software
from foreload.quality import ALL, Figures, Greedy, QualityReport, Variant
from foreload.settings import Settings

Progress = Callable[[int, int], None]
NOTHING_PREDICTED: dict[str, Any] = {
    "predictor": "none",
    "prefetch_depth": 0,
    "prefetch_width": None,
    "prefetch_rolled": False,
    "speculate_layers": (),
}


class Loss:
    """Sums over measured tokens of one variant."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)
        self.tokens = 0

    def add(self, logits: Tensor, exact: Tensor, targets: Tensor) -> None:
        """logits and exact [n, vocab], targets [n]."""
        ours, theirs = logits.float().log_softmax(-1), exact.float().log_softmax(-1)
        nats = functional.nll_loss(ours, targets, reduction="sum")
        kl = functional.kl_div(ours, theirs, reduction="sum", log_target=True)
        agree = (logits.argmax(-1) == exact.argmax(-1)).sum()
        self.sums += torch.stack([nats.double(), kl.double(), agree.double()])
        self.tokens += len(targets)

    def figures(self) -> Figures:
        """Means per token."""
        nats, kl, agree = (float(x) / max(1, self.tokens) for x in self.sums.tolist())
        return Figures(
            tokens=self.tokens,
            nats_per_token=nats,
            perplexity=math.exp(min(nats, 50.0)),
            kl=max(0.0, kl),
            top1_agreement=agree,
        )


class Speculating(Watch):
    """A lens that executes predictions at `layers`, for the tokens from `first` on."""

    def __init__(self, predictor: Predictor, layers: Sequence[int], first: int) -> None:
        super().__init__()
        self._predictor, self._layers, self._first = predictor, frozenset(layers), first

    def route(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """The true routing of the first tokens and of other layers; predictions elsewhere."""
        ids, weights = seen.ids, seen.weights
        if seen.at in self._layers:
            before = self.seen[-1]
            scores = self._predictor.ahead(before.at, before.r, before.ids, before.weights, 1)[0][0]
            guessed, shares = self._predictor.gates.choose(seen.at, scores)
            ids = torch.cat([ids[: self._first], guessed[self._first :]])
            weights = torch.cat([weights[: self._first], shares[self._first :]])
        self.seen = [Seen(seen.at, seen.r, seen.h, ids, weights)]
        return ids, weights


@dataclass(frozen=True)
class Trial:
    """A variant to measure."""

    name: str
    predictor: str
    layers: tuple[int, ...]
    in_prompts: bool = False

    def lens(self, predictor: Predictor | None, prompt_tokens: int) -> Watch:
        """What executes it in a forward over a prompt and the text after it."""
        if predictor is None:
            return Watch()
        return Speculating(predictor, self.layers, 0 if self.in_prompts else prompt_tokens)

    def settings(self, base: Settings) -> Settings:
        """Settings under which the engine executes it."""
        if not self.layers:
            return base
        return base.changed(
            predictor=self.predictor, prefetch_depth=1, prefetch_width=None, prefetch_rolled=False,
            speculate_layers=self.layers,
        )  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is measured, per subject."""

    window: int = 256
    prompt_tokens: int = 64
    windows: int = 32
    greedy_prompts: int = 4
    greedy_tokens: int = 64


def presets(layers: int) -> list[Trial]:
    """All but the first MoE layer by each predictor, and by router also in prompts."""
    rest = tuple(range(1, layers))
    return [
        Trial("router_pf", "quasi_hidden", rest),
        Trial("est_pf", "estimator", rest),
        Trial("hybrid_pf", "hybrid", rest),
        Trial("router_pf_prefill", "quasi_hidden", rest, in_prompts=True),
    ]


def quality(
    engine: Engine,
    trials: Sequence[Trial],
    texts: Texts,
    sizes: Sizes,
    progress: Progress | None = None,
    exact: Engine | None = None,
) -> QualityReport:
    """Measure `trials` beside the exact model; engines are left under the settings they had.

    `exact` is an engine with the experts as they are in the checkpoint, where `engine` has them in another format.

    UsageError for texts too short for one window. SettingsError if a predictor lacks its calibration.
    """
    if not 0 < sizes.prompt_tokens < sizes.window:
        raise UsageError(f"{sizes.prompt_tokens} prompt tokens must be fewer than the {sizes.window} of a window")
    chosen = _windows(engine, texts, sizes)
    measured = _Measuring(engine, exact or engine, trials, chosen, sizes, progress or (lambda done, total: None))
    variants = measured.variants()
    return QualityReport(
        model=engine.checkpoint.name,
        weights_hash=engine.checkpoint.weights_hash,
        dtype=engine.dtype_name,
        texts=texts.sources,
        window=sizes.window,
        prompt_tokens=sizes.prompt_tokens,
        machine=machine_name(),
        software=software(),
        variants=tuple(variants),
    )


def _windows(engine: Engine, texts: Texts, sizes: Sizes) -> dict[str, list[list[int]]]:
    found = {
        subject: windows(texts_of, engine.tokenizer, sizes.window, sizes.windows)
        for subject, texts_of in texts.by_subject().items()
    }
    kept = {subject: rows for subject, rows in found.items() if rows}
    if not kept:
        raise UsageError(f"no subject of the text fills one window of {sizes.window} tokens")
    return kept


class _Measuring:
    def __init__(
        self,
        engine: Engine,
        reference: Engine,
        trials: Sequence[Trial],
        chosen: Mapping[str, list[list[int]]],
        sizes: Sizes,
        progress: Progress,
    ) -> None:
        self._engine, self._trials, self._chosen, self._sizes = engine, trials, chosen, sizes
        self._reference = reference
        self._predictors = [engine.predictor(trial.predictor) if trial.layers else None for trial in trials]
        self._done = 0
        greedy = sum(min(len(rows), sizes.greedy_prompts) for rows in chosen.values()) if sizes.greedy_tokens else 0
        self._total = sum(map(len, chosen.values())) + greedy * (1 + sum(not t.in_prompts for t in trials))
        self._progress = progress

    def variants(self) -> list[Variant]:
        """Exact first, then the trials."""
        names = list(self._chosen)
        losses = [{name: Loss(self._engine.device) for name in (*names, ALL)} for _ in range(len(self._trials) + 1)]
        for subject, rows in self._chosen.items():
            for ids in rows:
                self._window(ids, [(row[subject], row[ALL]) for row in losses])
                self._step()
        exact = Trial("exact", "none", ())
        figures = [{name: loss.figures() for name, loss in row.items()} for row in losses]
        greedy = self._greedy()
        format = None if self._reference is self._engine else self._engine.settings.expert_format
        return [
            Variant(
                name=trial.name, predictor=trial.predictor, layers=trial.layers, in_prompts=trial.in_prompts,
                figures=found, greedy=text, expert_format=None if trial is exact else format,
            )
            for trial, found, text in zip([exact, *self._trials], figures, greedy, strict=True)
        ]  # fmt: skip

    def _window(self, ids: list[int], losses: Sequence[tuple[Loss, Loss]]) -> None:
        prompt = self._sizes.prompt_tokens
        targets = torch.tensor(ids[prompt:], device=self._engine.device)
        exact = self._reference.score(ids, Watch())[prompt - 1 : -1]
        scored = [exact]
        for trial, predictor in zip(self._trials, self._predictors, strict=True):
            scored.append(self._engine.score(ids, trial.lens(predictor, prompt))[prompt - 1 : -1])
        for logits, pair in zip(scored, losses, strict=True):
            for loss in pair:
                loss.add(logits, exact, targets)

    def _greedy(self) -> list[Greedy | None]:
        """For the exact model and each trial; none where prompts speculate, which the engine never does."""
        if not self._sizes.greedy_tokens:
            return [None] * (len(self._trials) + 1)
        exact = self._texts(self._reference, Trial("exact", "none", ()))
        found: list[Greedy | None] = [_compare(exact, exact)]
        for trial in self._trials:
            found.append(None if trial.in_prompts else _compare(self._texts(self._engine, trial), exact))
        return found

    def _texts(self, engine: Engine, trial: Trial) -> list[list[int]]:
        before = engine.settings
        engine.apply(trial.settings(before.changed(**NOTHING_PREDICTED)))
        try:
            return self._generated(engine)
        finally:
            engine.apply(before)

    def _generated(self, engine: Engine) -> list[list[int]]:
        sizes, found = self._sizes, []
        for rows in self._chosen.values():
            for ids in rows[: sizes.greedy_prompts]:
                prompt = ids[: sizes.prompt_tokens]
                found.append(engine.generate(prompt, sizes.greedy_tokens, stop=False).token_ids)
                self._step()
        return found

    def _step(self) -> None:
        self._done += 1
        self._progress(self._done, self._total)


def _compare(texts: Sequence[list[int]], exact: Sequence[list[int]]) -> Greedy:
    same = [[a == b for a, b in zip(*pair, strict=True)] for pair in zip(texts, exact, strict=True)]
    first = [row.index(False) if False in row else len(row) for row in same]
    tokens = len(exact[0])
    return Greedy(
        prompts=len(exact),
        tokens=tokens,
        identical=sum(place == tokens for place in first) / len(first),
        agreement=sum(map(sum, same)) / (len(same) * tokens),
        first_divergence=sum(first) / len(first),
    )
