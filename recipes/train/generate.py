"""Continuations of the bundled prompts: samples for the model card, and how many draft tokens a verify step accepts."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .model import Model

PROMPT_TOKENS = 192
NEW_TOKENS = 128
GAMMAS = (4, 8)


def accepted_per_step(matches: np.ndarray, gamma: int) -> float:
    """Mean accepted draft tokens per verify step of greedy speculative decoding.

    Greedy speculation reproduces the target's own sequence, so whether the draft's guess for each position of that
    sequence is right decides everything: a step accepts the run of right guesses, at most `gamma`, and emits one more.
    """
    at, steps, accepted = 0, 0, 0
    while at < len(matches):
        run = 0
        while run < gamma and at + run < len(matches) and matches[at + run]:
            run += 1
        accepted, steps, at = accepted + run, steps + 1, at + run + 1
    return accepted / steps


def generation_report(folder: Path, draft: Model, prompts: Path) -> dict[str, Any]:
    """Accepted lengths per kind and one greedy and one sampled continuation per kind."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    encoded = [tokenizer(row["text"])["input_ids"] for row in rows]
    width = min(PROMPT_TOKENS, min(len(ids) for ids in encoded))
    inputs = torch.tensor([ids[:width] for ids in encoded])
    greedy = _continue(model, inputs, do_sample=False)
    torch.manual_seed(1)
    sampled = _continue(model, inputs, do_sample=True, temperature=0.8, top_p=0.95, top_k=0)
    guess = draft.logits(draft(greedy[:, :-1], torch.float32)[0], torch.float32).argmax(-1)
    matches = (guess == greedy[:, 1:])[:, width - 1 :].numpy()
    runs: dict[str, dict[int, list[float]]] = defaultdict(lambda: {g: [] for g in GAMMAS})
    for row, match in zip(rows, matches, strict=True):
        for gamma in GAMMAS:
            runs[row["subject"]][gamma].append(accepted_per_step(match, gamma))
    mean = {kind: {f"gamma_{g}": round(float(np.mean(v[g])), 3) for g in GAMMAS} for kind, v in runs.items()}
    mean["all"] = {f"gamma_{g}": round(float(np.mean([x for v in runs.values() for x in v[g]])), 3) for g in GAMMAS}
    return {"accepted": mean, "samples": _samples(rows, tokenizer, inputs, greedy, sampled)}


def _continue(model: Any, inputs: Tensor, **settings: Any) -> Tensor:
    result: Tensor = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, **settings
    )
    return result


def _samples(
    rows: list[dict[str, str]], tokenizer: Any, inputs: Tensor, greedy: Tensor, sampled: Tensor
) -> list[dict[str, str]]:
    """The first prompt of each kind: the end of the prompt and both continuations."""
    samples, seen = [], set()
    for number, row in enumerate(rows):
        if row["subject"] in seen:
            continue
        seen.add(row["subject"])
        width = inputs.shape[1]
        samples.append(
            {
                "kind": row["subject"],
                "prompt_end": tokenizer.decode(inputs[number])[-200:],
                "greedy": tokenizer.decode(greedy[number, width:]),
                "sampled": tokenizer.decode(sampled[number, width:]),
            }
        )
    return samples
