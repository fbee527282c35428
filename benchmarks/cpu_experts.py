"""CPU experts: GB/s of packed weights by format, tokens and threads, beside torch and a plain reading of memory.

    python -m benchmarks.cpu_experts [--shape qwen3-30b-a3b] [--threads 1,2,4] [--rounds 30] [--out FILE]
        [--isas avx512,avx512_all] [--formats bf16,int8]

Random experts of a published shape, more of them than caches hold, each used once before any is used again. A row is
one layer-step (`top_k` experts, each on so many tokens), median and best of the rounds; `read` and kernels take turns.
`read` adds up as many bytes of the same memory with numpy, `torch` runs the same experts in plain PyTorch. Rates are
those of the best round: other load makes a shared machine's medians say nothing, and the load average is recorded.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console

from foreload.backend.experts.blocks import run_expert
from foreload.backend.experts.cpu import CpuExperts
from foreload.backend.experts.cpu_native import NativeExperts
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.native import Isa, chosen_isa, describe, load
from foreload.cli.output import table
from foreload.files import write_json
from foreload.formats import PackedFormat
from foreload.machine import cores, machine_name, software
from foreload.profiler.formats import ScratchExperts

FORMATS: tuple[PackedFormat, ...] = ("bf16", "bf12", "int8", "fp8", "mxfp4")
TOKENS = (1, 9)
SCRATCH_BYTES = 512 << 20


@dataclass(frozen=True)
class Row:
    """One measured layer-step. `gb_per_s` counts packed bytes once, whatever the number of tokens."""

    what: str  # or an instruction set
    format: PackedFormat
    tokens: int
    threads: int
    median_us: float
    best_us: float
    gb_per_s: float  # of the best round
    of_read: float  # share of the rate at which as many threads just read


class Reader:
    """Adds up memory with some threads, each its own part."""

    def __init__(self, memory: torch.Tensor, threads: int) -> None:
        self._words = memory.flatten().numpy()[: memory.numel() // 8 * 8].view(np.uint64)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def read(self, at: int, size: int) -> None:
        """Add up `size` bytes from byte `at`, wrapping around."""
        start = at // 8 % (len(self._words) - size // 8)
        parts = np.array_split(self._words[start : start + size // 8], self._threads)
        list(self._pool.map(np.add.reduce, parts))

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()


def layer_step(cpu: CpuExperts, x: torch.Tensor, k: int, experts: int) -> Callable[[int], object]:
    """Runs the i-th k experts on all rows of x."""
    rows = [np.arange(len(x))] * k

    def run(i: int) -> None:
        cpu.submit(0, [(i * k + n) % experts for n in range(k)], x, rows)
        cpu.join()

    return run


def by_torch(scratch: ScratchExperts, x: torch.Tensor, k: int) -> Callable[[int], object]:
    """The same in PyTorch."""

    def run(i: int) -> None:
        for n in range(k):
            run_expert(x, *scratch.views(0, (i * k + n) % scratch.shape.experts))

    return run


def turns(works: dict[str, Callable[[int], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each work in every round, one after the other in each."""
    found: dict[str, list[float]] = {name: [] for name in works}
    for i in range(-2, rounds):
        for name, work in works.items():
            begun = time.perf_counter()
            work(i + 2)
            if i >= 0:
                found[name].append(time.perf_counter() - begun)
    return found


def measure(
    shape_name: str,
    threads: tuple[int, ...],
    rounds: int,
    isas: Mapping[str, Isa],
    formats: Sequence[PackedFormat] = FORMATS,
) -> list[Row]:
    """All rows, in the order they were measured; `isas`: by the name of their rows."""
    shape, rows = Checkpoint.random(shape_name).shape, []
    k, library = shape.top_k, load()
    for format in formats:
        scratch = ScratchExperts(shape, torch.bfloat16, format, SCRATCH_BYTES)
        size = k * scratch.codec.layout.bytes
        for count in threads:
            pools = {name: NativeExperts(scratch, count, library, isa) for name, isa in isas.items()}
            reader = Reader(scratch.blocks, count)
            torch.set_num_threads(count)
            for tokens in TOKENS:
                x = torch.randn(tokens, shape.hidden, dtype=torch.bfloat16)
                works = {"read": lambda i, reader=reader, size=size: reader.read(i * size, size)}
                works |= {name: layer_step(cpu, x, k, scratch.shape.experts) for name, cpu in pools.items()}
                seconds = turns(works, rounds)
                if format == "bf16":  # by itself: its idle threads keep cores busy for a while
                    seconds |= turns({"torch": by_torch(scratch, x, k)}, rounds)
                least = min(seconds["read"])
                rows += [
                    Row(name, format, tokens, count, median(s) * 1e6, min(s) * 1e6, size / min(s) / 1e9, least / min(s))
                    for name, s in seconds.items()
                ]
            for cpu in pools.values():
                cpu.close()
            reader.close()
    return rows


def main() -> None:
    """Parse flags, measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_experts", description=__doc__)
    powers = [1 << n for n in range(cores().bit_length()) if 1 << n <= cores()]
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--threads", default=",".join(map(str, powers)), help="thread counts, default: powers of two")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--isas", help="instruction sets to compare; default: the one that is chosen, as `native`")
    parser.add_argument("--formats", default=",".join(FORMATS))
    given = parser.parse_args()
    named = given.formats.split(",")
    if not set(named) <= set(FORMATS):
        parser.error(f"--formats {given.formats}: there are {', '.join(FORMATS)}")
    formats = [one for one in FORMATS if one in named]
    isas = {"native": chosen_isa() or Isa.SCALAR}
    if given.isas:
        isas = {name: Isa[name.upper()] for name in given.isas.split(",")}
    rows = measure(given.shape, tuple(map(int, given.threads.split(","))), given.rounds, isas, formats)
    values = {
        "source": "measured",
        "machine": machine_name(),
        "software": software(),
        "cpu_experts": describe(),
        "shape": given.shape,
        "rounds": given.rounds,
        "load_average": os.getloadavg()[0],
        "rows": [asdict(row) for row in rows],
    }
    if given.out is not None:
        write_json(given.out, values)
    shown = [
        (row.what, row.format, str(row.tokens), str(row.threads), f"{row.median_us:,.0f}",
            f"{row.best_us:,.0f}", f"{row.gb_per_s:.1f}",
         f"{row.of_read:.2f}")
        for row in rows
    ]  # fmt: skip
    note = f"{given.shape}; {describe()}; measured on {machine_name()}"
    columns = ("", "format", "tokens", "threads", "median µs", "best µs", "GB/s", "of read")
    Console(width=100, highlight=False).print(table("CPU experts", columns, shown, note))


if __name__ == "__main__":
    main()
