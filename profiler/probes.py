"""The probes: each measures one kind of block on the engine's own code (names: `profiler.schema`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreload.backend.experts.blocks import run_expert
from foreload.backend.experts.cpu import make_cpu_experts
from foreload.backend.predict import CALIBRATED, PREDICTORS, Predictor
from foreload.machine import cores
from foreload.profiler.bench import Bench, Spans, Stage
from foreload.profiler.schema import Measurement
from foreload.profiler.stats import gpu_microseconds, host_samples, summarise
from foreload.profiler.transfers import copies_back, storage
from foreload.settings import MAX_PREFETCH_DEPTH


@dataclass(frozen=True)
class Effort:
    """How often and where: `rounds` passes over all layers, token counts and contexts to look at.

    On the graph path `seconds` ends the rounds of a probe early, and predictions look `depth` layers ahead at most.
    """

    rounds: int
    contexts: tuple[int, ...]
    chunks: tuple[int, ...]
    sizes: tuple[int, ...]
    waits: tuple[int, ...] = (0, 50, 100, 200, 500, 1000, 2000)
    seconds: float = 0.15
    depth: int = 2


QUICK = Effort(50, (1, 64, 256, 1024, 4096, 16384, 65536), (1, 8, 32, 128, 512), (1 << 14, 1 << 17, 1 << 20, 1 << 23))
FULL = Effort(
    200,
    (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
    (1, 4, 16, 64, 256, 1024, 4096),
    tuple(1 << n for n in range(12, 27, 2)),
    seconds=1.0,
    depth=MAX_PREFETCH_DEPTH,
)


MOST_S = 2.0
"""For one point of a probe whose single round may be long."""


def thread_counts() -> tuple[int, ...]:
    """CPU expert threads worth measuring: powers of two, and all cores but the decoding thread's."""
    spare = max(1, cores() - 1)
    return tuple(sorted({spare, *(1 << n for n in range(spare.bit_length()) if 1 << n <= spare)}))


