"""Where the device's time goes in a decode step: every kernel of a step of one launch, and of steps that copy.

    python -m benchmarks.h200 --parts kernel_times --out DIR

Writes DIR/kernel-times.json: per kernel how often it ran in a step, and its microseconds in sum.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from foreload.backend.engine import Engine
from foreload.backend.replay import Replay
from foreload.files import write_json
from foreload.settings import Settings
from foreload.traces.schema import Trace

CONTEXT, STEPS = 1024, 4
CASES = {
    "resident": Settings(cache_ratio=1.0),
    "nothing kept": Settings(cache_ratio=0.0),
    "gate prefetch": Settings.parse({"cache_ratio": 0.25, "predictor": "gate", "prefetch_depth": 1}),
}


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """Kernels of every case for which there is time."""
    recorded = Replay(routing["topo"], engine.shape, engine.device)
    request, found = recorded.requests()[0], dict[str, Any]()
    activity = ProfilerActivity.CUDA if engine.device.type == "cuda" else ProfilerActivity.CPU
    for name, settings in CASES.items():
        if time.monotonic() > until:
            break
        engine.apply(settings)
        engine.replay(recorded, request, STEPS, CONTEXT)  # captures, and makes resident what the steps below need
        with profile(activities=[activity]) as profiled:
            done = engine.replay(recorded, request, STEPS, CONTEXT)
            if activity is ProfilerActivity.CUDA:
                torch.cuda.synchronize()
        kernels = [(event.key, event.count / STEPS, _microseconds(event) / STEPS) for event in profiled.key_averages()]
        rows = [
            {"kernel": key[:80], "per_step": count, "us_per_step": us}
            for key, count, us in sorted(kernels, key=lambda row: -row[2])
            if us > 0
        ]
        found[name] = {"settings": settings.describe(), "tpot_ms": done.tpot_ms, "kernels": rows[:40]}
        write_json(out / "kernel-times.json", found)
    return found


def _microseconds(event: Any) -> float:
    return float(event.self_device_time_total or event.self_cpu_time_total)
