"""All figures of a machine with two GPUs in half an hour, in lanes beside each other: half of the cores for each GPU.

    python -m benchmarks.h200_pair --out DIR [--minutes 29] [--corpus DIR] [--cores 32] [--gpus 1] [--parts LIST]

The first lane measures what counts, on one engine of the full size. The second does what hardly uses the host's memory:
other work on it changes figures by several per cent. The same model with experts in bf12 and other models come last, on
both GPUs. `--parts` is that of `benchmarks.h200`. With a corpus
(`recipes/corpus`: train.bin.xz and heldout.jsonl) `topo` is trained, to score expert formats on. With `--gpus 1` a
single lane does what there is time for, after `topo` is trained (to be scored where there is more), while the GPU's
tests run. What is simulated meanwhile (`tuned_h200 --prepare`, `tuned_drafts`) comes into DIR/main from elsewhere, and
settings with experts in bf12 (tuned-RATIO.json) into DIR/bf12. Each step has a log in DIR and a limit, and is ended
with all it started; DIR/lanes.json says how each went. Afterwards, where simulations are quick: `validate_h200
--predict`, `whatif_h200 --predict` and `tuned_h200 --simulate` with DIR/main.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreload.files import write_json
from foreload.machine import cores

TOPO = "traces/samples/topo-literature-predictions.parquet"
DRAFTED = ("topo-code-ngram-4", "topo-instructions-ngram-4", "topo-manual-model-4")
PARTS = "profile:160,validate:455,whatif:210,tuned:390,decode:190,drafts:110"
TRAINED_MINUTES, TRAINED_MINUTES_OF_ONE = 3.5, 1.5
BEGUN_MINUTES, OPENED_MINUTES = 0.9, 0.8
"""What training takes besides, and what the engine of the full size takes to open: nothing is measured by then."""
SMALL, LARGE = ("gpt-oss-20b", "deepseek-v2-lite", "olmoe-1b-7b"), ("glm-4.7-flash", "gpt-oss-120b", "mixtral-8x7b")
"""Other models, by how long their experts take to load."""


@dataclass(frozen=True)
class Step:
    """A command, `python -m` in front: when it may begin, and how many seconds it may take."""

    name: str
    command: Sequence[str]
    limit_s: float
    ready: Callable[[], bool] = lambda: True


@dataclass
class Lane:
    """Steps one after the other on one GPU and some cores, until a time on the monotonic clock."""

    gpu: int
    cores: frozenset[int]
    steps: Sequence[Step]
    out: Path
    until: float
    told: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """All steps for which there is time."""
        with suppress(OSError):  # where threads cannot be placed they roam
            os.sched_setaffinity(0, self.cores)  # this thread, and so what it starts
        for step in self.steps:
            while not step.ready() and time.monotonic() < self.until:
                time.sleep(0.5)
            begun = time.monotonic()
            code = self._one(step, min(step.limit_s, self.until - begun)) if begun < self.until else None
            self.told.append({"step": step.name, "code": code, "seconds": round(time.monotonic() - begun, 1)})

    def _one(self, step: Step, limit_s: float) -> int:
        """Exit status; -SIGKILL if it was ended."""
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(self.gpu), "PYTHONUNBUFFERED": "1"}
        with (
            (self.out / f"{step.name}.log").open("wb") as log,
            subprocess.Popen(
                [sys.executable, "-m", *step.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            ) as running,
        ):
            try:
                return running.wait(limit_s)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                return running.wait()


def part_done(main: Path, name: str) -> Callable[[], bool]:
    """Whether `benchmarks.h200` has ended a part, or has ended."""

    def done() -> bool:
        try:
            found = json.loads((main / "h200.json").read_text())
        except (OSError, ValueError):
            return False
        return name in found or "ended" in found

    return done


def first_lane(out: Path, minutes: float, parts: str = PARTS) -> list[Step]:
    """What counts."""
    others = [model(name, out, 1.4) for name in (LARGE[0], *SMALL)]
    return [full_size(out, minutes, parts, "--simulate-later"), bf12(out), *others]


def only_lane(out: Path, minutes: float, corpus: Path | None, parts: str = PARTS) -> list[Step]:
    """What is needed most first, on the only GPU."""
    ahead = [] if corpus is None else [training(out, corpus, TRAINED_MINUTES_OF_ONE)]
    left = minutes - len(ahead) * (TRAINED_MINUTES_OF_ONE + BEGUN_MINUTES)
    others = [model(name, out, 1.1) for name in SMALL + LARGE]
    return [*ahead, full_size(out, left, parts, "--simulate-later"), bf12(out), *others]


def tests(out: Path) -> list[Step]:
    """Tests that need a GPU, kernels compiled; some of them under tools of compute-sanitizer."""
    pytest = ["pytest", "-q", "-p", "no:cacheprovider"]
    return [
        sanitized(out, "initcheck", 150, ""),
        sanitized(out, "racecheck", 200),
        Step("kernels", [*pytest, "-m", "unit or gpu", "tests/backend/cuda"], 120),
        Step("gpu", [*pytest, "-m", "gpu", "tests/backend", "tests/oracles"], 150),
    ]


def sanitized(out: Path, tool: str, limit_s: float, only: str = "expert") -> Step:
    """Kernel tests under a tool of compute-sanitizer."""
    command = ["benchmarks.sanitizer", "--tools", tool, "--only", only, "--minutes", f"{limit_s / 60 - 0.1:.2f}"]
    return Step(tool, [*command, "--out", str(out / f"{tool}.json")], limit_s)


def full_size(out: Path, minutes: float, parts: str, *flags: str) -> Step:
    """All that one engine of the full size measures."""
    routing = {"topo": TOPO} | {name: recording(name) for name in DRAFTED}
    traces = [flag for name, path in routing.items() for flag in ("--trace", f"{name}={path}")]
    command = ["benchmarks.h200", "--out", str(out / "main"), "--minutes", f"{minutes:.2f}", *flags]
    return Step("main", [*command, *traces, "--parts", parts], 60 * minutes)


def recording(name: str) -> str:
    """Where a sample is."""
    return f"traces/samples/{name}.parquet"


def bf12(out: Path) -> Step:
    """Rows of the full size with experts in that format; the minutes include loading and packing them."""
    flags = ["--format", "bf12", "--sections", "resident,no-cache,cached", "--ratios", "0.17", "--minutes", "4"]
    command = ["benchmarks.decode", "--trace", TOPO, "--out", str(out / "bf12"), *flags]
    return Step("bf12", command, 270)


def model(name: str, out: Path, minutes: float, ready: Callable[[], bool] = lambda: True) -> Step:
    """Another model's rows; the minutes include loading it."""
    flags = ["--sections", "resident,no-cache,cached", "--ratios", "0.25", "--minutes", f"{minutes}"]
    command = ["benchmarks.decode", "--model", f"shape:{name}", "--out", str(out / name), *flags]
    return Step(name, command, 60 * minutes + 20, ready)


