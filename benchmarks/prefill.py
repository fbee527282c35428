"""Prompts beside their floors, and decode after a prompt beside steady decode.

    python -m benchmarks.prefill --model shape:qwen3-30b-a3b --out DIR [--device cuda] [--tokens 4096]
        [--chunks 4096,1024] [--format mxfp4]

A prompt of random tokens without a cache, in chunks of so many tokens: its floor is the longer of the bytes its chunks
copy at the link's measured rate and its own compute, the same prompt with every expert resident; `link_busy_ms` is how
long copies were under way. Then a recording is replayed behind such a prompt, which fills a cache of a quarter of the
experts: 64 tokens from the 64th on, beside the 64 after those. Writes DIR/prefill.json after every part.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.decode import machine_head, numbered, workload
from benchmarks.decode_rows import Rates, measure_rates
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Counter
from foreload.backend.policy.state import PREFILL
from foreload.backend.replay import Replay
from foreload.files import write_json
from foreload.machine import cores
from foreload.settings import Settings
from foreload.traces.io import read_trace
from foreload.traces.schema import Trace

AFTER = 64
REPEATS = 3


@dataclass(frozen=True)
class Wanted:
    """What is to be measured. `until`: on the monotonic clock."""

    out: Path
    tokens: int = 4096
    chunks: tuple[int, ...] = (4096, 1024)
    until: float = float("inf")


class Prompts:
    """Measures on one engine, and writes."""

    def __init__(self, engine: Engine, wanted: Wanted) -> None:
        self._engine, self._wanted = engine, wanted
        self._prompt = np.random.default_rng(1).integers(engine.shape.vocab, size=wanted.tokens).tolist()
        self._longest_s = 0.0
        self.left_out: list[str] = []
        self.found: dict[str, Any] = {
            **machine_head(engine), "tokens": wanted.tokens, "prompts": [], "after": [], "left_out": self.left_out,
        }  # fmt: skip

    def run(self, routing: Mapping[str, Trace]) -> dict[str, Any]:
        """Everything wanted, as far as there is time."""
        rates = measure_rates(self._engine)
        self.found["rates"] = rates.as_dict()
        self._engine.use_costs(lambda _: rates.costs(self._engine))
        for chunk in self._wanted.chunks:
            self._one_chunk(chunk, rates)
        name, trace = next(iter(routing.items()))
        split = {"miss_action": "split", "cpu_threads": max(1, cores() - 1), "admission": "background"}
        for fields in ({}, split):
            self._after(name, trace, self._settings(cache_ratio=0.25, **fields))
        write_json(self._wanted.out / "prefill.json", self.found)
        return self.found

    def _settings(self, **fields: Any) -> Settings:
        base = {"expert_format": self._engine.settings.expert_format, "prefill_chunk_tokens": self._wanted.chunks[0]}
        return Settings.parse({**base, **fields})

    def _time_for(self, what: str, repeats: int = 1) -> bool:
        enough = time.monotonic() + 1.2 * repeats * self._longest_s < self._wanted.until
        if not enough:
            self.left_out.append(what)
        return enough

    def _ttft_ms(self, settings: Settings) -> list[float]:
        """Repeats of the prompt, each from the cache that the settings begin with."""
        engine, found = self._engine, []
        engine.apply(settings)
        for turn in range(REPEATS + 1):
            begun = time.monotonic()
            engine.reset_cache()
            if turn == 0:
                engine.brain.counters[:] = 0
            found.append(engine.generate(self._prompt, 1, stop=False).ttft_ns / 1e6)
            self._longest_s = max(self._longest_s, time.monotonic() - begun)
        return found

    def _link_busy_ms(self) -> float:
        """Of one more such prompt: how long a copy was on the link, as its thread saw them land one after the other."""
        engine = self._engine
        engine.reset_cache()
        engine.copies.spans = []
        engine.generate(self._prompt, 1, stop=False)
        spans, engine.copies.spans = engine.copies.spans, None
        busy = last = 0
        for span in sorted(spans, key=lambda span: span.landed_ns):
            busy, last = busy + span.landed_ns - max(last, span.issued_ns), span.landed_ns
        return busy / 1e6

    def _one_chunk(self, chunk: int, rates: Rates) -> None:
        if not self._time_for(f"prompt in chunks of {chunk}", 2 * REPEATS + 3):
            return
        engine = self._engine
        copied = self._ttft_ms(self._settings(cache_ratio=0.0, prefill_chunk_tokens=chunk))
        counted = engine.brain.counters[PREFILL].sum(axis=0) / (REPEATS + 1)
        size = engine.expert_bytes
        moved = float(counted[Counter.FETCHED] + counted[Counter.PREFETCHED]) * size
        link_ms = float(counted[Counter.MISSES]) * size / rates.link * 1e3
        busy = self._link_busy_ms()
        own = self._ttft_ms(self._settings(cache_ratio=1.0, admission="none", prefill_chunk_tokens=chunk))
        least, ttft = max(link_ms, median(own[1:])), median(copied[1:])
        self.found["prompts"].append(
            {
                "chunk": chunk, "ttft_ms": ttft, "floor_ms": least, "ratio": ttft / least, "link_ms": link_ms,
                "link_busy_ms": busy,
                "own_compute_ms": median(own[1:]), "copied_bytes": moved,
                "wasted_bytes": float(counted[Counter.WASTED]) * size, "runs_ms": copied, "own_runs_ms": own,
                "format": "/".join(sorted(set(engine.formats))),
            }
        )  # fmt: skip
        write_json(self._wanted.out / "prefill.json", self.found)

    def _after(self, name: str, trace: Trace, settings: Settings) -> None:
        """Steps replayed behind the prompt."""
        if not self._time_for(f"decode after a prompt, {settings.describe()}", 4):
            return
        engine, recorded = self._engine, Replay(trace, self._engine.shape, self._engine.device)
        engine.apply(settings)
        engine.reset_cache()
        ttft = engine.generate(self._prompt, 1, stop=False).ttft_ns / 1e6
        with engine.replaying(recorded):
            engine.apply(settings)
            done = engine.replay(recorded, recorded.requests()[0], 3 * AFTER, len(self._prompt))
        times = [step.duration_ns / 1e6 for step in done.steps]
        if len(times) < 3 * AFTER:
            self.left_out.append(f"decode after a prompt: {name} has {len(times)} steps, {3 * AFTER} are needed")
            return
        first, then, steady = (median(times[n * AFTER : (n + 1) * AFTER]) for n in range(3))
        self.found["after"].append(
            {
                "settings": settings.describe(), "routing": name, "ttft_ms": ttft, "first_ms": first,
                "from_64_ms": then, "steady_ms": steady, "ratio": then / steady,
                "step_us": [round(ms * 1e3) for ms in times],
            }
        )  # fmt: skip


def on_engine(engine: Engine, routing: Mapping[str, Trace], until: float, out: Path) -> dict[str, Any]:
    """The table on an open engine, until a time on the monotonic clock."""
    tokens = min(4096, engine.options.context_tokens - 3 * AFTER - 8)
    return Prompts(engine, Wanted(out, tokens, (tokens, tokens // 4), until)).run(routing)


def main(args: Sequence[str] | None = None, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load, measure, write; returns what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--format", help="expert_format")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--chunks", type=numbered, default=(4096, 1024))
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--link", type=float, help="bytes per second of an emulated link, on cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(args)
    model = checkpoint or Checkpoint.open(given.model)
    options = EngineOptions(
        device=given.device,
        context_tokens=given.tokens + 3 * AFTER + 8,
        link_bytes_per_s=int(given.link) if given.link else None,
    )
    trace = workload(model.shape, 3 * AFTER) if given.trace is None else read_trace(given.trace)
    with Engine(model, options, Settings(cache_ratio=0.0, expert_format=given.format)) as engine:
        found = Prompts(engine, Wanted(given.out, given.tokens, given.chunks)).run({"routing": trace})
    for row in found["prompts"]:
        print(
            f"chunks of {row['chunk']}: {row['ttft_ms']:.0f} ms, {row['ratio']:.2f} x floor ({row['floor_ms']:.0f} ms)"
        )
    for row in found["after"]:
        print(f"{row['settings']}: {row['from_64_ms']:.2f} ms per token from 64 on, {row['ratio']:.2f} x steady")
    return found


if __name__ == "__main__":
    main()
