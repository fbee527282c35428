"""Probes of the graph path: what a decode step of graphs costs device, host and link (names: `profiler.schema`).

Device times are differences of what the host sees. Entering all layers one behind the other tells what entering one
takes (E); what lies between deciding and being told beyond that is told by layer-steps of one expert (latency, with
that expert: a launch on an idle device takes longer than in a step); what more experts and copies add by layer-steps
that have them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from foreload.backend.made_up import recording
from foreload.backend.predict import CALIBRATED, PREDICTORS
from foreload.backend.replay import Replay
from foreload.profiler.bench import Stage
from foreload.profiler.graph_bench import Asked, GraphBench, LayerTimes, StepTimes, in_runs
from foreload.profiler.probes import Effort
from foreload.profiler.schema import PROBED_CONTEXT, Measurement
from foreload.profiler.stats import averaged, in_time, summarise, summarise_device
from foreload.settings import MAX_PREFETCH_DEPTH, Settings


@dataclass
class Basis:
    """Medians that other probes subtract, in microseconds."""

    enter_us: float = math.inf  # E, at PROBED_CONTEXT, nothing predicted: the least that `blocks` has found
    latency_us: float = 0.0  # set by `blocks`
    turn_us: float = 0.0  # from deciding on k residents until the next layer has told


def enter_us(
    bench: GraphBench, effort: Effort, rows: int = 1, context: int = PROBED_CONTEXT, skip: int = 0
) -> list[float]:
    """Samples of entering each layer behind the first, but the last `skip`."""
    layers = max(1, bench.shape.n_moe_layers - skip)
    each = list[float]()
    bench.entering_us(1, rows, context)  # what is captured first is not counted in the time there is
    for turn in in_time(effort.rounds, effort.seconds):
        first, whole = bench.entering_us(1, rows, context), bench.entering_us(layers, rows, context)
        if turn:  # the first time warms up
            each.append(max(0.0, (whole - first) / (layers - 1)) if layers > 1 else first)
    return each


def blocks(bench: GraphBench, effort: Effort, basis: Basis) -> Iterator[Measurement]:
    """What every step is made of: `attention` by context, and what `resident` gives; sets the basis."""
    stage = bench.stage("fetch")
    contexts = {PROBED_CONTEXT, *(context for context in effort.contexts if context <= bench.decoder.context_tokens)}
    launch = _launch_us(bench, effort)
    entered = {context: enter_us(bench, effort, context=context) for context in sorted(contexts)}
    turns, steps = _turns_by_experts(bench, effort, stage)
    # Graphs that follow each other may wait for their launches, in steps they do not: then E is what it was before, or
    # no more than a turn, and the latency is the rest of one.
    found = median(entered[PROBED_CONTEXT])
    basis.enter_us = min([basis.enter_us, found, *(median(samples) for samples in turns.values() if samples)])
    for context, samples in entered.items():
        each = [max(0.0, us - found + basis.enter_us) for us in samples]
        yield summarise_device("attention", launch, each, context=context)
    yield from resident(bench, effort, basis, turns, steps)


def _launch_us(bench: GraphBench, effort: Effort) -> list[float]:
    """What launching a graph takes the host."""
    k = bench.shape.top_k
    asked = [Asked.of(range(k))] * bench.shape.n_moe_layers
    steps = [bench.step(asked) for _ in in_time(effort.rounds, effort.seconds)]
    return [times.host["experts_gpu"] for step in steps[1:] for times in step.layers]


def _turns_by_experts(
    bench: GraphBench, effort: Effort, stage: Stage
) -> tuple[dict[int, list[float]], list[tuple[int, StepTimes]]]:
    """Steps that miss nothing, with the last layer's number of experts, and their turns by how many a layer has."""
    k, layers = bench.shape.top_k, bench.shape.n_moe_layers
    turns: dict[int, list[float]] = {count: [] for count in range(1, k + 1)}
    steps: list[tuple[int, StepTimes]] = []
    for turn in in_time(effort.rounds * k, effort.seconds * 2):
        counts = in_runs(layers, k, turn)
        step = bench.step([Asked.of(bench.pick(stage.resident, n, turn + at)) for at, n in enumerate(counts)])
        bench.after_turn("experts_gpu", stage)
        if not turn:
            continue
        steps.append((counts[-1], step))
        for layer, count in enumerate(counts[:-1]):
            turns[count].append(step.turn_us(layer))
    return turns, steps