def resident(bench: Bench, effort: Effort) -> Iterator[Measurement]:
    """All blocks of a decode step whose experts are resident: by context, prediction depth and number of experts."""
    stage = bench.stage("fetch")
    layers, k, device = bench.shape.n_moe_layers, bench.shape.top_k, bench.engine.device
    deepest = min(MAX_PREFETCH_DEPTH, layers - 1)
    found: dict[tuple[str, int], list[float]] = {}
    contexts = [c for c in effort.contexts if c <= bench.decoder.context_tokens]
    for turn in range(-2, effort.rounds * len(contexts)):
        context = contexts[turn % len(contexts)]
        for layer in range(layers):
            count, depth = 1 + (turn + layer) % k, min((turn // k) % (deepest + 1), layers - 1 - layer)
            spans = bench.layer_step(layer, bench.pick(stage.resident, count, turn + layer), context, depth)
            points = {"attention": context, "predict": depth, "experts_gpu": count}
            del spans["beside"]
            for kind, time_us in spans.items():
                if turn >= 0:
                    found.setdefault((kind, points.get(kind, 0)), []).append(time_us)
    coordinate = {"attention": "context", "predict": "depth", "experts_gpu": "experts", "plan": "copies"}
    for (kind, at), samples in sorted(found.items()):
        gpu_us = gpu_microseconds(_block(bench, kind, at), effort.rounds, device)
        where = {coordinate[kind]: at} if kind in coordinate else {}
        yield summarise(kind, samples, gpu_us, **where)


def _block(bench: Bench, kind: str, at: int) -> Callable[[int], object]:
    """One block alone, as the GPU sees it: `plan` and the wait for ids keep it idle."""
    decoder, shape, device, pool = bench.decoder, bench.shape, bench.engine.device, bench.engine.pool
    x, k = bench.hidden(), bench.shape.top_k
    out = torch.empty(k, shape.hidden, device=device, dtype=x.dtype)
    token = torch.zeros(1, dtype=torch.long, device=device)
    layers, spread = shape.n_moe_layers, max(1, shape.n_moe_layers - at)

    def experts(i: int) -> None:
        for n in range(at):
            out[n].copy_(run_expert(x, *pool.views((i * at + n) % len(pool), i % layers))[0])
        decoder.shared(i % layers, x)

    blocks: dict[str, Callable[[int], object]] = {
        "attention": lambda i: decoder.attend(i % layers, x, at - 1),
        "route": lambda i: decoder.route(i % layers, decoder.moe_input(i % layers, x)),
        "predict": lambda i: predicted(bench, bench.gate, i % spread, x, at),
        "experts_gpu": experts,
        "finish": lambda _: x + (x[0, :k, None] * out.float()).sum(0, keepdim=True).to(x.dtype),
        "head": lambda _: decoder.logits(x)[0].argmax(),
        "embed": lambda _: decoder.embed(token),
    }
    return blocks.get(kind, lambda _: None)


def predicted(bench: Bench, predictor: Predictor, layer: int, x: Tensor, depth: int) -> Tensor:
    """Experts predicted by made-up routing, on the device."""
    k = bench.shape.top_k
    ids = torch.arange(k, device=x.device)[None]
    weights = torch.full((1, k), 1 / k, device=x.device)
    return predictor.best(layer, predictor.ahead(layer, x, ids, weights, depth), k)


def predictions(bench: Bench, effort: Effort) -> Iterator[Measurement]:
    """Every predictor but the plain gate, by depth; and what a speculated layer does in place of routing."""
    stage, device, layers = bench.stage("fetch"), bench.engine.device, bench.shape.n_moe_layers
    deepest = min(MAX_PREFETCH_DEPTH, layers - 1)
    found: list[tuple[Predictor, int]] = []
    if bench.engine.calibrated:
        plain = [bench.engine.predictor(name) for name in CALIBRATED]
        rolled = [bench.engine.predictor(name, rolled=True) for name in PREDICTORS]
        found += [(p, depth) for p in plain for depth in range(1, deepest + 1)]
        found += [(p, depth) for p in rolled for depth in range(2, deepest + 1)]
    x = bench.hidden()
    for predictor, depth in found:
        samples, spread = [], layers - depth
        for turn in range(-2, effort.rounds):
            demand = bench.pick(stage.resident, bench.shape.top_k, turn)
            spans = bench.layer_step(turn % spread, demand, depth=depth, predictor=predictor)
            if turn >= 0:
                samples.append(spans["predict"])

        def alone(i: int, p: Predictor = predictor, depth: int = depth, spread: int = spread) -> object:
            return predicted(bench, p, i % spread, x, depth)

        gpu_us = gpu_microseconds(alone, effort.rounds, device)
        yield summarise(f"predict_{predictor.key}", samples, gpu_us, depth=depth)
    yield _speculated(bench, effort, x)


def _speculated(bench: Bench, effort: Effort, x: Tensor) -> Measurement:
    """A layer that executes predictions: its norm, and choosing by the scores predicted for it."""
    decoder, layers, device = bench.decoder, bench.shape.n_moe_layers, bench.engine.device
    scores = decoder.scores(0, x)

    def block(i: int) -> object:
        layer = i % layers
        return decoder.moe_input(layer, x), decoder.choose(layer, scores)[0].cpu().numpy()

    repeats = effort.rounds * 4
    return summarise("speculated", host_samples(block, repeats, device), gpu_microseconds(block, repeats, device))


def cpu_experts(bench: Bench, effort: Effort) -> Iterator[Measurement]:
    """CPU experts alone, beside resident experts, beside copies; copies beside CPU experts."""
    k, layers = bench.shape.top_k, bench.shape.n_moe_layers
    turns = range(effort.rounds * max(1, layers // 2))
    for threads in thread_counts():
        stage = bench.stage("cpu", threads)
        cold: list[float] = []
        for cpu in range(1, k + 1):
            for gpu in range(k - cpu + 1):
                spans = [
                    bench.layer_step(i % layers, bench.pick(stage.resident, gpu, i) + bench.pick(stage.absent, cpu, i))
                    for i in turns
                ]
                cold += [_host(s) for s in spans[1:]]
                totals = [s["beside"] for s in spans]
                if gpu == 0:
                    yield summarise("experts_cpu", totals, experts=cpu, threads=threads)
                else:
                    yield summarise("both", totals, gpu=gpu, cpu=cpu, threads=threads)
        yield summarise("after_cpu", cold, threads=threads)
        yield from _beside_copies(bench, effort, threads)


def _beside_copies(bench: Bench, effort: Effort, threads: int) -> Iterator[Measurement]:
    """CPU experts while prefetches run, and copies while the CPU computes."""
    k, layers = bench.shape.top_k, bench.shape.n_moe_layers
    turns = effort.rounds * max(1, layers // 2)
    stage = bench.stage("cpu", threads)
    for cpu in range(1, k + 1):
        times = []
        for i in range(turns):
            demand, other = bench.pick(stage.absent, cpu, i), bench.pick(stage.absent, k, i + 1)
            times.append(bench.layer_step(i % max(1, layers - 1), demand, prefetched=other)["beside"])
            bench.discard()
        yield summarise("experts_cpu_beside_copy", times, experts=cpu, threads=threads)
    stage = bench.stage("fetch", threads)
    bench.engine.cpu.resize(threads)
    copies: list[float] = []
    for i in range(turns):
        absent = bench.pick(stage.absent, min(2 * k, len(stage.absent)), i)
        copies += bench.copy_times(i % layers, absent[:k], absent[-k:])
    bench.engine.cpu.resize(0)
    yield summarise("copy_beside_cpu", copies, threads=threads)


HOST_BLOCKS = ("attention", "route", "plan", "finish")


def company(bench: Bench, effort: Effort) -> Iterator[Measurement]:
    """What copies cost the decoding thread: queueing them, interruptions by their thread, cold caches after a wait."""
    stage = bench.stage("fetch")
    k, layers = bench.shape.top_k, bench.shape.n_moe_layers
    turns = effort.rounds * layers
    for wait_us in effort.waits:
        samples = []
        for i in range(turns if wait_us < 1000 else turns // 2):
            spans = bench.layer_step(i % layers, bench.pick(stage.resident, k, i), wait_us=wait_us)
            samples.append(_host(spans))
        yield summarise("after_wait", samples, wait_us=wait_us)
    yield from _interruptions(bench, stage, turns, float(np.median(samples)))


def _interruptions(bench: Bench, stage: Stage, turns: int, host_us: float) -> Iterator[Measurement]:
    """The same layer-steps with and without prefetches that land meanwhile; the difference per copy."""
    k, layers = bench.shape.top_k, bench.shape.n_moe_layers
    copy_us = float(np.median(bench.copy_times(0, stage.absent[:k], [])))
    steps = min(100, 2 + int(k * copy_us / host_us))
    plans: list[float] = []
    times: dict[bool, list[float]] = {False: [], True: []}
    landed = 0
    for turn in range(2 * max(20, turns // steps)):
        layer, demand, copying = turn % max(1, layers - 1), bench.pick(stage.resident, k, turn), turn % 2 == 1
        for _ in range(3):
            bench.layer_step(layer, demand)
        bench.engine.copies.spans = []
        first = bench.layer_step(layer, demand, prefetched=bench.pick(stage.absent, k, turn) if copying else None)
        rest = sum(_work(bench.layer_step(layer, demand)) for _ in range(steps))
        times[copying].append(first["experts_gpu"] + first["finish"] + rest)
        landed += len(bench.engine.copies.spans)
        bench.engine.copies.spans = None
        if copying:
            plans.append(first["plan"])
        bench.discard()
    yield summarise("plan", plans, copies=1)
    # Work that took longer saw more copies land, so the rate is taken over all turns together.
    loss = float(np.median(times[True]) - np.median(times[False])) * len(plans) / max(1, landed)
    yield summarise("interrupt", [max(0.0, loss)])


def _host(spans: Spans) -> float:
    return sum(spans[kind] for kind in HOST_BLOCKS)


def _work(spans: Spans) -> float:
    return _host(spans) + spans["experts_gpu"]


def link(bench: Bench, effort: Effort, plan_us: float) -> Iterator[Measurement]:
    """Copies by size, of expert blocks back to back, and the wait for one beyond planning and its own time."""
    engine, shape = bench.engine, bench.shape
    stage = bench.stage("fetch")
    k, layers = shape.top_k, shape.n_moe_layers
    gaps: list[float] = []
    waits: list[float] = []
    for i in range(effort.rounds * layers):
        gaps += bench.copy_times(i % layers, bench.pick(stage.absent, k, i), [])
        spans = bench.layer_step(i % layers, bench.pick(stage.absent, 1, i))
        waits.append(spans["plan"] + spans["wait"])
    pinned = int(engine.slab.pinned)
    yield summarise("copy", gaps, bytes=engine.expert_bytes, pinned=pinned)
    copy_us = float(np.median(gaps))
    yield summarise("wait", [max(0.0, w - copy_us - plan_us) for w in waits])
    yield from sizes(bench, effort)


def sizes(bench: Bench, effort: Effort) -> Iterator[Measurement]:
    """Copies of other sizes than an expert's, one at a time; where the slab is pinned also of memory that is not.

    On a GPU copies back, too; and reads of the model's file, if it has one.
    """
    if bench.engine.device.type == "cuda":
        yield from copies_back(effort.sizes, effort.seconds)
    for file in bench.engine.checkpoint.files()[:1]:
        yield from storage(file, effort.sizes, effort.seconds)
    pinned = bench.engine.slab.pinned
    for size in effort.sizes:
        if size != bench.engine.expert_bytes:
            yield _one_copy(bench, size, pinned, effort.rounds)
            if pinned:
                yield _one_copy(bench, size, False, effort.rounds)


def _one_copy(bench: Bench, size_bytes: int, pinned: bool, repeats: int) -> Measurement:
    """Copies of `size_bytes` one at a time through a link of the engine's own kind."""
    device = bench.engine.device
    source = torch.ones(size_bytes, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    one = bench.engine.make_link()
    samples = []
    for i in range(-2, repeats):
        begun = time.perf_counter_ns()
        one.issue(0, source, target, 0)
        while not one.landed():
            one.block()
        if i >= 0:
            samples.append((time.perf_counter_ns() - begun) / 1e3)
    return summarise("copy", samples, bytes=size_bytes, pinned=int(pinned))


def _cpu_expert(bench: Bench, x: Tensor, repeats: int) -> Measurement:
    """One expert of the slab on x [tokens, hidden], on one thread of `CpuExperts`."""
    layers, experts = bench.shape.n_moe_layers, bench.shape.experts
    cpu, rows = make_cpu_experts(bench.engine.slab, 1), [np.arange(len(x))]

    def one(i: int) -> None:
        cpu.submit(i // experts % layers, [i % experts], x, rows)
        cpu.join()

    try:
        return summarise("cpu_expert", host_samples(one, repeats, x.device, MOST_S), tokens=len(x))
    finally:
        cpu.close()


AT_ONCE = 8
"""Experts of a launch of a prompt, where it has several."""


def prefill(bench: Bench, effort: Effort) -> Iterator[Measurement]:
    """One layer of a prompt chunk without its experts, and one expert on part of a chunk, on the device and the CPU."""
    decoder, device, layers = bench.decoder, bench.engine.device, bench.shape.n_moe_layers
    forward = bench.engine.forward
    for tokens in effort.chunks:
        if tokens > decoder.context_tokens:
            continue
        x = bench.hidden(tokens)

        def layer(i: int, x: Tensor = x) -> None:
            r = decoder.attend(i % layers, x, 0)
            h = decoder.moe_input(i % layers, r)
            ids, weights = decoder.route(i % layers, h)
            forward.chunk(i % layers, h, ids).add_to(r, weights, None)

        yield _cpu_expert(bench, x.cpu(), effort.rounds)
        samples = host_samples(layer, effort.rounds, device, MOST_S)
        yield summarise("prefill_layer", samples, gpu_microseconds(layer, effort.rounds, device), tokens=tokens)
        yield _prompt_expert(bench, x, effort)


def _prompt_expert(bench: Bench, x: Tensor, effort: Effort) -> Measurement:
    """One expert on x [tokens, hidden]: on the device its share of a launch of several, where prompts have such."""
    engine, pool, device = bench.engine, bench.engine.pool, bench.engine.device
    layers = [engine.formats.index(format) for format in sorted(set(engine.formats))]
    grouped = engine.forward.chunk(0, x[:1], torch.zeros(1, 1, dtype=torch.long, device=device)).grouped
    count = min(AT_ONCE, bench.shape.experts, len(pool)) if grouped else 1
    ids = torch.arange(count, device=device).expand(len(x), count)
    chunks = [engine.forward.chunk(at, x, ids) for at in layers]

    def run(i: int) -> None:
        chunks[i % len(chunks)].run(range(count), [(i * count + n) % len(pool) for n in range(count)])

    samples, device_us = host_samples(run, effort.rounds, device, MOST_S), gpu_microseconds(run, effort.rounds, device)
    return summarise("prefill_expert", samples, device_us / count, tokens=len(x))