def second_lane(out: Path, corpus: Path | None) -> list[Step]:
    """What leaves the first in peace."""
    return [
        Step("compiled", ["benchmarks.compiled"], 300),
        Step("mini", ["benchmarks.mini_h200", "--out", str(out / "mini")], 250),
        Step("loop", ["benchmarks.gpu_loop", "--out", str(out / "loop")], 200),
        Step("projections", ["benchmarks.projections", "--out", str(out / "projections.json")], 150),
        *(() if corpus is None else formats_of_topo(out, corpus)),
        *tests(out),
        *(model(name, out, 1.5, part_done(out / "main", "ended")) for name in LARGE[1:]),
    ]


def training(out: Path, corpus: Path, minutes: float) -> Step:
    """`topo` trained for some minutes."""
    command = ["recipes.train.train", "--config", "recipes/train/configs/topo.json", "--data", str(corpus)]
    return Step("train", [*command, "--out", str(out / "topo"), "--minutes", f"{minutes}"], 60 * minutes + 120)


def formats_of_topo(out: Path, corpus: Path) -> list[Step]:
    """`topo` trained, and what small expert formats cost it."""
    topo, text, told = out / "topo", str(corpus / "heldout.jsonl"), str(out / "formats-topo.json")
    export = ["recipes.train.export", "--weights", str(topo / "topo.pt"), "--tokenizer", "foreload/assets/mini"]
    formats = ["benchmarks.expert_formats", "--model", str(topo / "hf"), "--device", "cuda", "--windows", "4"]
    return [
        training(out, corpus, TRAINED_MINUTES),
        Step("export", [*export, "--out", str(topo / "hf")], 60),
        Step("formats", [*formats, "--text", text, "--out", told], 420),
    ]


def run(lanes: Sequence[Lane], out: Path) -> list[Mapping[str, Any]]:
    """All lanes beside each other; what each step came to, also in `out`/lanes.json."""
    threads = [threading.Thread(target=lane.run) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [{"gpu": lane.gpu, "steps": lane.told} for lane in lanes]
    write_json(out / "lanes.json", told)
    return told


def main(args: Sequence[str] | None = None) -> list[Mapping[str, Any]]:
    """Run all lanes, print what became of their steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=29.0)
    parser.add_argument("--corpus", type=Path, help="of recipes/corpus, to train topo on")
    parser.add_argument("--cores", type=int, default=cores(), help="to share out between the lanes")
    parser.add_argument("--gpus", type=int, default=2, choices=(1, 2))
    parser.add_argument("--parts", default=PARTS)
    given = parser.parse_args(args)
    given.out.mkdir(parents=True, exist_ok=True)
    now, half = time.monotonic(), max(1, given.cores // 2)
    near, far = frozenset(range(half)), frozenset(range(half, max(half + 1, given.cores)))
    if given.gpus == 1:
        quiet = TRAINED_MINUTES_OF_ONE + BEGUN_MINUTES + OPENED_MINUTES
        shared = [(0, near | far, only_lane(given.out, given.minutes, given.corpus, given.parts), given.minutes)]
        shared += [] if given.corpus is None else [(0, far, tests(given.out), min(quiet, given.minutes))]
    else:
        shared = [(0, near, first_lane(given.out, given.minutes, given.parts), given.minutes)]
        shared += [(1, far, second_lane(given.out, given.corpus), given.minutes)]
    lanes = [Lane(gpu, on, steps, given.out, now + 60 * minutes) for gpu, on, steps, minutes in shared]
    told = run(lanes, given.out)
    for lane in told:
        for step in lane["steps"]:
            print(f"GPU {lane['gpu']}: {step['step']}: {step['code']} after {step['seconds']:.0f} s")
    return told


if __name__ == "__main__":
    main()
