"""`profile`: run all probes on a live engine and collect a `HardwareProfile`."""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import cycle
from typing import Literal

import torch

from foreload.backend.engine import Engine
from foreload.backend.native import describe
from foreload.errors import UsageError
from foreload.machine import cores, cpu_name, machine_name, software
from foreload.profiler import graph_cpu, graph_probes, graph_windows, probes, windows
from foreload.profiler.bench import Bench
from foreload.profiler.formats import by_format
from foreload.profiler.graph_bench import AfterTurn, GraphBench
from foreload.profiler.schema import HardwareProfile, Measurement, ProfileMeta
from foreload.profiler.stats import host_samples, middle_of_each
from foreload.profiler.system import this_gpu
from foreload.settings import Settings
from foreload.shape import ModelShape

Mode = Literal["quick", "full"]
Groups = tuple[tuple[str, Callable[[], Iterator[Measurement]]], ...]
GRAPHS = "graphs"
"""The path of an engine whose decode steps are graphs, in its own words and in a profile's."""
ON_CPU = "experts on the CPU"
"""The group of probes that other load on the host disturbs most."""
MANY = 3
"""Numbers of threads, the largest, that are measured as long as there is time."""


def profile(
    engine: Engine,
    mode: Mode = "quick",
    progress: Callable[[str, int, int], None] | None = None,
    until: float | None = None,
    after_turn: AfterTurn | None = None,
) -> HardwareProfile:
    """Measure every block of `engine` on this machine; `progress(name, done, total)` per group of probes.

    Groups that would begin after `until` (`time.monotonic`) are left out, and the profile says so. Where blocks are
    graphs, what time is left goes to experts on the CPU on many threads, which other load disturbs most, and turns of
    some probes are followed by one of `after_turn`'s, if it is given.
    The engine keeps its settings and loses its cache. UsageError if its device memory cannot hold the few experts the
    probes need.
    """
    effort = probes.QUICK if mode == "quick" else probes.FULL
    if engine.shape.experts < 2 * engine.shape.top_k:
        raise UsageError(f"profile: a model with at least {2 * engine.shape.top_k} experts per layer is needed")
    if len(set(engine.formats)) > 1:
        raise UsageError(f"profile: experts in one format are needed, not in {', '.join(sorted(set(engine.formats)))}")
    found: list[Measurement] = []
    noise: list[float] = []
    left_out: list[str] = []
    bench, groups, again = (
        _graphs(engine, effort, after_turn) if engine.path == GRAPHS else _eager(engine, effort, found)
    )
    try:
        with torch.inference_mode():
            for done, (name, group) in enumerate(groups):
                if progress is not None:
                    progress(name, done, len(groups))
                if until is not None and time.monotonic() > until:
                    left_out.append(name)
                    continue
                noise.append(_fixed_probe(bench))
                found.extend(group())
            longest = 0.0
            for name, group in cycle(again):
                begun = time.monotonic()
                if until is None or begun + longest > until:
                    break
                if progress is not None:
                    progress(name, len(groups) - 1, len(groups))
                found.extend(group())
                longest = max(longest, time.monotonic() - begun)
            noise.append(_fixed_probe(bench))
    finally:
        bench.close()
    if progress is not None:
        progress("done", len(groups), len(groups))
    meta = _meta(engine, mode, noise).model_copy(update={"left_out": tuple(left_out)})
    return HardwareProfile(meta=meta, measurements=tuple(middle_of_each(found)))


def _eager(engine: Engine, effort: probes.Effort, found: list[Measurement]) -> tuple[Bench, Groups, Groups]:
    """What is measured where every operator is launched; `found` is filled meanwhile."""
    bench = Bench(engine)

    def plan_us() -> float:
        return next(m.p50_us for m in found if m.probe == "plan" and m.at == {"copies": 0})

    groups: Groups = (
        ("decode blocks", lambda: probes.resident(bench, effort)),
        ("predictions", lambda: probes.predictions(bench, effort)),
        ("copies beside decoding", lambda: probes.company(bench, effort)),
        ("link", lambda: probes.link(bench, effort, plan_us())),
        (ON_CPU, lambda: probes.cpu_experts(bench, effort)),
        ("prefill", lambda: probes.prefill(bench, effort)),
        ("verify steps", lambda: _windows(bench, effort)),
        ("formats", lambda: by_format(bench, effort.rounds, probes.thread_counts())),
    )
    return bench, groups, ()


