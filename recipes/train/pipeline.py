"""Both bundled models in one process on one GPU, within a deadline.

    python -m recipes.train.pipeline --data .build/corpus --tokenizer foreload/assets/mini --out OUT

1. short trials of mini choose the optimiser setting (and fail fast if the model does not learn);
2. mini trains for what the deadline leaves; 3. the draft learns mini's distribution; 4. both are exported and checked.
`<OUT>/mini/` and `<OUT>/draft/` are Hugging Face folders; `<OUT>/*.log.json` hold the curves.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .config import Config
from .data import Windows, load_ids
from .export import check, export, round_to_bf16
from .model import Model
from .train import Trainer

HERE = Path(__file__).parent
TRIALS: tuple[dict[str, Any], ...] = (
    {"optimizer": "muon", "matrix_rate": 5e-3},
    {"optimizer": "muon", "matrix_rate": 1e-2},
    {"optimizer": "adamw", "adam_rate": 3e-3},
)
RESERVE_SECONDS = 40.0


def trial(config: Config, windows: Windows, device: torch.device, seconds: float) -> float:
    """Final training loss of a short, fully annealed run."""
    trainer = Trainer(config, windows, device)
    print(f"warm-up {trainer.warm_up():.1f} s", flush=True)
    summary = trainer.run(seconds)
    loss = float(summary["final_train_loss"])
    print(f"trial {config.train.optimizer} {config.train.matrix_rate} {config.train.adam_rate}: loss {loss:.4f}, "
          f"{summary['tokens_per_second'] / 1e6:.2f} M tokens/s", flush=True)  # fmt: skip
    return loss if math.isfinite(loss) else float("inf")


def choose(config: Config, windows: Windows, device: torch.device, seconds: float, floor: float) -> Config:
    """The trial with the lowest loss; an error if none learns."""
    variants = [replace(config, train=replace(config.train, **t)) for t in TRIALS]
    short = [replace(v, train=replace(v.train, phases=v.train.phases[:1], warmup_steps=50)) for v in variants]
    short = [replace(v, train=replace(v.train, phases=(replace(v.train.phases[0], until=1.0),))) for v in short]
    losses = [trial(v, windows, device, seconds) for v in short]
    if min(losses) > floor:
        raise RuntimeError(f"no trial reached a loss of {floor}: {losses}")
    return variants[losses.index(min(losses))]


def finish(trainer: Trainer, summary: dict[str, Any], tokenizer: Path, out: Path) -> None:
    """Export, check, and write the log."""
    name = trainer.config.name
    export(trainer.config, trainer.model, tokenizer, out / name)
    clean = Model(trainer.config.model).requires_grad_(False)
    clean.load_state_dict({k: v.detach().float().cpu() for k, v in trainer.model.state_dict().items()})
    summary["logit_difference"] = check(round_to_bf16(clean), out / name)
    (out / f"{name}.log.json").write_text(json.dumps(summary) + "\n")
    print(f"{name}: {summary['tokens']:,} tokens, loss {summary['final_train_loss']:.4f}, "
          f"{summary['tokens_per_second'] / 1e6:.2f} M tokens/s, {summary['peak_memory_bytes'] / 1e9:.1f} GB, "
          f"logits within {summary['logit_difference']:.1e} of transformers", flush=True)  # fmt: skip


def main() -> None:
    """Command line."""
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(".build/corpus"))
    parser.add_argument("--tokenizer", type=Path, default=Path("foreload/assets/mini"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mini", type=Path, default=HERE / "configs/mini.json")
    parser.add_argument("--draft", type=Path, default=HERE / "configs/draft.json")
    parser.add_argument("--deadline-minutes", type=float, default=9.0)
    parser.add_argument("--trial-seconds", type=float, default=25.0)
    parser.add_argument("--trial-loss", type=float, default=4.0)
    parser.add_argument("--draft-seconds", type=float, default=60.0)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    windows = Windows(load_ids(args.data / "train.bin.xz"), device, seed=1)
    print(f"{len(windows.ids):,} tokens loaded, {time.perf_counter() - began:.1f} s", flush=True)
    config = choose(Config.load(args.mini), windows, device, args.trial_seconds, args.trial_loss)
    mini = Trainer(config, windows, device)
    print(f"warm-up {mini.warm_up():.1f} s", flush=True)
    left = args.deadline_minutes * 60 - (time.perf_counter() - began) - args.draft_seconds - RESERVE_SECONDS
    finish(mini, mini.run(left), args.tokenizer, args.out)
    teacher = mini.model.requires_grad_(False)
    draft = Trainer(Config.load(args.draft), windows, device, teacher)
    print(f"warm-up {draft.warm_up():.1f} s", flush=True)
    finish(draft, draft.run(args.draft_seconds), args.tokenizer, args.out)


if __name__ == "__main__":
    main()
