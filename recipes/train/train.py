"""Train one model within a wall-clock budget.

    python -m recipes.train.train --config recipes/train/configs/mini.json --data .build/corpus --out OUT --minutes 5

writes `<OUT>/<name>.pt` (fp32 weights and configuration) and `<OUT>/<name>.log.json` (loss curve, speed, versions).
With `--teacher FILE.pt` the model learns the teacher's distribution instead of the bare next token.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .config import Config
from .data import Windows, load_ids
from .grouped import balance_loss
from .model import Model
from .optim import Optimizer

LOG_EVERY = 50


def token_loss(hidden: Tensor, embedding: Tensor, targets: Tensor, kind: torch.dtype) -> Tensor:
    """Mean cross-entropy in nats of the tied head."""
    scores = functional.linear(hidden.to(kind), embedding.to(kind)).float()
    return functional.cross_entropy(scores.view(-1, scores.shape[-1]), targets.reshape(-1))


def distil_loss(hidden: Tensor, embedding: Tensor, teacher_scores: Tensor, kind: torch.dtype) -> Tensor:
    """Mean cross-entropy in nats against the teacher's distribution."""
    scores = functional.linear(hidden.to(kind), embedding.to(kind)).float()
    return -(teacher_scores.float().softmax(-1) * scores.log_softmax(-1)).sum(-1).mean()


class Trainer:
    """One model, its optimiser and its data; `run` trains for a number of seconds."""

    def __init__(self, config: Config, windows: Windows, device: torch.device, teacher: Model | None = None) -> None:
        torch.manual_seed(config.train.seed)
        self.config, self.windows, self.device, self.teacher = config, windows, device, teacher
        self.fast = device.type == "cuda"
        self.kind = torch.bfloat16 if self.fast else torch.float32
        self.model = Model(config.model).to(device)
        if self.fast:
            torch.set_float32_matmul_precision("high")  # the router's fp32 product on bf16 inputs
            self.model.compile_blocks()
        self.optimizer = Optimizer(self.model, config.train, self.fast)
        self.token_loss = torch.compile(token_loss, dynamic=False) if self.fast else token_loss
        self.distil_loss = torch.compile(distil_loss, dynamic=False) if self.fast else distil_loss
        self.curve: list[dict[str, float]] = []
        self.steps = 0
        self.tokens = 0

    def losses(self, sequence: int) -> tuple[Tensor, Tensor]:
        """(loss to differentiate, language loss) of a fresh batch."""
        rows = self.config.train.batch_tokens // sequence
        inputs, targets = self.windows.batch(rows, sequence)
        hidden, routings = self.model(inputs, self.kind)
        if self.teacher is not None:
            with torch.no_grad():
                scores = self.teacher.logits(self.teacher(inputs, self.kind)[0], self.kind)
            language = self.distil_loss(hidden, self.model.embedding, scores, self.kind)
        else:
            language = self.token_loss(hidden, self.model.embedding, targets, self.kind)
        total = language
        if routings:
            c, t = self.config.model, self.config.train
            total = total + t.balance * balance_loss(routings, c.experts, c.top_k)
            total = total + t.router_z * torch.stack([r.z for r in routings]).mean()
        return total, language.detach()

    def rate(self, share: float) -> float:
        """Warm-up by step, flat, then a linear decay to zero over the last part of the time budget."""
        t = self.config.train
        decay = min(1.0, max(0.0, (1.0 - share) / t.decay_share))
        return min(1.0, (self.steps + 1) / t.warmup_steps) * decay

    def step(self, share: float, sequence: int) -> Tensor:
        """One optimiser step; returns the language loss without waiting for it."""
        total, language = self.losses(sequence)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip_norm)
        self.optimizer.step(self.rate(share))
        self.steps += 1
        self.tokens += self.config.train.batch_tokens
        return language

    def warm_up(self) -> float:
        """Compile everything on throw-away batches; returns seconds. Weights are left as initialised."""
        began = time.perf_counter()
        for sequence in sorted({p.sequence for p in self.config.train.phases}):
            self.losses(sequence)[0].backward()
        self.optimizer.step(0.0)
        return time.perf_counter() - began

    def run(self, seconds: float) -> dict[str, Any]:
        """Train until `seconds` have passed; the rate reaches zero at the end."""
        began, share, recent = time.perf_counter(), 0.0, []
        while share < 1.0:
            sequence = next(p.sequence for p in self.config.train.phases if share < p.until)
            recent.append(self.step(share, sequence))
            if self.steps % 10 == 0:
                recent[-1].item()  # keeps the host within ten steps of the device, so that elapsed time is real
            share = (time.perf_counter() - began) / seconds
            if self.steps % LOG_EVERY == 0 or share >= 1.0:
                self._log(time.perf_counter() - began, torch.stack(recent).mean().item())
                recent = []
        return self.summary(time.perf_counter() - began)

    def _log(self, elapsed: float, loss: float) -> None:
        if not math.isfinite(loss):
            raise RuntimeError(f"{self.config.name}: loss is {loss} at step {self.steps}")
        self.curve.append({"step": self.steps, "seconds": round(elapsed, 2), "loss": round(loss, 4)})
        if self.steps % (LOG_EVERY * 10) == 0 or len(self.curve) < 4:
            speed = f"{self.tokens / elapsed / 1e6:.2f} M tokens/s"
            print(f"{self.config.name} step {self.steps} loss {loss:.4f} {elapsed:.0f} s {speed}", flush=True)

    def summary(self, elapsed: float) -> dict[str, Any]:
        """What a model card needs to know about the training."""
        last = self.curve[-2:]
        machine = torch.cuda.get_device_name() if self.fast else platform.processor() or platform.machine()
        return {
            "config": self.config.to_dict(), "steps": self.steps, "tokens": self.tokens, "seconds": round(elapsed, 1),
            "tokens_per_second": round(self.tokens / elapsed),
            "final_train_loss": round(sum(p["loss"] for p in last) / len(last), 4),
            "machine": machine, "date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.fast else 0, "curve": self.curve,
        }  # fmt: skip

    def save(self, out: Path, summary: dict[str, Any]) -> None:
        """Weights in fp32 and the log."""
        out.mkdir(parents=True, exist_ok=True)
        name = self.config.name
        state = {k: v.detach().float().cpu() for k, v in self.model.state_dict().items()}
        torch.save({"config": self.config.to_dict(), "state": state}, out / f"{name}.pt")
        (out / f"{name}.log.json").write_text(json.dumps(summary, indent=1) + "\n")


def load_model(path: Path, device: torch.device) -> tuple[Config, Model]:
    """A trained model, ready to run without gradients."""
    raw = torch.load(path, weights_only=True, map_location=device)
    config = Config.from_dict(raw["config"])
    model = Model(config.model).to(device)
    model.load_state_dict(raw["state"])
    return config, model.requires_grad_(False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=Path(".build/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--seed", type=int)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = Config.load(args.config)
    if args.seed is not None:
        config = replace(config, train=replace(config.train, seed=args.seed))
    windows = Windows(load_ids(args.data / "train.bin.xz"), device, config.train.seed)
    teacher = load_model(args.teacher, device)[1] if args.teacher else None
    if teacher is not None and device.type == "cuda":
        teacher.compile_blocks()
    trainer = Trainer(config, windows, device, teacher)
    print(f"warm-up {trainer.warm_up():.1f} s", flush=True)
    trainer.save(args.out, trainer.run(args.minutes * 60))


if __name__ == "__main__":
    main()
