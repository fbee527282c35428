"""What must be known of the GPU path first, in one command that fits ten minutes on one GPU.

    python -m benchmarks.h200 --out DIR --minutes 9 [--device cuda] [--model shape:qwen3-30b-a3b]

Parts, in order: kernels (their tests, compiled), exactness (bit-identity with poison and delays, on `mini`), host (the
host's time per layer-step and the device's per step, all experts resident), decode (the first table). Each part is
written to DIR/h200.json when it ends; one that fails is reported there and the next one runs. A part does not begin
without the time it needs.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import decode, gpu_loop
from foreload.backend.cuda.forward import FastForward
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.observe import Marks, NoMarks
from foreload.backend.replay import Replay
from foreload.files import write_json
from foreload.machine import machine_name, software
from foreload.settings import Settings

CONTEXT, STEPS = 1024, 24
LEAST_S = {"kernels": 20, "exactness": 20, "host": 60, "decode": 90}
"""Seconds that must be left for a part to begin."""


def kernels(given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """The kernel tests; on a GPU they run compiled."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/backend/cuda", "-p", "no:cacheprovider", "-m", "unit", "-x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=left_s,
    )
    return {"passed": done.returncode == 0, "tail": done.stdout[-1500:] + done.stderr[-500:]}


def exactness(given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Every fetch-only setting against fully resident, on the engine's default path."""
    found = gpu_loop.exactness(given.device)
    rows = found["rows"]
    return {
        "settings": len(rows),
        "bit_identical": sum(row["bit_identical"] for row in rows),
        "copies": sum(row["copies"] for row in rows),
        "different": [row for row in rows if not row["bit_identical"]],
    }


def host(given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """All hits with a host decision per layer (experts that are never routed to stay absent), and the device's time.

    `host_us`: where the host's time goes, `device_us`: each graph alone, `whole` being the step of one launch.
    """
    checkpoint = given.checkpoint or Checkpoint.open(given.model)
    options = EngineOptions(device=given.device, context_tokens=CONTEXT + 4 * STEPS)
    trace = decode.workload(checkpoint.shape, STEPS)
    with Engine(checkpoint, options, Settings(cache_ratio=1.0)) as engine:
        recorded, request = Replay(trace, engine.shape, engine.device), 0
        engine.replay(recorded, request, context=CONTEXT)  # every expert of the recording is resident afterwards
        per_layer, spans = [], Marks()
        for turn in range(4):
            engine.forward.marks = spans if turn == 3 else NoMarks()
            done = engine.replay(recorded, request, context=CONTEXT)
            per_layer.append(done.tpot_ms)
        engine.forward.marks = NoMarks()
        found: dict[str, Any] = {"path": engine.path, "host_decision_tpot_ms": median(per_layer[:3])}
        found["host_us"] = _by_kind(spans, engine)
        if isinstance(engine.forward, FastForward):
            found["device_us"] = engine.forward.step_times(1)
        return found


def _by_kind(spans: Marks, engine: Engine) -> dict[str, float]:
    """Mean microseconds per layer-step of the host's blocks (`route` waits for the device)."""
    total: dict[str, float] = {}
    for kind, _, _, begun, done in spans.spans:
        total[kind] = total.get(kind, 0.0) + (done - begun) / 1e3
    return {kind: value / (STEPS * engine.shape.n_moe_layers) for kind, value in total.items()}


def table(given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """The first decode table."""
    flags = ["--model", given.model, "--device", given.device, "--out", str(given.out), "--steps", str(STEPS)]
    flags += ["--repeats", "2", "--contexts", str(CONTEXT), "--ratios", "0.25", "--sections", "no-cache,cached"]
    return decode.main(flags, given.checkpoint)


PARTS: dict[str, Callable[[argparse.Namespace, float], dict[str, Any]]] = {
    "kernels": kernels,
    "exactness": exactness,
    "host": host,
    "decode": table,
}


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Run the parts; returns what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--parts", default=",".join(PARTS))
    given = parser.parse_args(args)
    given.checkpoint = checkpoint
    until = time.monotonic() + given.minutes * 60
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else machine_name(),
        "machine": machine_name(),
        "software": software(),
    }
    for name in given.parts.split(","):
        left_s, begun = until - time.monotonic(), time.monotonic()
        if left_s < LEAST_S[name]:
            found[name] = {"skipped": f"{left_s:.0f} s left, {LEAST_S[name]} s are needed"}
        else:
            try:
                found[name] = PARTS[name](given, left_s)
            except Exception as error:  # a part that fails must not cost the others
                found[name] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
            found[name]["seconds"] = time.monotonic() - begun
        write_json(given.out / "h200.json", found)
        print(name, {k: v for k, v in found[name].items() if k not in ("trace", "rows", "software")}, flush=True)
    return found


if __name__ == "__main__":
    main()
