"""Small models, profiles and skewed, repetitive routing for the simulator's tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from foreload.formats import FORMATS, PackedFormat
from foreload.profiler.schema import HardwareProfile, Measurement, ProfileMeta
from foreload.shape import ModelShape
from foreload.traces.schema import DECODE, DRAFT_VERIFY, PREFILL, PredictionColumn, Trace, TraceMeta, concatenate

THREADS = (1, 2)


def make_shape(layers: int = 4, experts: int = 8, top_k: int = 2, hidden: int = 64, width: int = 32) -> ModelShape:
    return ModelShape(
        family="test",
        layers=layers,
        moe_layers=tuple(range(layers)),
        hidden=hidden,
        heads=4,
        kv_heads=2,
        head_dim=16,
        vocab=256,
        experts=experts,
        top_k=top_k,
        expert_width=width,
        scoring="softmax_topk",
        normalise_weights=True,
        rope_theta=1e4,
        norm_eps=1e-6,
        max_positions=512,
        tied_embeddings=True,
    )


def make_profile(
    shape: ModelShape, device: str = "cpu", copy_us: float = 100.0, gpu_us: float = 0.0, contended: bool = True
) -> HardwareProfile:
    """Round figures: an expert takes 20 us resident, 60 us on one CPU thread and `copy_us` on the link.

    With `contended`, CPU experts make copies 25 % and themselves 50 % slower, and resident experts share evenly.
    """
    size = shape.expert_bytes("float32")
    slow_copy, slow_cpu, slow_both = (1.25, 1.5, 1.2) if contended else (1.0, 1.0, 1.0)
    points: list[Measurement] = []

    def add(probe: str, us: float, busy: float = 0.0, **at: int) -> None:
        points.append(Measurement(probe=probe, at=at, p50_us=us, p95_us=us, gpu_us=busy, repeats=1))

    add("copy", copy_us / 4 + 1, bytes=size // 4, pinned=0)
    add("copy", copy_us, bytes=size, pinned=0)
    for probe, us in (("embed", 5), ("route", 10), ("finish", 6), ("head", 30)):
        add(probe, us, gpu_us)
    for copies in (0, 1):
        add("plan", 8, gpu_us, copies=copies)
    for wait_us in (0, 1000):
        add("after_wait", 60, wait_us=wait_us)
    add("interrupt", 0)
    add("wait", 3)
    for context, us in ((1, 30), (101, 40), (201, 60)):
        add("attention", us, gpu_us, context=context)
    for depth in (1, 2):
        add("predict", 4 * depth, gpu_us, depth=depth)
    for n in range(1, shape.top_k + 1):
        add("experts_gpu", 20 * n, 2 * gpu_us * n, experts=n)
        for threads in THREADS:
            cpu = 60 * n / threads
            add("experts_cpu", cpu, experts=n, threads=threads)
            add("experts_cpu_beside_copy", cpu * slow_cpu, experts=n, threads=threads)
    for threads in THREADS:
        add("after_cpu", 60, threads=threads)
        add("copy_beside_cpu", copy_us * slow_copy, threads=threads)
        short, long = sorted((max(20.0, 2 * gpu_us), 60.0 / threads))
        add("both", short * slow_both + long - short, gpu=1, cpu=1, threads=threads)
    for tokens in (1, 64):
        add("prefill_layer", 40 + tokens, gpu_us, tokens=tokens)
        add("prefill_expert", 20 + tokens, gpu_us, tokens=tokens)
    _add_windows(add, shape.top_k, gpu_us)
    meta = ProfileMeta(
        device=device,
        device_name="test",
        machine="test",
        cores=2,
        dtype="float32",
        shape=asdict(shape),
        shape_hash=shape.hash,
        expert_bytes=size,
        mode="quick",
        date="2026-01-01",
        software={},
        noise_pct=0.0,
    )
    return HardwareProfile(meta=meta, measurements=tuple(points))


def make_graph_profile(shape: ModelShape, copy_us: float = 100.0, slow_us: float = 1.0) -> HardwareProfile:
    """Of an engine that launches graphs: entering a layer takes 50 us, an expert 5, a launch is told of 4 us later.

    `slow_us` scales what the host takes.
    """
    base = make_profile(shape, "cuda", copy_us)
    points = [m for m in base.measurements if m.probe not in GRAPH_OTHERS]

    def add(probe: str, host: float = 0.0, device: float = 0.0, **at: int) -> None:
        host *= 1.0 if probe in ("launch", "wait", "copy_start", "cpu_asleep", "read_ahead") else slow_us
        points.append(Measurement(probe=probe, at=at, p50_us=host, p95_us=host, gpu_us=device, repeats=1))

    for context, us in ((1, 50), (101, 60), (201, 90)):
        add("attention", 3, us, context=context)
        add("whole", 0, shape.n_moe_layers * (us + 5 * shape.top_k) + 20, context=context)
    for probe, host, device in (
        ("launch", 4, 0), ("embed", 12, 0), ("finish", 9, 0), ("head", 2, 40), ("issue", 1.5, 0),
        ("late", 3.5, 0), ("bring", 2, 0), ("wait", 2.5, 0), ("copy_start", 6, 0), ("submit", 5, 0),
        ("enter_cpu", 0, 3), ("replayed", 0, 5),
    ):  # fmt: skip
        add(probe, host, device)
    add("plan", 10, copies=0)
    add("speculated", 0, 48, context=1)
    for beside in (0, 1):
        add("gpu_beside_copy", 0, 60 + 6 * beside, copies=beside)
    for depth in (1, 2):
        add("predict", 4 * depth, 3 * depth, depth=depth)
    for n in range(1, shape.top_k + 1):
        add("experts_gpu", 3, 5 * n, experts=n)
    for threads in THREADS:
        add("cpu_asleep", 15, threads=threads, idle_us=100)
        for idle_us, less in ((20, 6), (90, 20)):
            add("read_ahead", less, threads=threads, idle_us=idle_us)
        for beside in (0, 1):
            add("gpu_behind_cpu", 0, 44 + 20 * beside, copies=beside, threads=threads)
    for tokens in (1, 2, 8):
        for block in ("embed", "plan", "finish"):
            add(f"window_{block}", 50 + 2 * tokens, tokens=tokens)
        for block in ("attention", "predict", "head", "whole"):
            add(f"window_{block}", 0, 50 + 4 * tokens, tokens=tokens)
        if tokens > 1:
            add("window_whole_expert", 0, 2, tokens=tokens)
    for experts, tokens in ((1, 2), (1, 8), (shape.top_k, 2 * shape.top_k), (2 * shape.top_k, 2 * shape.top_k)):
        add("window_experts_gpu", 3, 4 * experts + tokens, experts=experts, tokens=tokens)
    meta = base.meta.model_copy(update={"path": "graphs"})
    return HardwareProfile(meta=meta, measurements=tuple(points))


def in_formats(profile: HardwareProfile, *formats: tuple[PackedFormat, float, float]) -> HardwareProfile:
    """`profile` with experts measured alone: (format, microseconds of one on the device, of one on the CPU)."""
    found, threads = [], sorted({m.at["threads"] for m in profile.measurements if m.probe == "experts_cpu"})
    for name, gpu_us, cpu_us in formats:
        for n in (1, 2):
            cpu = [("cpu_format", cpu_us, {"threads": count}) for count in threads]
            for probe, us, at in (("gpu_format", gpu_us, {}), *cpu):
                where = {"experts": n, "format": FORMATS.index(name), **at}
                found.append(Measurement(probe=probe, at=where, p50_us=n * us, p95_us=n * us, gpu_us=n * us, repeats=9))
    return HardwareProfile(meta=profile.meta, measurements=(*profile.measurements, *found))


def with_parts(profile: HardwareProfile, parts_us: tuple[float, ...]) -> HardwareProfile:
    """`profile` with CPU experts that take now one of these times, now another, in proportion to how many they are, and
    copies beside them likewise.
    """
    found = tuple(
        m.model_copy(update={"parts_us": tuple(us * m.at.get("experts", 1) for us in parts_us)})
        if m.probe in ("experts_cpu", "copy_beside_cpu")
        else m
        for m in profile.measurements
    )
    return profile.model_copy(update={"measurements": found})


GRAPH_OTHERS = {
    "attention", "embed", "finish", "head", "plan", "predict", "experts_gpu", "route", "both", "wait",
    "window_experts_gpu",
    *(f"window_{block}" for block in ("embed", "attention", "route", "predict", "plan", "finish", "head")),
}  # fmt: skip
"""Probes that another path measures otherwise, or not at all."""


def _add_windows(add: Callable[..., None], top_k: int, gpu_us: float) -> None:
    """Blocks take 2 us more per further token; an expert takes 15 us and 5 us per token, on the CPU 40 and 20."""
    for tokens in (1, 2, 8):
        for block in ("embed", "attention", "route", "predict", "plan", "finish", "head"):
            add(f"window_{block}", 50 + 2 * tokens, gpu_us, tokens=tokens)
        add("draft_ngram", 10 + tokens, tokens=tokens)
        add("sample", 7 * tokens, tokens=tokens)
    for experts, tokens in ((1, 2), (1, 8), (top_k, 2 * top_k), (2 * top_k, 2 * top_k)):
        add("window_experts_gpu", 15 * experts + 5 * tokens, 2 * gpu_us * experts, experts=experts, tokens=tokens)
        for threads in THREADS:
            cpu = 12 + (40 * experts + 20 * tokens) / threads
            add("window_experts_cpu", cpu, experts=experts, tokens=tokens, threads=threads)


def make_windows(shape: ModelShape, gamma: int, requests: int = 2, steps: int = 9, seed: int = 0) -> Trace:
    """A recording with verify windows: per request a prompt, then `steps` steps of 1 to gamma + 1 tokens."""
    rng = np.random.default_rng(seed)
    fed = rng.integers(1, gamma + 2, (requests, steps))
    parts = []
    for request in range(requests):
        rows = int(fed[request].sum())
        one = make_trace(shape, 1, 12, rows, seed + request)
        one.request[:] = request
        one.phase[one.phase == DECODE] = DRAFT_VERIFY
        one.step[12:] = np.repeat(np.arange(1, steps + 1), fed[request])
        one.step[:] += request * (steps + 1)
        at = position = 12
        for size in fed[request].tolist():
            kept = int(rng.integers(1, size + 1))
            one.accepted[at : at + size] = np.arange(size) < kept
            one.position[at : at + size] = position + np.arange(size)
            at, position = at + size, position + kept
        parts.append(one)
    meta = parts[0].meta.model_copy(update={"sampling": {"temperature": 0.0, "draft": "ngram", "gamma": gamma}})
    return concatenate(meta, parts)


def make_meta(shape: ModelShape, depths: int = 2, width: int | None = None) -> TraceMeta:
    width = width or shape.top_k
    return TraceMeta.of(
        shape,
        model="test",
        weights_hash="0",
        tokenizer_hash="0",
        source="test",
        sampling={},
        machine="test",
        software={},
        seed=0,
        predictions=tuple(PredictionColumn(predictor="gate", depth=d, width=width) for d in range(1, depths + 1)),
    )


def route(shape: ModelShape, tokens: int, rng: np.random.Generator, repeat: float = 0.5) -> np.ndarray:
    """Experts [tokens, L, k]: skewed popularity per layer, and a share `repeat` of the last token's experts again."""
    layers, experts, k = shape.n_moe_layers, shape.experts, shape.top_k
    skew = np.stack([rng.permutation(1.0 / np.arange(1, experts + 1)) for _ in range(layers)])
    out = np.zeros((tokens, layers, k), np.int16)
    for token in range(tokens):
        scores = np.log(skew) + rng.gumbel(size=skew.shape)
        if token:
            again = rng.random((layers, k)) < repeat
            np.put_along_axis(scores, out[token - 1], np.where(again, 9.0, -9.0), axis=1)
        out[token] = np.argsort(-scores, axis=1)[:, :k]
    return out