def resident(
    bench: GraphBench,
    effort: Effort,
    basis: Basis,
    turns: dict[int, list[float]],
    steps: list[tuple[int, StepTimes]],
) -> Iterator[Measurement]:
    """`launch`; the host's blocks and the experts of steps that miss nothing, by how many; the step's ends."""
    layers = bench.shape.n_moe_layers
    beyond = {count: [max(0.0, us - basis.enter_us) for us in samples] for count, samples in turns.items()}
    fewest = next((samples for samples in beyond.values() if samples), [0.0])
    basis.latency_us = median(fewest)
    yield averaged("launch", fewest)
    experts = {count: [max(0.0, us - basis.latency_us) for us in samples] for count, samples in beyond.items()}
    for count, samples in experts.items():
        if samples:
            yield summarise_device("experts_gpu", [0.0], samples, experts=count)
    every = [times for _, step in steps for times in step.layers]
    yield averaged("plan", [times.host["plan"] for times in every], copies=0)
    yield averaged("finish", [times.host["finish"] for times in every])
    yield averaged("embed", [(step.launched_ns - step.begun_ns) / 1e3 for _, step in steps])
    heads = [
        step.turn_us(layers - 1) - basis.latency_us - (median(experts[n]) if experts[n] else 0.0) for n, step in steps
    ]
    after = [_after_last_us(step) for _, step in steps]
    yield averaged("head", after, [max(0.0, us) for us in heads])
    yield from _whole(bench, effort)


def _after_last_us(step: StepTimes) -> float:
    """From the end of the last layer-step until the token is asked for."""
    last = step.layers[-1]
    spent = sum(last.host.get(kind, 0.0) for kind in ("submit", "issue", "experts_gpu", "finish"))
    return max(0.0, (step.decoded_ns - last.planned_ns) / 1e3 - spent)


def _whole(bench: GraphBench, effort: Effort) -> Iterator[Measurement]:
    """Steps of one launch, until their token is known."""
    every, k, layers = list(range(bench.shape.experts)), bench.shape.top_k, bench.shape.n_moe_layers
    slots = bench.anywhere()
    for context in sorted({PROBED_CONTEXT, *(c for c in effort.contexts if c <= bench.decoder.context_tokens)}):
        samples = []
        for turn in in_time(effort.rounds, effort.seconds):
            asked = [Asked.of(bench.pick(every, k, turn * k + at)) for at in range(layers)]
            step = bench.step(asked, context, slots)
            samples.append((step.done_ns - step.begun_ns) / 1e3)
        yield averaged("whole", [0.0], samples[1:], context=context)


# What graphs do besides


def variants(bench: GraphBench, effort: Effort, basis: Basis) -> Iterator[Measurement]:
    """What entering a layer takes longer where it predicts, executes predictions, serves the CPU or is replayed."""
    basis.turn_us = median(_turns_us(bench, effort, bench.stage("fetch")) or [0.0])
    deepest = min(effort.depth, MAX_PREFETCH_DEPTH, bench.shape.n_moe_layers - 1)
    for depth in range(1, deepest + 1):
        yield from _predicting(bench, effort, basis, depth)
    if deepest:
        stage = bench.stage("fetch", depth=1, speculate=True)
        more = _beyond(bench, effort, basis, stage, skip=1)
        yield summarise_device("speculated", [0.0], [basis.enter_us + us for us in more], context=PROBED_CONTEXT)
    stage = bench.stage("cpu")
    yield summarise_device("enter_cpu", [0.0], _beyond(bench, effort, basis, stage))
    stage = bench.stage("fetch")
    bench.forward.follow(Replay(recording(bench.shape), bench.shape, bench.engine.device))
    yield summarise_device("replayed", [0.0], _beyond(bench, effort, basis, stage))
    bench.forward.follow(None)
    yield from _predictors(bench, effort, basis, stage, deepest)


