"""Probes of the graph path with experts on the CPU: alone, beside copies, and copies beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from statistics import median

from foreload.backend.experts.transfer import followed
from foreload.backend.native import chosen_isa
from foreload.backend.native.pool import SPIN_US
from foreload.profiler.graph_bench import Asked, GraphBench, LayerTimes, StepTimes, in_runs
from foreload.profiler.probes import Effort, thread_counts
from foreload.profiler.schema import Measurement
from foreload.profiler.stats import averaged, in_time, summarise, varied

REST_US = SPIN_US + SPIN_US // 2
"""After so long a rest workers sleep."""


REUSED = 0.25
"""Of a layer's experts, those that the token before had too: recordings of `topo` .22, Qwen3-30B's statistics .40."""


class Routed:
    """Experts as decode without a cache asks for them: spread over memory, and some again that were read a step ago.

    Experts that follow each other in memory, none twice within many steps, take the CPU 3 to 7 % longer than those of
    recordings do.
    """

    def __init__(self, experts: Sequence[int], layers: int) -> None:
        self._experts, self._random = list(experts), Random(0)
        self._last: list[list[int]] = [[] for _ in range(layers)]

    def pick(self, layer: int, count: int) -> list[int]:
        """`count` distinct ones, or all, for a layer's next step."""
        count = min(count, len(self._experts))
        again = self._random.sample(self._last[layer], min(len(self._last[layer]), round(REUSED * count)))
        others = self._random.sample([one for one in self._experts if one not in again], count - len(again))
        self._last[layer] = again + others
        return self._last[layer]


MOST_EVERY = 4
READING_US = (0, 100)
"""Waits before a layer-step is planned, while workers may read."""


def asked_for(layers: int, most: int, turn: int) -> list[int]:
    """How many experts each layer has: as `in_runs`, and every fourth turn `most` in all of them. So decode without a
    cache asks: memory that never rests may be some per cent slower.
    """
    all_most, before = turn % MOST_EVERY == MOST_EVERY - 1, turn // MOST_EVERY
    return [most] * layers if all_most else in_runs(layers, most, turn - before)


def computed_us(times: LayerTimes) -> float:
    """From handing experts over until the last is done, but for the .1 us in which prefetches are planned."""
    return sum(times.host.get(kind, 0.0) for kind in ("submit", "predict", "issue", "experts_gpu", "wait_cpu"))


def cpu_experts(bench: GraphBench, effort: Effort, counts: Sequence[int]) -> Iterator[Measurement]:
    """All of it for these numbers of threads."""
    bench.stage("cpu")
    for threads in counts:
        yield from alone(bench, effort, threads)
        yield from beside_copies(bench, effort, threads)
        if chosen_isa() is not None:
            yield from read_ahead(bench, effort, threads)


def alone(bench: GraphBench, effort: Effort, threads: int) -> Iterator[Measurement]:
    """Steps whose experts are all on the CPU, by how many: memory is as busy as it is in decode without a cache."""
    stage, k, layers = bench.stage("cpu", threads), bench.shape.top_k, bench.shape.n_moe_layers
    found: dict[int, list[LayerTimes]] = {count: [] for count in range(1, k + 1)}
    routed, after = Routed(stage.absent, layers), list[float]()
    for turn in in_time(effort.rounds * k, effort.seconds * 2):
        counts = asked_for(layers, k, turn)
        step = bench.step([Asked.of(routed.pick(at, n)) for at, n in enumerate(counts)])
        bench.after_turn("experts_cpu", stage, threads)
        for layer, count in enumerate(counts if turn else []):
            times = step.layers[layer]
            found[count].append(times)
            if layer:
                after.append(times.host["plan"] + times.host["finish"])
    for count, of_count in found.items():
        if of_count:
            yield varied("experts_cpu", [computed_us(t) for t in of_count], experts=count, threads=threads)
    every = [times for of_count in found.values() for times in of_count]
    yield summarise("after_cpu", after or [t.host["plan"] + t.host["finish"] for t in every], threads=threads)
    if threads == max(thread_counts()):
        yield averaged("submit", [t.host["submit"] for t in every])
    yield from _asleep(bench, effort, threads)


def _asleep(bench: GraphBench, effort: Effort, threads: int) -> Iterator[Measurement]:
    """What one expert takes longer where workers have gone to sleep than right after another."""
    stage, layers = bench.stage("cpu", threads), bench.shape.n_moe_layers
    found: dict[bool, list[float]] = {True: [], False: []}
    routed = Routed(stage.absent, layers)
    for turn in in_time(effort.rounds, effort.seconds):
        asked = [Asked.of(routed.pick(at, 1)) for at in range(layers)]
        asked[::4] = [replace(one, wait_us=REST_US) for one in asked[::4]]
        step = bench.step(asked)
        for one, times in zip(asked, step.layers, strict=True) if turn else ():
            found[one.wait_us > 0].append(computed_us(times))
    if found[False]:
        later = [max(0.0, us - median(found[False])) for us in found[True]]
        yield summarise("cpu_asleep", later, threads=threads, idle_us=SPIN_US)


