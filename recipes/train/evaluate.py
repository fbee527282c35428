"""Measure exported models on held-out text.

    python -m recipes.train.evaluate --mini foreload/assets/mini --draft foreload/assets/draft \\
        --prompts foreload/assets/prompts.jsonl --data .build/corpus --logs OUT --out recipes/train/results/mini.json

Everything runs in fp32 on the CPU from the exported bf16 weights: bits per byte per kind, expert load, next-token
overlap, and how often the draft agrees with mini.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .config import Config
from .data import HeldOut, load_heldout
from .export import END_ID, load_folder
from .generate import generation_report
from .model import Model

WINDOW = 1024
ROWS = 8


@dataclass
class Tally:
    """Sums over the tokens of one kind."""

    size_bytes: int = 0
    tokens: int = 0
    nats: float = 0.0
    draft_nats: float = 0.0
    agree: int = 0
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    overlap: np.ndarray = field(default_factory=lambda: np.zeros(0))
    pairs: int = 0


def windows(documents: list[HeldOut]) -> Iterator[np.ndarray]:
    """Documents cut to windows of `WINDOW` predicted tokens, each led by its preceding token (or <|endoftext|>)."""
    for document in documents:
        ids = np.concatenate([[END_ID], document.ids]).astype(np.int64)
        for begin in range(0, len(ids) - 1, WINDOW):
            yield ids[begin : begin + WINDOW + 1]


def batches(documents: list[HeldOut]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(inputs, targets, mask) of windows of similar length, padded with <|endoftext|>."""
    ordered = sorted(windows(documents), key=len)
    for first in range(0, len(ordered), ROWS):
        rows = ordered[first : first + ROWS]
        width = max(len(r) for r in rows)
        ids = torch.full((len(rows), width), END_ID)
        mask = torch.zeros(len(rows), width - 1, dtype=torch.bool)
        for at, row in enumerate(rows):
            ids[at, : len(row)] = torch.from_numpy(row)
            mask[at, : len(row) - 1] = True
        yield ids[:, :-1], ids[:, 1:], mask


def measure(mini: Model, draft: Model, documents: list[HeldOut]) -> Tally:
    """One kind."""
    tally = Tally(size_bytes=sum(d.size_bytes for d in documents))
    layers, experts = mini.c.layers, mini.c.experts
    tally.counts, tally.overlap = np.zeros((layers, experts), np.int64), np.zeros(layers)
    for inputs, targets, mask in batches(documents):
        hidden, routings = mini(inputs, torch.float32)
        scores = mini.logits(hidden, torch.float32)[mask]
        guess = draft.logits(draft(inputs, torch.float32)[0], torch.float32)[mask]
        tally.tokens += int(mask.sum())
        tally.nats += functional.cross_entropy(scores, targets[mask], reduction="sum").item()
        tally.draft_nats += functional.cross_entropy(guess, targets[mask], reduction="sum").item()
        tally.agree += int((scores.argmax(-1) == guess.argmax(-1)).sum())
        both = mask[:, 1:] & mask[:, :-1]
        tally.pairs += int(both.sum())
        for layer, routing in enumerate(routings):
            used = functional.one_hot(routing.ids.view(*mask.shape, -1), experts).sum(-2)
            tally.counts[layer] += used[mask].sum(0).numpy()
            shared = (used[:, 1:] * used[:, :-1]).sum(-1)[both]
            tally.overlap[layer] += shared.sum().item() / mini.c.top_k
    return tally


def load_report(counts: np.ndarray) -> list[dict[str, float]]:
    """Per layer: least and greatest share relative to uniform, and experts under a tenth of it."""
    rows = []
    for layer, row in enumerate(counts / counts.sum(1, keepdims=True) * counts.shape[1]):
        entropy = float(-(row / len(row) * np.log2(np.maximum(row / len(row), 1e-12))).sum())
        rows.append({"layer": layer, "min": round(float(row.min()), 3), "max": round(float(row.max()), 3),
                     "entropy_bits": round(entropy, 3), "dead": int((row < 0.1).sum())})  # fmt: skip
    return rows


def specialisation(counts: dict[str, np.ndarray]) -> list[float]:
    """Per layer: mean total-variation distance between the expert loads of two kinds (0 = same, 1 = disjoint)."""
    loads = np.stack([c / c.sum(1, keepdims=True) for c in counts.values()])
    distances = [np.abs(loads[a] - loads[b]).sum(1) / 2 for a in range(len(loads)) for b in range(a)]
    return [round(float(x), 3) for x in np.stack(distances).mean(0)]


def report(mini: Model, draft: Model, documents: list[HeldOut]) -> dict[str, Any]:
    """All figures that come from held-out text."""
    by_kind: dict[str, list[HeldOut]] = defaultdict(list)
    for document in documents:
        by_kind[document.kind].append(document)
    tallies = {kind: measure(mini, draft, docs) for kind, docs in by_kind.items()}
    kinds = {
        kind: {
            "bytes": t.size_bytes, "tokens": t.tokens,
            "bits_per_byte": round(t.nats / math.log(2) / t.size_bytes, 4),
            "draft_bits_per_byte": round(t.draft_nats / math.log(2) / t.size_bytes, 4),
            "perplexity": round(math.exp(t.nats / t.tokens), 3),
            "draft_agreement": round(t.agree / t.tokens, 4),
            "next_token_overlap": round(float(t.overlap.mean() / t.pairs), 4),
        }
        for kind, t in tallies.items()
    }  # fmt: skip
    every = list(tallies.values())
    overlap = np.sum([t.overlap for t in every], 0) / sum(t.pairs for t in every)
    total_bytes = sum(t.size_bytes for t in every)
    return {
        "kinds": kinds,
        "bits_per_byte": round(sum(t.nats for t in every) / math.log(2) / total_bytes, 4),
        "draft_bits_per_byte": round(sum(t.draft_nats for t in every) / math.log(2) / total_bytes, 4),
        "draft_agreement": round(sum(t.agree for t in every) / sum(t.tokens for t in every), 4),
        "load": load_report(np.sum([t.counts for t in every], 0)),
        "next_token_overlap": [round(float(x), 4) for x in overlap],
        "specialisation": specialisation({k: t.counts for k, t in tallies.items()}),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("mini", "draft", "prompts", "data", "logs", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"models": {}}
    models = {}
    for name in ("mini", "draft"):
        log = json.loads((args.logs / f"{name}.log.json").read_text())
        models[name] = load_folder(Config.from_dict(log["config"]), getattr(args, name))
        weights = (getattr(args, name) / "model.safetensors").read_bytes()
        log["weights_sha256"], log["weights_bytes"] = hashlib.sha256(weights).hexdigest(), len(weights)
        log["parameters"] = sum(p.numel() for p in models[name].parameters())
        log["active_parameters"] = models[name].c.active_parameters
        log["curve"] = log["curve"][:: max(1, len(log["curve"]) // 100)]
        result["models"][name] = log
    with torch.no_grad():
        result["heldout"] = report(models["mini"], models["draft"], load_heldout(args.data))
        result["generation"] = generation_report(args.mini, models["draft"], args.prompts)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(dict(result["heldout"].items()), indent=1))


if __name__ == "__main__":
    main()