def _turns_us(bench: GraphBench, effort: Effort, stage: Stage, skip: int = 0) -> list[float]:
    """Of steps that miss nothing: from deciding on k experts until the next layer has told; not the last `skip` layers.

    Graphs that follow each other without the host may wait for their launches; here they do not.
    """
    found, k, layers = list[float](), bench.shape.top_k, bench.shape.n_moe_layers
    for turn in in_time(effort.rounds, effort.seconds):
        step = bench.step([Asked.of(bench.pick(stage.resident, k, turn + at)) for at in range(layers)])
        found += [step.turn_us(layer) for layer in range(layers - 1 - skip)] if turn else []
    return found


def _beyond(bench: GraphBench, effort: Effort, basis: Basis, stage: Stage, skip: int = 0) -> list[float]:
    """Samples of what entering a layer takes longer than it does plainly."""
    return [max(0.0, us - basis.turn_us) for us in _turns_us(bench, effort, stage, skip)] or [0.0]


def _predicting(bench: GraphBench, effort: Effort, basis: Basis, depth: int) -> Iterator[Measurement]:
    """The gate looking `depth` layers ahead: on the device, and the host's planning of what it says."""
    stage, k, layers = bench.stage("fetch", depth=depth), bench.shape.top_k, bench.shape.n_moe_layers
    device = _beyond(bench, effort, basis, stage, skip=depth)
    plans: dict[bool, list[float]] = {True: [], False: []}
    for turn in in_time(2 * effort.rounds, effort.seconds):
        ahead = tuple(bench.pick(stage.resident, k, turn + at) for at in range(depth)) if turn % 2 else ()
        step = bench.step([Asked.of(bench.pick(stage.resident, k, turn), *ahead)] * layers)
        plans[bool(ahead)] += [times.host["plan"] for times in step.layers[: layers - depth]]
    base = median(plans[False])
    yield summarise_device("predict", [max(0.0, us - base) for us in plans[True]], device, depth=depth)


def _predictors(bench: GraphBench, effort: Effort, basis: Basis, stage: Stage, deepest: int) -> Iterator[Measurement]:
    """The other predictors, which the host does not tell apart."""
    if not bench.engine.calibrated:
        return
    kinds = [(name, False, 1) for name in CALIBRATED] + [(name, True, 2) for name in PREDICTORS]
    slots = bench.engine.settings.slots_per_layer
    for name, rolled, least in kinds:
        for depth in range(least, deepest + 1):
            fields = {"predictor": name, "prefetch_depth": depth, "prefetch_rolled": rolled, "admission": "none"}
            format = {"expert_format": bench.engine.settings.expert_format}
            bench.engine.apply(Settings.parse({"slots_per_layer": slots, **fields, **format}))
            device = _beyond(bench, effort, basis, stage, skip=depth)
            yield summarise_device(f"predict_{name}{'_rolled' * rolled}", [0.0], device, depth=depth)


# Copies


