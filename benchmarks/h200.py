"""Benchmarks of one GPU in one command with a time limit.

    python -m benchmarks.h200 --out DIR --minutes 9 [--parts profile:70,decode:100,validate] [--trace topo=FILE ...]
        [--device cuda] [--model shape:qwen3-30b-a3b] [--context 2048] [--layers N] [--simulate-later]

Parts: kernels (their tests, compiled), exactness (bit-identity with poison and delays, on `mini`) and mini (predicted
and measured) by themselves; the others are `on_engine` of the benchmark of that name, all on one engine that is opened
once (tuned_slow: `tuned`, on the slower link alone; drafts: those of `decode`, by recording). A number is the seconds a
part may take; the last without one has what is left. Each part is written to DIR/h200.json when it ends; one that fails
is reported there and the next one runs.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    decode,
    drift,
    gpu_loop,
    kernel_times,
    mini_h200,
    prefill,
    profile_h200,
    spac_h200,
    tuned_h200,
    union_h200,
    validate_h200,
    whatif_h200,
)
from benchmarks.compiled import in_background
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.errors import UsageError
from foreload.files import write_json
from foreload.machine import machine_name, software
from foreload.settings import Settings
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

STEPS = 512
OPENED = Settings(cache_ratio=0.0)
LEAST_S = 10
"""Seconds that must be left for a part to begin."""
DEFAULT = "kernels:80,exactness:70,profile:70,decode:120,validate:120,tuned"
Shared = Callable[[Engine, Mapping[str, Trace], float, Path], dict[str, Any]]
SHARED: dict[str, Shared] = {
    "profile": profile_h200.on_engine,
    "kernel_times": kernel_times.on_engine,
    "decode": decode.on_engine,
    "drafts": decode.drafts_on_engine,
    "prefill": prefill.on_engine,
    "drift": drift.on_engine,
    "validate": validate_h200.on_engine,
    "tuned": tuned_h200.on_engine,
    "tuned_slow": partial(tuned_h200.measure, links=tuned_h200.LINKS[1:]),
    "union": union_h200.on_engine,
    "spac": spac_h200.on_engine,
    "whatif": whatif_h200.on_engine,
}


def kernels(given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """The kernel tests; on a GPU they run compiled."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/backend/cuda",
            "-p",
            "no:cacheprovider",
            "-m",
            "unit or gpu",
            "-x",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=left_s,
    )
    return {"passed": done.returncode == 0, "tail": done.stdout[-1500:] + done.stderr[-500:]}


def exactness(given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Every fetch-only setting against fully resident, on the engine's default path."""
    rows = gpu_loop.exactness(given.device)["rows"]
    return {
        "settings": len(rows),
        "bit_identical": sum(row["bit_identical"] for row in rows),
        "copies": sum(row["copies"] for row in rows),
        "different": [row for row in rows if not row["bit_identical"]],
    }


def mini(given: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Predictions of the bundled model; the engine of the other parts waits."""
    done = mini_h200.run(given.out / "mini", time.monotonic() + left_s)
    return {"done": done, "complete": len(done) == len(mini_h200.commands(given.out))}


ALONE: dict[str, Callable[[argparse.Namespace, float], dict[str, Any]]] = {
    "kernels": kernels,
    "exactness": exactness,
    "mini": mini,
}


class Bench:
    """The engine of the shared parts and what it replays, opened when the first of them begins."""

    def __init__(self, given: argparse.Namespace, checkpoint: Checkpoint | None) -> None:
        self._given, self._checkpoint = given, checkpoint
        self._engine: Engine | None = None
        self._routing: dict[str, Trace] = {}

    def open(self) -> Engine:
        """The engine, made on the first call."""
        given = self._given
        if self._engine is None:
            model = self._checkpoint or Checkpoint.open(given.model)
            if given.layers is not None:
                model = Checkpoint.random(model.name.removeprefix("shape:"), num_hidden_layers=given.layers)
            self._routing = {name: read_trace(path) for name, path in given.trace}
            self._routing.setdefault("qwen3", decode.workload(model.shape, STEPS))
            self._routing.setdefault("topo", self._routing["qwen3"])
            options = EngineOptions(device=given.device, context_tokens=given.context)
            self._engine = Engine(model, options, OPENED)
        return self._engine

    def run(self, part: Shared, until: float) -> dict[str, Any]:
        """One part, from the settings that the engine was opened with: another part may have left it with some that
        need what it has taken away. What it measured is in its own files; only its scalars are repeated.
        """
        engine = self.open()
        engine.apply(OPENED)
        found = part(engine, self._routing, until, self._given.out)
        return {key: value for key, value in found.items() if not isinstance(value, list | dict)}

    def close(self) -> None:
        """Let the engine go."""
        if self._engine is not None:
            self._engine.close()


def parts(text: str) -> list[tuple[str, float | None]]:
    """`name:seconds,name` as pairs; UsageError for a name that is none."""
    found: list[tuple[str, float | None]] = []
    for one in text.split(","):
        name, _, seconds = one.partition(":")
        if name not in {*ALONE, *SHARED}:
            raise UsageError(f"--parts: {name!r} is none of {', '.join([*ALONE, *SHARED])}")
        found.append((name, float(seconds) if seconds else None))
    return found


def named(text: str) -> tuple[str, Path]:
    """`name=file` as a pair."""
    name, _, path = text.partition("=")
    return name, Path(path)


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Run the parts; returns what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--trace", type=named, action="append", default=[], help="topo=FILE, or another name")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="of a shape:, fewer than it has: a rehearsal that loads in seconds")
    parser.add_argument("--parts", default=DEFAULT)
    parser.add_argument(
        "--simulate-later",
        action="store_true",
        help="compile no simulator: settings of the tuner come from `tuned_h200 --prepare` meanwhile",
    )
    given = parser.parse_args(args)
    given.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + given.minutes * 60
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if given.device == "cuda" else machine_name(),
        "machine": machine_name(),
        "software": software(),
    }
    bench, chosen = Bench(given, checkpoint), parts(given.parts)
    prepared = (given.out / tuned_h200.PREPARED).exists()
    simulates = any(name == "mini" or (name.startswith("tuned") and not prepared) for name, _ in chosen)
    simulated = given.device == "cuda" and simulates and not given.simulate_later  # the other parts are afterwards
    compiling = in_background() if simulated else None
    for name, seconds in chosen:
        if name in SHARED and "opened_s" not in found:
            begun = time.monotonic()
            bench.open()
            found["opened_s"] = time.monotonic() - begun
            if compiling is not None:  # a simulation that compiles would cost a part its time, a neighbour its figures
                compiling.wait(timeout=max(1.0, until - time.monotonic()))
                found["compiled"] = compiling.returncode == 0
            write_json(given.out / "h200.json", found)
            print(f"engine open after {found['opened_s']:.0f} s", flush=True)
        begun = time.monotonic()
        end = until if seconds is None else min(until, begun + seconds)
        if end - begun < LEAST_S:
            found[name] = {"skipped": f"{end - begun:.0f} s left, {LEAST_S} s are needed"}
        else:
            try:
                found[name] = ALONE[name](given, end - begun) if name in ALONE else bench.run(SHARED[name], end)
            except Exception as error:  # a part that fails must not cost the others
                found[name] = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
            found[name]["seconds"] = time.monotonic() - begun
        write_json(given.out / "h200.json", found)
        print(name, {k: v for k, v in found[name].items() if k not in ("trace", "software")}, flush=True)
    bench.close()
    found["ended"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(given.out / "h200.json", found)
    return found


if __name__ == "__main__":
    main()
