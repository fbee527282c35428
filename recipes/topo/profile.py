"""Where the time of a training step goes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from recipes.train.train import Trainer

TOP = 30


def _sections(trainer: Trainer, sequence: int, steps: int) -> dict[str, float]:
    """Milliseconds per step of each part, each waited for, and of the whole as it runs in training."""

    def now() -> float:
        if trainer.fast:
            torch.cuda.synchronize()
        return time.perf_counter()

    spent = dict.fromkeys(("forward", "backward", "clip", "optimizer"), 0.0)
    for _ in range(steps):
        marks = [now()]
        total, _language = trainer.losses(sequence)
        marks.append(now())
        total.backward()
        marks.append(now())
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.config.train.clip_norm)
        marks.append(now())
        trainer.optimizer.step(0.0)
        marks.append(now())
        for name, a, b in zip(spent, marks[:-1], marks[1:], strict=True):
            spent[name] += (b - a) * 1e3 / steps
    began = now()
    for _ in range(steps):
        trainer.losses(sequence)[0].backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), trainer.config.train.clip_norm)
        trainer.optimizer.step(0.0)
    queued = time.perf_counter()
    spent["step_host"] = (queued - began) * 1e3 / steps
    spent["step"] = (now() - began) * 1e3 / steps
    return {name: round(value, 2) for name, value in spent.items()}


def profile_training(trainer: Trainer, out: Path, steps: int = 10) -> dict[str, Any]:
    """Run `steps` steps at rate zero in three ways, print and write a table; weights stay as they are."""
    sequence = trainer.config.train.phases[0].sequence
    sections = _sections(trainer, sequence, steps)
    text = [f"step of {trainer.config.train.batch_tokens:,} tokens, sequence {sequence}; ms per step", str(sections)]
    kernels: list[dict[str, Any]] = []
    if trainer.fast:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(3):
                trainer.losses(sequence)[0].backward()
                trainer.optimizer.step(0.0)
            torch.cuda.synchronize()
        rows = sorted(profiler.key_averages(), key=lambda r: -r.self_device_time_total)
        busy = sum(r.self_device_time_total for r in rows) / 3e3
        text.append(f"GPU busy {busy:.1f} ms per step, {sum(r.count for r in rows) // 3:,} kernels")
        for r in rows[:TOP]:
            kernels.append({"ms": round(r.self_device_time_total / 3e3, 3), "calls": r.count // 3, "name": r.key[:110]})
            text.append(f"{kernels[-1]['ms']:9.3f} ms {kernels[-1]['calls']:6d} x {kernels[-1]['name']}")
    report = "\n".join(text)
    print(report, flush=True)
    (out / "profile.txt").write_text(report + "\n")
    return {"sections_ms": sections, "kernels": kernels}
