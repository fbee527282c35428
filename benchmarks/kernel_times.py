"""Where the device's time goes in a decode step: every kernel of a step of one launch, and of steps that copy.

    python -m benchmarks.h200 --parts kernel_times --out DIR

Writes DIR/kernel-times.json: per kernel how often it ran in a step, its microseconds in sum, and those between the end
of the kernel before it and its start. "chain" cases enter layers one behind the other without the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from foreload.backend.cuda.forward import FastForward
from foreload.backend.engine import Engine
from foreload.backend.replay import Replay
from foreload.files import write_json
from foreload.machine import cores
from foreload.settings import Settings
from foreload.traces.schema import Trace

CONTEXT, STEPS = 1024, 4
CASES = {
    "one launch": {"cache_ratio": 1.0, "admission": "none"},
    "resident": {"cache_ratio": 1.0},
    "nothing kept": {"cache_ratio": 0.0},
    "gate prefetch": {"cache_ratio": 0.25, "predictor": "gate", "prefetch_depth": 1},
    "cpu": {"cache_ratio": 0.0, "miss_action": "cpu", "admission": "none", "cpu_threads": max(1, cores() - 1)},
}


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """Kernels of every case for which there is time."""
    recorded = Replay(routing["topo"], engine.shape, engine.device)
    request, found = recorded.requests()[0], dict[str, Any]()
    for name, fields in CASES.items():
        if time.monotonic() > until:
            break
        settings = Settings.parse({**fields, "expert_format": engine.settings.expert_format})
        engine.apply(settings)

        def run() -> float:
            return engine.replay(recorded, request, STEPS, CONTEXT).tpot_ms

        run()  # captures, and makes resident what the steps below need
        found[name] = {"settings": settings.describe(), **_profiled(engine, run)}
        for replayed in (False, True) if isinstance(engine.forward, FastForward) else ():
            with engine.replaying(recorded) if replayed else nullcontext():
                chain = _chain(engine, engine.forward)
                chain()
                found[f"{name}, chain{', replayed' * replayed}"] = _profiled(engine, chain)
        write_json(out / "kernel-times.json", found)
    return found


def _chain(engine: Engine, forward: Any) -> Callable[[], float]:
    """Enter all layers one behind the other `STEPS` times; milliseconds of each."""

    def run() -> float:
        with torch.inference_mode():
            spent = [forward.told_after(1, CONTEXT, engine.shape.n_moe_layers) for _ in range(STEPS)]
        return sum(spent) / STEPS / 1e6

    return run


def _profiled(engine: Engine, run: Callable[[], float]) -> dict[str, Any]:
    """Milliseconds of a step without and with the profiler, and the kernels."""
    alone_ms = run()
    activity = ProfilerActivity.CUDA if engine.device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        tpot_ms = run()
        if activity is ProfilerActivity.CUDA:
            torch.cuda.synchronize()
    kernels = [(event.key, event.count / STEPS, _microseconds(event) / STEPS) for event in profiled.key_averages()]
    gaps = _gaps(profiled.events())
    rows = [
        {"kernel": key[:80], "per_step": count, "us_per_step": us, "gap_us_per_step": gaps.get(key, 0.0) / STEPS}
        for key, count, us in sorted(kernels, key=lambda row: -row[2])
        if us > 0
    ]
    return {"alone_ms": alone_ms, "tpot_ms": tpot_ms, "kernels": rows[:40]}


def _gaps(events: Any) -> dict[str, float]:
    """Microseconds between the end of what ran before on the same stream and the start of each kernel, by its name."""
    found, ended = dict[str, float](), dict[int, float]()
    on_device = [event for event in events or () if event.device_type == DeviceType.CUDA]
    for event in sorted(on_device, key=lambda event: event.time_range.start):
        stream, begun = event.device_resource_id, event.time_range.start
        if stream in ended:
            found[event.key] = found.get(event.key, 0.0) + max(0.0, begun - ended[stream])
        ended[stream] = event.time_range.end
    return found


def _microseconds(event: Any) -> float:
    return float(event.self_device_time_total or event.self_cpu_time_total)
