"""Made-up inputs of a realistic size: a shape of 48 layers, its profile, and routing that repeats and is skewed."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from foreload.backend.made_up import of_routing
from foreload.profiler.schema import HardwareProfile, Measurement, ProfileMeta
from foreload.traces.schema import Trace
from foreload.traces.synthetic import QWEN3

SHAPE = QWEN3
KEEP = 0.4  # chance that an expert is used again by the next token


def profile() -> HardwareProfile:
    """Round figures, labelled assumed; simulated times mean nothing here, only how fast they are found."""
    size, threads = SHAPE.expert_bytes("bfloat16"), 16
    points: list[tuple[str, dict[str, int], float]] = [("copy", {"bytes": size, "pinned": 1}, 170.0)]
    points += [(name, {}, us) for name, us in (("embed", 10), ("route", 8), ("finish", 5), ("head", 60), ("wait", 5))]
    points += [("plan", {"copies": copies}, 10.0 + 5 * copies) for copies in (0, 1)]
    points += [("after_wait", {"wait_us": wait_us}, us) for wait_us, us in ((0, 60.0), (1000, 90.0))]
    points += [("after_cpu", {"threads": threads}, 70.0), ("interrupt", {}, 5.0)]
    points += [("copy_beside_cpu", {"threads": threads}, 190.0)]
    points += [("both", {"gpu": 4, "cpu": 4, "threads": threads}, 560.0)]
    points += [("attention", {"context": context}, us) for context, us in ((1, 25.0), (4096, 40.0))]
    points += [("predict", {"depth": depth}, 6.0 * depth) for depth in (1, 2)]
    for n in (1, 8):
        points.append(("experts_gpu", {"experts": n}, 10.0 + 4 * n))
        points.append(("experts_cpu", {"experts": n, "threads": threads}, 130.0 * n))
        points.append(("experts_cpu_beside_copy", {"experts": n, "threads": threads}, 170.0 * n))
        points.append(("prefill_layer", {"tokens": n}, 60.0 + n))
        points.append(("prefill_expert", {"tokens": n}, 20.0 + n))
    meta = ProfileMeta(
        device="cpu",
        device_name="assumed",
        machine="assumed",
        cores=threads,
        dtype="bfloat16",
        shape=asdict(SHAPE),
        shape_hash=SHAPE.hash,
        expert_bytes=size,
        mode="quick",
        date="2026-01-01",
        software={},
        noise_pct=0.0,
    )
    measurements = (
        Measurement(probe=probe, at=at, p50_us=us, p95_us=us, repeats=1, source="assumed") for probe, at, us in points
    )
    return HardwareProfile(meta=meta, measurements=tuple(measurements))


def graph_profile() -> HardwareProfile:
    """The same for an engine that launches graphs."""
    top_k, points = SHAPE.top_k, list[Measurement]()

    def add(probe: str, us: float, gpu_us: float = 0.0, **at: int) -> None:
        points.append(Measurement(probe=probe, at=at, p50_us=us, p95_us=us, gpu_us=gpu_us, repeats=1, source="assumed"))

    for name in ("launch", "embed", "finish", "issue", "late", "wait", "copy_start", "submit"):
        add(name, 4.0)
    for name in ("head", "enter_cpu", "replayed"):
        add(name, 2.0, 20.0)
    add("plan", 10.0, copies=0)
    add("speculated", 0.0, 30.0, context=1)
    for context in (1, 4096):
        add("attention", 3.0, 40.0, context=context)
        add("whole", 0.0, 3000.0, context=context)
    for copies in (0, 1):
        add("gpu_beside_copy", 0.0, 60.0, copies=copies)
    for depth in (1, 2):
        add("predict", 4.0 * depth, 5.0 * depth, depth=depth)
    for n in (1, top_k):
        add("experts_gpu", 3.0, 4.0 * n, experts=n)
    base, made = profile(), {m.probe for m in points}
    kept = [m for m in base.measurements if m.probe not in {*made, "route", "both"}]
    meta = base.meta.model_copy(update={"device": "cuda", "path": "graphs"})
    return HardwareProfile(meta=meta, measurements=(*kept, *points))


def trace(tokens: int, seed: int = 0) -> Trace:
    """One request of `tokens` decode steps; each token keeps an expert of the last with probability KEEP."""
    rng = np.random.default_rng(seed)
    k, layers, experts = SHAPE.top_k, SHAPE.n_moe_layers, SHAPE.experts
    skew = rng.normal(0, 1.0, (layers, experts))
    routed: NDArray[np.int16] = np.empty((tokens, layers, k), np.int16)
    predicted: NDArray[np.int16] = np.empty((tokens, layers, k), np.int16)
    kept = np.zeros((layers, experts), np.bool_)
    for token in range(tokens):
        score = skew + rng.gumbel(size=(layers, experts)) + np.where(kept & (rng.random(kept.shape) < KEEP), 20.0, 0.0)
        routed[token] = np.argsort(-score, axis=1)[:, :k]
        predicted[token] = np.argsort(-score - rng.normal(0, 2.0, score.shape), axis=1)[:, :k]
        kept[:] = False
        np.put_along_axis(kept, routed[token].astype(np.int64), True, axis=1)
    predicted[:, :1] = -1
    return of_routing(SHAPE, routed, predicted, "benchmarks", seed)