def beside_copies(bench: GraphBench, effort: Effort, threads: int) -> Iterator[Measurement]:
    """CPU experts while prefetches that nothing uses keep the link busy, copies while the CPU is busy, and the device
    behind CPU experts: it reads their outputs, and what else the host tells it, over that link.
    """
    stage, layers = bench.stage("cpu", threads, depth=1), bench.shape.n_moe_layers
    half = len(stage.absent) // 2
    mine, others, most = stage.absent[:half], stage.absent[half:], min(bench.shape.top_k, half)
    found: dict[int, list[float]] = {count: [] for count in range(1, most + 1)}
    routed, copies = Routed(mine, layers), list[float]()
    behind: dict[bool, list[float]] = {False: [], True: []}
    bench.engine.copies.spans = []
    for turn in in_time(effort.rounds * most, effort.seconds * 2):
        counts, beside = asked_for(layers, most, turn), turn % 4 != 1
        ahead = [(bench.pick(others, most, turn + at),) if beside else () for at in range(layers)]
        step = bench.step([Asked.of(routed.pick(at, n), *ahead[at]) for at, n in enumerate(counts)])
        bench.discard()
        bench.after_turn("experts_cpu_beside_copy", stage, threads)
        for layer, count in enumerate(counts if turn else []):
            us = computed_us(step.layers[layer])
            if layer and beside:  # nothing is prefetched before the first
                found[count].append(us)
            if layer and layer + 1 < layers:
                behind[beside].append(max(0.0, step.turn_us(layer) - us))
        copies += followed_us(step) if turn else []
    bench.engine.copies.spans = None
    for count, samples in found.items():
        if samples:
            yield averaged("experts_cpu_beside_copy", samples, experts=count, threads=threads)
    for with_copies, samples in behind.items():
        if samples:
            yield averaged("gpu_behind_cpu", [0.0], samples, copies=int(with_copies), threads=threads)
    yield varied("copy_beside_cpu", copies or _copies_us(bench, effort, threads), threads=threads)


def read_ahead(bench: GraphBench, effort: Effort, threads: int) -> Iterator[Measurement]:
    """What CPU experts take less where workers could read one of them before, by how long they were idle: the next
    layer's, or by turns another one, is told together with one that is copied and not used.
    """
    stage, layers = bench.stage("cpu", threads, depth=1, read_ahead=True), bench.shape.n_moe_layers
    half = len(stage.absent) // 2
    mine, others, count = stage.absent[:half], stage.absent[half:], min(max(1, bench.shape.top_k // 2), half)
    routed, rest = Routed(mine, layers), len(READING_US)
    less: list[list[float]] = [[] for _ in READING_US]
    idle: list[list[float]] = [[] for _ in READING_US]
    for turn in in_time(max(2, effort.rounds // 2) * rest, effort.seconds):
        which, means = turn % rest, list[float]()
        for right in (True, False):
            asked = [routed.pick(at, count) for at in range(layers)]
            ahead = [bench.pick(others, 2, turn + at) for at in range(layers)]
            if right:
                ahead = [[spare[0], next_one[0]] for spare, next_one in zip(ahead, asked[1:] + asked[:1], strict=True)]
            steps = [Asked.of(*both) for both in zip(asked, ahead, strict=True)]
            step = bench.step([replace(one, wait_us=READING_US[which]) for one in steps])
            bench.discard()
            taken = [computed_us(times) for times in step.layers]
            means.append(sum(taken[1:]) / max(1, len(taken) - 1))
            ends = [times.planned_ns / 1e3 + us for times, us in zip(step.layers, taken, strict=True)]
            idle[which] += [times.planned_ns / 1e3 - end for times, end in zip(step.layers[1:], ends, strict=False)]
        less[which].append(means[1] - means[0])
    found = {_rounded(median(us)): of for us, of in zip(idle, less, strict=True) if us}
    for us, saved in sorted(found.items()):
        yield summarise("read_ahead", [max(0.0, median(saved))], threads=threads, idle_us=us)


def _rounded(us: float) -> int:
    """To twenty microseconds, at least so many, so that several turns of the probe are of the same points."""
    return 20 * max(1, round(us / 20))


def followed_us(step: StepTimes) -> list[float]:
    """Copies of a step that followed each other while the CPU was computing, from landing to landing."""
    pairs = followed(copy for times in step.layers for copy in times.copies)
    busy = [(times.planned_ns, times.planned_ns + 1e3 * computed_us(times)) for times in step.layers]
    return [(b - a) / 1e3 for a, b in pairs if any(begun < a and b < ended for begun, ended in busy)]


def _copies_us(bench: GraphBench, effort: Effort, threads: int) -> list[float]:
    """The same where steps are too short for two copies: copies while the CPU is kept busy apart from steps."""
    stage, k = bench.stage("fetch", threads), bench.shape.top_k
    bench.engine.cpu.resize(threads)
    copies: list[float] = []
    for turn in in_time(effort.rounds, effort.seconds):
        mine = bench.pick(stage.absent, min(k, len(stage.absent)), turn)
        copies += bench.copy_times(turn % bench.shape.n_moe_layers, mine, stage.absent, min(k, threads), submissions=3)
    bench.engine.cpu.resize(0)
    return copies