def _graphs(engine: Engine, effort: probes.Effort, after_turn: AfterTurn | None) -> tuple[Bench, Groups, Groups]:
    """What is measured where decode steps are graphs: what every step is made of three times over the run, as a device
    may be quicker at its beginning and other load comes and goes; and what is measured again as long as there is time.
    """
    bench, basis = GraphBench(engine, after_turn), graph_probes.Basis()

    def windows_of() -> Iterator[Measurement]:
        yield from graph_windows.resident_windows(bench, effort, basis)
        yield from graph_windows.cpu_windows(bench, effort, probes.thread_counts())
        yield from windows.drafts(bench, effort.rounds)

    def on_cpu(*counts: int) -> Iterator[Measurement]:
        return graph_cpu.cpu_experts(bench, effort, counts or probes.thread_counts())

    groups: Groups = (
        ("decode blocks", lambda: graph_probes.blocks(bench, effort, basis)),
        ("copies", lambda: graph_probes.copies(bench, effort, basis)),
        ("copies beside decoding", lambda: graph_probes.company(bench, effort, basis)),
        (ON_CPU, on_cpu),
        ("predictions", lambda: graph_probes.variants(bench, effort, basis)),
        ("prefill", lambda: probes.prefill(bench, effort)),
        ("verify steps", windows_of),
        ("decode blocks, again", lambda: graph_probes.blocks(bench, effort, basis)),
        (f"{ON_CPU}, again", on_cpu),
        ("link", lambda: probes.sizes(bench, effort)),
        ("formats", lambda: by_format(bench, effort.rounds, probes.thread_counts(), effort.seconds / 4)),
        ("decode blocks, once more", lambda: graph_probes.blocks(bench, effort, basis)),
        (f"{ON_CPU}, once more", on_cpu),
    )
    largest = probes.thread_counts()[-MANY:]
    again = [(f"{ON_CPU}, {threads} threads", partial(on_cpu, threads)) for threads in largest]
    windows_again = partial(graph_windows.cpu_windows, bench, effort, largest[-1:])
    return bench, groups, (*again, ("verify steps on the CPU", windows_again))


def _windows(bench: Bench, effort: probes.Effort) -> Iterator[Measurement]:
    """Everything that only steps over several tokens need."""
    rounds = max(4, effort.rounds // 5)
    yield from windows.resident_windows(bench, rounds)
    for threads in probes.thread_counts():
        yield from windows.cpu_windows(bench, rounds, threads)
    yield from windows.drafts(bench, rounds)


def bench_settings(shape: ModelShape, draft_model: str | None = None) -> Settings:
    """The smallest settings an engine needs to be profiled under, perhaps with a draft model beside it."""
    slots = (min(2 * shape.top_k, shape.experts),) * shape.n_moe_layers
    return Settings.parse({"slots_per_layer": slots, "draft": {"model": draft_model}})


def _fixed_probe(bench: Bench) -> float:
    """Median of one block that does not change, to see how steady the machine is over the run.

    With graphs a layer-step of residents: a block of operators would tell of nothing but their launches.
    """
    if isinstance(bench, GraphBench):
        return bench.resident_us()
    x = bench.hidden()
    layers = bench.shape.n_moe_layers
    samples = host_samples(lambda i: bench.decoder.attend(i % layers, x, 0), 100, bench.engine.device)
    return sorted(samples)[len(samples) // 2]


def _meta(engine: Engine, mode: Mode, noise: list[float]) -> ProfileMeta:
    cuda = engine.options.device == "cuda"
    gpu = this_gpu() if cuda else None
    spread = 100 * (max(noise) - min(noise)) / min(noise)
    if spread > 25:
        warnings.warn(f"profile: a fixed block varied by {spread:.0f} % during the run: other load?", stacklevel=3)
    return ProfileMeta(
        device=engine.options.device,
        device_name=torch.cuda.get_device_name() if cuda else cpu_name(),
        machine=machine_name(),
        cores=cores(),
        dtype=engine.dtype_name,  # type: ignore[arg-type]
        shape=asdict(engine.shape),
        shape_hash=engine.shape.hash,
        expert_bytes=engine.expert_bytes,
        expert_format=engine.formats[0],
        gpu_uuid="" if gpu is None else gpu.uuid,
        driver="" if gpu is None else gpu.driver,
        cpu_experts=describe(),
        path="graphs" if engine.path == GRAPHS else "eager",
        mode=mode,
        emulated_link_bytes_per_s=engine.link_bytes_per_s,
        draft_model=engine.drafts.name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        software=software(),
        noise_pct=round(spread, 2),
    )
