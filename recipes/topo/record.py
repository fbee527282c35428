"""The recordings: what is decoded, with which text and seed, and how it becomes trace files with cards."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreload.traces.io import TraceWriter
from foreload.traces.schema import DECODE, DRAFT_VERIFY, PREFILL, PredictionColumn, TraceMeta
from recipes.train.export import END_ID

from .bundle import recompress
from .decode import Decoder, Kept, PredictionKey, Sampler
from .live import Live
from .predictors import Predictor
from .text import SUBJECTS, Texts, given_tokens, title
from .verify import Draft, Verified, verify

PREDICTIONS: tuple[PredictionKey, ...] = (
    *(("gate", h) for h in (1, 2, 3)),
    *(("quasi_hidden", h) for h in (1, 2, 3)),
    ("estimator", 1),
)


@dataclass(frozen=True)
class Plan:
    """Lengths of everything recorded, in tokens or verify steps."""

    prompt: int = 256
    decode: int = 2000
    stretch: int = 500
    opening: int = 64
    predicted: int = 600
    verify_steps: int = 400
    gammas: tuple[int, ...] = (4, 8)
    temperature: float = 0.8
    verify_temperature: float = 0.0  # 0: greedy
    seed: int = 11
    switch_subjects: tuple[str, ...] = ("code", "prose", "kernel", "instructions")
    predicted_subjects: tuple[str, ...] = ("code", "prose")
    ngram_subjects: tuple[str, ...] = ("code", "instructions")
    draft_subject: str = "manual"

    @staticmethod
    def tiny() -> Plan:
        """Seconds on a CPU."""
        return Plan(prompt=16, decode=24, stretch=8, opening=3, predicted=10, verify_steps=6)


@dataclass(frozen=True)
class Recording:
    """One file: its name and what its card and its metadata say."""

    name: str
    subjects: tuple[str, ...]  # kinds of text, in order
    what: str
    seed: int
    sampling: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """Decodes and writes; every recording is finished on disk before the next begins."""

    def __init__(self, live: Live, predictor: Predictor, texts: Texts, plan: Plan, meta: TraceMeta, out: Path) -> None:
        self.live, self.predictor, self.texts, self.plan = live, predictor, texts, plan
        self.meta, self.out = meta, out
        self.recordings: list[Recording] = []
        self.excerpts: dict[str, list[int]] = {}
        out.mkdir(parents=True, exist_ok=True)

    def _prompts(self, kinds: tuple[str, ...], place: int = 0) -> Tensor:
        length = self.plan.prompt
        return torch.cat([self.texts.openings(kind, length, place + 1)[-1:] for kind in kinds])

    def subjects(self) -> None:
        """One recording per subject and one that changes subject: ids only, decoded together."""
        plan = self.plan
        kinds = (*SUBJECTS, plan.switch_subjects[0])
        changes = [
            torch.cat([self.texts.openings(kind, plan.opening, 3)[-1]]) for kind in plan.switch_subjects[1:]
        ]  # fmt: skip
        given = torch.full((plan.decode + 1, len(kinds)), -1)
        given[:, -1] = given_tokens(plan.decode, changes, plan.stretch)
        prompts = self._prompts(kinds)
        prompts[-1] = self._prompts(kinds[-1:], 1)[0]
        seeds = [plan.seed + i for i in range(len(kinds))]
        prompt_ids, _, kept = self._decode(prompts, seeds, plan.decode, given)
        sampling = {"temperature": plan.temperature, "top_p": 1.0}
        for row, kind in enumerate(SUBJECTS):
            what = f"{plan.decode:,} tokens decoded one by one after a prompt of {plan.prompt} tokens"
            self._write(Recording(f"topo-{title(kind)}", (kind,), what, seeds[row], sampling), prompts, prompt_ids,
                        kept, row)  # fmt: skip
        what = (
            f"{plan.decode:,} tokens decoded one by one; every {plan.stretch} tokens the subject changes: a document "
            f"end and the first {plan.opening - 1} tokens of a document of the next subject are given as decode steps"
        )
        facts = {"changes_every": plan.stretch, "given_tokens_per_change": plan.opening}
        self._write(Recording("topo-switch", plan.switch_subjects, what, seeds[-1], sampling, facts), prompts,
                    prompt_ids, kept, len(kinds) - 1)  # fmt: skip

    def predicted(self) -> None:
        """Two recordings with router weights and predictions."""
        plan = self.plan
        kinds = plan.predicted_subjects
        prompts = self._prompts(kinds, 2)
        seeds = [plan.seed + 100 + i for i in range(len(kinds))]
        given = torch.full((plan.predicted + 1, len(kinds)), -1)
        prompt_ids, weights, kept = self._decode(prompts, seeds, plan.predicted, given, PREDICTIONS)
        sampling = {"temperature": plan.temperature, "top_p": 1.0}
        what = f"{plan.predicted:,} tokens decoded one by one, with router weights and predictions"
        for row, kind in enumerate(kinds):
            recording = Recording(f"topo-{title(kind)}-predictions", (kind,), what, seeds[row], sampling)
            self._write(recording, prompts, prompt_ids, kept, row, weights)

    def verified(self, gamma: int, draft: Draft, ngram: Draft) -> None:
        """Verify windows of one gamma: the n-gram draft on two subjects, the model draft on one."""
        plan = self.plan
        kinds = (*plan.ngram_subjects, plan.draft_subject)
        prompts = self._prompts(kinds, 3)
        length = min(self.live.c.max_positions, plan.prompt + plan.verify_steps * (gamma + 1) + gamma + 2)
        drafts = [*[ngram] * len(plan.ngram_subjects), draft]
        seeds = [plan.seed + 200 + i for i in range(len(kinds))]
        verified = verify(self.live, prompts, drafts, gamma, plan.verify_steps, length, plan.verify_temperature, seeds)
        how = "greedy" if plan.verify_temperature == 0 else f"temperature {plan.verify_temperature}"
        for row, kind in enumerate(kinds):
            name = "ngram" if row < len(plan.ngram_subjects) else "model"
            mean = round(float(verified.accepted[:, row].double().mean()), 3)
            what = f"{plan.verify_steps} verify windows of {gamma + 1} tokens, {how}, {name} draft"
            recording = Recording(
                f"topo-{title(kind)}-{name}-{gamma}", (kind,), what, seeds[row] if plan.verify_temperature else 0,
                {"temperature": plan.verify_temperature, "top_p": 1.0, "draft": name, "gamma": gamma},
                {"accepted_per_step": mean, "distinct_8_grams": verified.distinct(row)},
            )  # fmt: skip
            self._write_windows(recording, prompts, verified, row)

    def _decode(
        self, prompts: Tensor, seeds: list[int], steps: int, given: Tensor, keys: tuple[PredictionKey, ...] = ()
    ) -> tuple[Tensor, Tensor, Kept]:
        plan, rows = self.plan, len(prompts)
        length = min(self.live.c.max_positions, plan.prompt + steps + 1)
        decoder = Decoder(self.live, rows, 1, length, steps, predictor=self.predictor, predictions=keys,
                          weights=bool(keys))  # fmt: skip
        logits, prompt_ids, prompt_weights = decoder.prefill(prompts.to(self.live.device))
        sampler = Sampler(decoder, seeds, steps, plan.temperature, given, END_ID)
        decoder.tokens.copy_(sampler.draw(logits, decoder.at)[:, None])
        decoder.positions.fill_(plan.prompt)
        decoder.after = sampler
        decoder.capture()
        for _ in range(steps):
            decoder.step()
        return prompt_ids.cpu(), prompt_weights.cpu(), decoder.kept(steps)

    def _open(self, recording: Recording, keys: tuple[PredictionKey, ...], width: int) -> TraceWriter:
        columns = tuple(PredictionColumn(predictor=name, depth=h, width=width) for name, h in keys)
        meta = self.meta.model_copy(
            update={
                "sampling": {**recording.sampling, "seed": recording.seed},
                "seed": recording.seed,
                "has_weights": bool(keys),
                "subjects": ("switch",) if len(recording.subjects) > 1 else (title(recording.subjects[0]),),
                "predictions": columns,
            }
        )  # fmt: skip
        return TraceWriter(self.out / f"{recording.name}.parquet", meta)

    def _prefill(
        self, writer: TraceWriter, prompt: Tensor, ids: Tensor, row: int, weights: Tensor | None = None
    ) -> None:
        chosen = ids[:, row].transpose(0, 1).numpy()  # [P, L, k]
        share = None if weights is None else weights[:, row].transpose(0, 1).numpy()
        writer.append(0, 0, PREFILL, np.arange(len(prompt)), prompt.numpy(), chosen, weights=share)

    def _write(
        self, recording: Recording, prompts: Tensor, prompt_ids: Tensor, kept: Kept, row: int,
        prompt_weights: Tensor | None = None,
    ) -> None:  # fmt: skip
        keys, ids = tuple(kept.predictions), kept.ids[:, :, row].transpose(1, 2).numpy()  # [S, n, L, k]
        weights = None if kept.weights is None else kept.weights[:, :, row].transpose(1, 2).numpy()
        guesses = {key: value[:, :, row].transpose(1, 2).numpy() for key, value in kept.predictions.items()}
        width = next(iter(guesses.values())).shape[-1] if guesses else 1
        tokens, positions = kept.tokens[:, row].numpy(), kept.positions[:, row].numpy()
        with self._open(recording, keys, width) as writer:
            self._prefill(writer, prompts[row], prompt_ids, row, prompt_weights)
            for step in range(len(ids)):
                writer.append(
                    0, step + 1, DECODE, positions[step], tokens[step], ids[step],
                    weights=None if weights is None else weights[step],
                    predictions={key: value[step] for key, value in guesses.items()},
                )  # fmt: skip
            rows = writer.rows
        recompress(writer.path)
        self.excerpts[recording.name] = tokens[:80, 0].tolist()
        self.recordings.append(replace(recording, facts={**recording.facts, "rows": rows}))

    def _write_windows(self, recording: Recording, prompts: Tensor, verified: Verified, row: int) -> None:
        kept = verified.kept
        ids = kept.ids[:, :, row].transpose(1, 2).numpy()
        tokens, positions = kept.tokens[:, row].numpy(), kept.positions[:, row].numpy()
        with self._open(recording, (), 1) as writer:
            self._prefill(writer, prompts[row], verified.prompt_ids, row)
            for step in range(len(ids)):
                writer.append(0, step + 1, DRAFT_VERIFY, positions[step], tokens[step], ids[step],
                              accepted=verified.flags(row, step))  # fmt: skip
            rows = writer.rows
        recompress(writer.path)
        self.recordings.append(replace(recording, facts={**recording.facts, "rows": rows}))