def copies(bench: GraphBench, effort: Effort, basis: Basis) -> Iterator[Measurement]:
    """Copies of steps that miss one to k experts: how they follow each other, and what waits for them."""
    stage, k, layers = bench.stage("fetch"), bench.shape.top_k, bench.shape.n_moe_layers
    missed: dict[int, list[LayerTimes]] = {count: [] for count in range(k + 1)}
    turns: list[tuple[int, float]] = []  # misses of a layer-step, and from its routing to the next one's
    bench.engine.copies.spans = []
    for turn in in_time(effort.rounds * k, effort.seconds * 4):
        counts = [(turn + layer // 2) % k + 1 if layer % 2 == 0 else 0 for layer in range(layers)]
        step = bench.step(
            [
                Asked.of(bench.pick(stage.absent, n, turn + at) + bench.pick(stage.resident, k - n, turn + at))
                for at, n in enumerate(counts)
            ]
        )
        bench.after_turn("copy", stage)
        for layer, count in enumerate(counts if turn else []):
            missed[count].append(step.layers[layer])
            if count and layer + 1 < layers and len(step.layers[layer].copies) == count:
                turns.append((count, step.layers[layer].until_us(step.layers[layer + 1])))
    bench.engine.copies.spans = None
    firsts, gaps = _bursts(missed)
    copy_us = median(gaps or firsts)
    yield from _of_copies(bench, missed, gaps or firsts)
    start = summarise("copy_start", [max(0.0, us - copy_us) for us in firsts])
    yield start
    plan = median(times.host["plan"] for found in missed.values() for times in found)
    rest = plan + start.p50_us + basis.enter_us  # one expert is part of the latency
    waits = [max(0.0, turn - count * copy_us - rest) for count, turn in turns]
    yield averaged("wait", waits or [0.0])  # whatever else lies between routing and routing


def _bursts(missed: dict[int, list[LayerTimes]]) -> tuple[list[float], list[float]]:
    """Of layer-steps with copies, how long the first took, and from landing to landing."""
    every = [times for count, found in missed.items() if count for times in found if times.copies]
    bursts = [sorted(times.copies, key=lambda copy: copy.landed_ns) for times in every]
    gaps = [(b.landed_ns - a.landed_ns) / 1e3 for burst in bursts for a, b in pairwise(burst)]
    return [(burst[0].landed_ns - burst[0].issued_ns) / 1e3 for burst in bursts], gaps


def _of_copies(bench: GraphBench, missed: dict[int, list[LayerTimes]], gaps: Sequence[float]) -> Iterator[Measurement]:
    """What layer-steps by the number of their misses tell of the link and of the host that serves it; `gaps` lie from
    landing to landing.
    """
    pinned = int(bench.engine.slab.pinned)
    yield summarise("copy", gaps, bytes=bench.engine.expert_bytes, pinned=pinned)
    none = missed[0]
    idle = median(times.host["issue"] for times in none)
    two = [times.host["issue"] for count, found in missed.items() if count > 1 for times in found] or [idle]
    yield summarise("issue", [max(0.0, us - idle) / 2 for us in two])
    yield from _late(missed)
    host = [times.host["plan"] + times.host["finish"] for times in none]
    longest = max(count for count, found in missed.items() if found)
    waited = max(1, round((longest - 1) * median(gaps)))
    yield summarise("after_wait", host, wait_us=waited)


def _late(missed: dict[int, list[LayerTimes]]) -> Iterator[Measurement]:
    """What experts behind their copies take the host: a second one more than one, and that one besides. Medians, since
    the means of differences that are cut off at 0 are too large.
    """
    launch = median(times.host["experts_gpu"] for times in missed[0])
    one, two = ([max(0.0, times.host["experts_gpu"] - launch) for times in missed.get(n, [])] for n in (1, 2))
    alone = median(one or [0.0])
    late = summarise("late", [max(0.0, us - alone) for us in two] or one or [0.0])
    yield late
    yield summarise("bring", [max(0.0, us - late.p50_us) for us in one] or [0.0])


def company(bench: GraphBench, effort: Effort, basis: Basis) -> Iterator[Measurement]:
    """Steps that miss nothing, with and without prefetches beside them that nothing uses."""
    stage, k, layers = bench.stage("fetch", depth=1), bench.shape.top_k, bench.shape.n_moe_layers
    turns: dict[bool, list[float]] = {True: [], False: []}
    host = list[float]()
    for turn in in_time(2 * effort.rounds, effort.seconds * 2):
        beside = turn % 2 == 1
        ahead = (bench.pick(stage.absent, k, turn),) if beside else ()
        step = bench.step([Asked.of(bench.pick(stage.resident, k, turn), *ahead)] * layers)
        for layer in range(1, layers - 1):  # the first one is still without company
            turns[beside].append(step.turn_us(layer) - basis.latency_us)
            if not beside:
                host.append(step.layers[layer].host["plan"] + step.layers[layer].host["finish"])
        bench.discard()
    yield summarise("after_wait", host or [0.0], wait_us=0)
    for beside, samples in turns.items():
        if samples:
            yield summarise_device("gpu_beside_copy", [0.0], [max(0.0, us) for us in samples], copies=int(beside))
