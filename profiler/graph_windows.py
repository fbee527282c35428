"""Probes of the graph path for steps over several tokens (names: `profiler.schema`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import numpy as np
from numpy.typing import NDArray

from foreload.backend.made_up import of_routing
from foreload.backend.replay import Replay
from foreload.profiler.graph_bench import Asked, GraphBench, StepTimes
from foreload.profiler.graph_cpu import Routed, computed_us
from foreload.profiler.graph_probes import Basis, enter_us
from foreload.profiler.probes import Effort
from foreload.profiler.schema import PROBED_CONTEXT, Measurement
from foreload.profiler.stats import averaged, in_time, summarise, summarise_device
from foreload.profiler.windows import routed

TOKENS = (1, 2, 5, 9)
"""Without drafts, and with up to 1, 4 and 8 of them."""


def resident_windows(bench: GraphBench, effort: Effort, basis: Basis) -> Iterator[Measurement]:
    """Blocks of steps over several tokens, and groups of resident experts that see several tokens."""
    layers, recorded = bench.shape.n_moe_layers, _Recorded.of(bench)
    for rows in TOKENS:
        stage = bench.stage("fetch")
        each = enter_us(bench, effort, rows)
        groups: dict[tuple[int, int], list[float]] = {}
        steps: list[StepTimes] = []
        for asked in _groups(bench, stage.resident, rows):
            for turn in in_time(effort.rounds, effort.seconds / 4):
                step = bench.step([Asked(asked)] * layers)
                if not turn:
                    continue
                steps.append(step)
                group = len(np.unique(asked)), asked.size
                turns = [step.turn_us(layer) - basis.latency_us for layer in range(layers - 1)]
                groups.setdefault(group, []).extend(turns)
        # Steps are what counts: where graphs have waited for their launches above, they did not here.
        enter = max(0.0, min([median(each), *(median(turns) for turns in groups.values() if turns)]))
        yield summarise_device("window_attention", [0.0], [min(us, enter) for us in each], tokens=rows)
        groups = {group: [max(0.0, us - enter) for us in turns] for group, turns in groups.items()}
        for (experts, tokens), samples in sorted(groups.items()):
            if rows > 1 and samples:
                yield summarise_device("window_experts_gpu", [0.0], samples, experts=experts, tokens=tokens)
        yield from _host_blocks(steps, rows, basis.latency_us, median(groups[max(groups)] or [0.0]))
        yield from _whole(bench, effort, rows, recorded)
    yield from _predicting(bench, effort)


@dataclass(frozen=True)
class _Recorded:
    """Routing of steps of one launch, which the device routes itself: made-up rows of a recording, by how many tokens
    a step has and whether all have the same experts.
    """

    replay: Replay
    experts: Mapping[tuple[int, bool], NDArray[np.int64]]  # [layers, tokens, k]
    first: Mapping[tuple[int, bool], int]

    @classmethod
    def of(cls, bench: GraphBench) -> _Recorded:
        """All that is probed."""
        shape, every = bench.shape, list(range(bench.shape.experts))
        experts, first, rows = {}, {}, 0
        for tokens, alike in product(TOKENS, (True, False)):
            layers = [routed(every, tokens, shape.top_k, alike, at * shape.top_k) for at in range(shape.n_moe_layers)]
            experts[tokens, alike], first[tokens, alike] = np.stack(layers), rows
            rows += tokens
        recorded = np.concatenate([one.swapaxes(0, 1) for one in experts.values()]).astype(np.int16)
        trace = of_routing(shape, recorded, recorded, "probes", -1)
        return cls(Replay(trace, shape, bench.engine.device), experts, first)


def _whole(bench: GraphBench, effort: Effort, rows: int, recorded: _Recorded) -> Iterator[Measurement]:
    """Steps of one launch whose tokens have the same experts, and what each takes longer that only one of them has."""
    slots, kinds = bench.anywhere(), (True, False)[: 1 + (rows > 1)]
    found: dict[bool, list[float]] = {alike: [] for alike in kinds}
    bench.forward.follow(recorded.replay)
    for turn in in_time(len(kinds) * (1 + effort.rounds), len(kinds) * effort.seconds):
        alike = kinds[turn % len(kinds)]
        recorded.replay.row = recorded.first[rows, alike]
        step = bench.step([Asked(one) for one in recorded.experts[rows, alike]], PROBED_CONTEXT, slots)
        if turn >= len(kinds):
            found[alike].append((step.done_ns - step.begun_ns) / 1e3)
    bench.forward.follow(None)
    yield summarise_device("window_whole", [0.0], found[True], tokens=rows)
    k, layers = bench.shape.top_k, bench.shape.n_moe_layers
    if others := layers * (len(np.unique(recorded.experts[rows, False][0])) - k):
        more = [max(0.0, us - median(found[True])) / others for us in found[False]]
        yield summarise_device("window_whole_expert", [0.0], more, tokens=rows)


def _host_blocks(steps: list[StepTimes], rows: int, latency: float, experts: float) -> Iterator[Measurement]:
    """The host's blocks, and the end of a step behind its last experts."""
    every = [times for step in steps for times in step.layers]
    yield summarise("window_plan", [times.host["plan"] for times in every], tokens=rows)
    yield summarise("window_finish", [times.host["finish"] for times in every], tokens=rows)
    yield summarise("window_embed", [(step.launched_ns - step.begun_ns) / 1e3 for step in steps], tokens=rows)
    last = len(steps[0].layers) - 1
    heads = [max(0.0, step.turn_us(last) - latency - experts) for step in steps]
    yield summarise_device("window_head", [0.0], heads, tokens=rows)