def predict(experts: np.ndarray, shape: ModelShape, width: int, recall: float, rng: np.random.Generator) -> np.ndarray:
    """Predictions [R, L, width]: each true expert with probability `recall`, the rest random, distinct."""
    out = np.full((*experts.shape[:2], width), -1, np.int16)
    for index in np.ndindex(*experts.shape[:2]):
        true = [e for e in experts[index].tolist() if rng.random() < recall]
        others = [e for e in rng.permutation(shape.experts).tolist() if e not in true]
        out[index] = (true + others)[:width]
    return out


def make_trace(
    shape: ModelShape,
    requests: int = 2,
    prompt: int = 12,
    tokens: int = 20,
    seed: int = 0,
    depths: int = 2,
    width: int | None = None,
    recall: float = 0.8,
    repeat: float = 0.5,
) -> Trace:
    """`requests` requests of `prompt` prompt rows and `tokens` decode rows."""
    rng = np.random.default_rng(seed)
    each = prompt + tokens
    rows = requests * each
    experts = np.concatenate([route(shape, each, rng, repeat) for _ in range(requests)])
    phase = np.tile(np.repeat(np.array([PREFILL, DECODE], np.int8), [prompt, tokens]), requests)
    starts = np.ones(each, bool)
    starts[1:prompt] = False
    meta = make_meta(shape, depths, width)
    wide = width or shape.top_k
    return Trace(
        meta=meta,
        request=np.repeat(np.arange(requests, dtype=np.int32), each),
        step=(np.cumsum(np.tile(starts, requests)) - 1).astype(np.int32),
        phase=phase,
        position=np.tile(np.arange(each, dtype=np.int32), requests),
        token_id=np.zeros(rows, np.int32),
        accepted=np.ones(rows, bool),
        experts=experts,
        weights=None,
        predictions={("gate", d): predict(experts, shape, wide, recall / d, rng) for d in range(1, depths + 1)},
    )


def manual_trace(
    shape: ModelShape, decode: list[list[list[int]]], predicted: list[list[list[int]]] | None = None
) -> Trace:
    """One request without a prompt; decode [T][L][k], predicted one layer ahead [T][L][width]."""
    experts = np.array(decode, np.int16)
    rows = len(experts)
    table = None if predicted is None else np.array(predicted, np.int16)
    return Trace(
        meta=make_meta(shape, 0 if table is None else 1, None if table is None else table.shape[2]),
        request=np.zeros(rows, np.int32),
        step=np.arange(rows, dtype=np.int32),
        phase=np.full(rows, DECODE, np.int8),
        position=np.zeros(rows, np.int32),
        token_id=np.zeros(rows, np.int32),
        accepted=np.ones(rows, bool),
        experts=experts,
        weights=None,
        predictions={} if table is None else {("gate", 1): table},
    )
