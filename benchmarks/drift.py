"""Whether memory, slots or time drift over many tokens.

    python -m benchmarks.drift --model mini --tokens 10000 --out DIR [--device cpu]

A recording is replayed again and again under one setting, in blocks: of each the median step, the process's and the
device's memory, and where the slots are. Blocks are compared with the first one after the cache has filled. Writes
DIR/drift.json after every block.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from benchmarks.decode import machine_head, workload
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy.state import KEPT, N_FREE
from foreload.backend.replay import Replay
from foreload.files import write_json
from foreload.settings import Settings
from foreload.traces.schema import Trace

BLOCK = 256
CONTEXT = 64


def block(engine: Engine, recorded: Replay, at: int, steps: int) -> dict[str, Any]:
    """Some steps of the recording from step `at` on, and what is held after them; InternalError if slots are lost."""
    found = engine.replay(recorded, recorded.requests()[0], steps, CONTEXT, at)
    engine.brain.check_integrity()
    state, on_gpu = engine.brain.state, engine.device.type == "cuda"
    return {
        "tokens": found.decode_tokens,
        "step_ms": median(step.duration_ns for step in found.steps) / 1e6,
        "mean_ms": found.tpot_ms,
        "rss_bytes": psutil.Process().memory_info().rss,
        "device_bytes": torch.cuda.memory_allocated() if on_gpu else 0,
        "device_reserved_bytes": torch.cuda.memory_reserved() if on_gpu else 0,
        "threads": threading.active_count(),
        "slots": len(engine.pool),
        "kept": int((state.status == KEPT).sum()),
        "free": int(state.scalars[N_FREE]),
        "in_flight": engine.brain.in_flight(),
    }


def summary(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last block beside the second: the cache has filled in the first."""
    first, last = blocks[min(1, len(blocks) - 1)], blocks[-1]
    return {
        "tokens": sum(b["tokens"] for b in blocks),
        "time_ratio": last["step_ms"] / first["step_ms"],
        **{f"{name}_more": last[name] - first[name] for name in ("rss_bytes", "device_bytes", "threads", "slots")},
        "kept": [b["kept"] for b in blocks][:: max(1, len(blocks) // 8)],
    }


def run(engine: Engine, trace: Trace, tokens: int, until: float, out: Path, size: int = BLOCK) -> dict[str, Any]:
    """Blocks until there are `tokens` tokens or the time is over; the first request's steps, round and round."""
    recorded = Replay(trace, engine.shape, engine.device)
    held, blocks, longest = len(recorded.steps(recorded.requests()[0])), list[dict[str, Any]](), 0.0
    size = min(size, held)
    found: dict[str, Any] = {**machine_head(engine), "settings": engine.settings.describe(), "blocks": blocks}
    with engine.replaying(recorded):
        engine.apply(engine.settings)
        while sum(b["tokens"] for b in blocks) < tokens and time.monotonic() + 1.2 * longest < until:
            begun = time.monotonic()
            blocks.append(block(engine, recorded, len(blocks) * size % (held - size + 1), size))
            longest = max(longest, time.monotonic() - begun)
            found["summary"] = summary(blocks)
            write_json(out / "drift.json", found)
    return found


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """As many tokens as there is time for, with a quarter of the experts cached and fetches."""
    engine.apply(Settings(cache_ratio=0.25, expert_format=engine.settings.expert_format))
    engine.reset_cache()
    return run(engine, next(iter(routing.values())), 10_000, until, out, 64)


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load, run, write; returns what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--ratio", type=float, default=0.25)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    model = checkpoint or Checkpoint.open(given.model)
    options = EngineOptions(device=given.device, context_tokens=CONTEXT + 2 * BLOCK)
    settings = Settings(cache_ratio=given.ratio, predictor="gate", prefetch_depth=1)
    with Engine(model, options, settings) as engine:
        trace = workload(model.shape, 2 * BLOCK)
        found = run(engine, trace, given.tokens, time.monotonic() + 60 * given.minutes, given.out)
    print(found["summary"])
    return found


if __name__ == "__main__":
    main()