def _kinds(bench: GraphBench, rows: int) -> list[tuple[int, bool]]:
    """Routings of a step over `rows` tokens: how many experts each has, and whether all have the same."""
    k = bench.shape.top_k
    return list(product((k, 1), (True, False))) if rows > 1 else [(k, True)]


def _groups(bench: GraphBench, experts: list[int], rows: int) -> Iterator[NDArray[np.int64]]:
    """All kinds of them, of the first experts."""
    for each, alike in _kinds(bench, rows):
        yield routed(experts, rows, each, alike, 0)


def _predicting(bench: GraphBench, effort: Effort) -> Iterator[Measurement]:
    """Looking one layer ahead for several tokens; nothing for a model of one layer."""
    if bench.shape.n_moe_layers < 2:
        return
    base = {}
    bench.stage("fetch")
    for rows in TOKENS:
        base[rows] = median(enter_us(bench, effort, rows, skip=1))
    bench.stage("fetch", depth=1)
    for rows in TOKENS:
        each = enter_us(bench, effort, rows, skip=1)
        yield summarise_device("window_predict", [0.0], [max(0.0, us - base[rows]) for us in each], tokens=rows)


APART = 6
"""One layer of so many has experts on the CPU, since a window's many take long on few threads."""


def cpu_windows(bench: GraphBench, effort: Effort, counts: Sequence[int]) -> Iterator[Measurement]:
    """Groups of CPU experts that see several tokens, on these numbers of threads."""
    layers = bench.shape.n_moe_layers
    for threads in counts:
        stage = bench.stage("cpu", threads)
        groups: dict[tuple[int, int], list[float]] = {}
        absent = Routed(stage.absent, layers)
        for rows in TOKENS[1:]:
            kinds, idle = _kinds(bench, rows), next(_groups(bench, stage.resident, rows))
            for turn in in_time(effort.rounds, effort.seconds):
                asked = [idle] * layers
                for at in range(0, layers, APART):
                    each, alike = kinds[(turn + at // APART) % len(kinds)]
                    asked[at] = routed(absent.pick(at, each if alike else rows * each), rows, each, alike, 0)
                step = bench.step([Asked(one) for one in asked])
                for one, times in zip(asked[::APART], step.layers[::APART], strict=True) if turn else ():
                    groups.setdefault((len(np.unique(one)), one.size), []).append(computed_us(times))
        for (experts, tokens), samples in sorted(groups.items()):
            yield averaged("window_experts_cpu", samples, experts=experts, tokens=tokens, threads=threads)
