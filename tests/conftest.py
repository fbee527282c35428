"""Fixtures shared by all tests, and the tiers: every test is marked unit, integration, slow or gpu."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreload.profiler.schema import HardwareProfile, Measurement, ProfileMeta
from foreload.shape import ModelShape
from foreload.traces.schema import DECODE, PREFILL, PredictionColumn, Trace, TraceMeta

TIERS = {"unit", "integration", "slow", "gpu"}
ROOT = Path(__file__).parent.parent


def pytest_sessionstart() -> None:
    """Build the native library if it is older than its sources, so that an editable tree tests what it holds."""
    native = ROOT / "backend" / "native"
    library, sources = native / "_experts.so", [*(native / "src").iterdir(), ROOT / "setup.py"]
    if not library.exists() or library.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse tests without a tier; skip `gpu` where there is no CUDA device."""
    bare = [item.nodeid for item in items if not TIERS & {mark.name for mark in item.iter_markers()}]
    if bare:
        raise pytest.UsageError(f"mark as one of {', '.join(sorted(TIERS))}: {', '.join(bare[:5])}")
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def shape() -> ModelShape:
    """A small shape whose MoE layers are not numbered from 0."""
    return ModelShape(
        family="qwen3_moe",
        layers=4,
        moe_layers=(1, 2, 3),
        hidden=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        vocab=64,
        experts=8,
        top_k=2,
        expert_width=8,
        scoring="softmax_topk",
        normalise_weights=True,
        rope_theta=1e4,
        norm_eps=1e-6,
        max_positions=512,
        tied_embeddings=True,
    )


@pytest.fixture
def make_meta(shape: ModelShape) -> Callable[..., TraceMeta]:
    """Metadata of a recording of `shape`; keywords replace fields."""

    def make(**fields: Any) -> TraceMeta:
        used = fields.pop("model_shape", shape)
        base: dict[str, Any] = {
            "model": "mini",
            "weights_hash": "0123456789ab",
            "tokenizer_hash": "ba9876543210",
            "shape": asdict(used),
            "shape_hash": used.hash,
            "moe_layers": used.n_moe_layers,
            "experts": used.experts,
            "top_k": used.top_k,
            "scoring": used.scoring,
            "source": "test",
            "sampling": {"temperature": 0.0},
            "machine": "test machine",
            "software": {"python": "3"},
            "seed": 0,
        }
        return TraceMeta(**{**base, **fields})

    return make


@pytest.fixture
def make_trace(make_meta: Callable[..., TraceMeta]) -> Callable[..., Trace]:
    """A recording with random routing: per request `prompt` tokens in one prefill step, then `tokens` decode steps."""

    def make(
        requests: int = 2,
        prompt: int = 5,
        tokens: int = 8,
        seed: int = 0,
        predictions: Sequence[PredictionColumn] = (),
        **fields: Any,
    ) -> Trace:
        meta = make_meta(predictions=tuple(predictions), seed=seed, **fields)
        rng = np.random.default_rng(seed)
        steps_per_request = tokens + 1
        step_in_request = np.concatenate([np.zeros(prompt, np.int32), np.arange(1, steps_per_request)])
        request = np.repeat(np.arange(requests, dtype=np.int32), prompt + tokens)
        step = (np.tile(step_in_request, requests) + request * steps_per_request).astype(np.int32)
        rows = len(request)

        def ranked(width: int) -> np.ndarray:
            scores = rng.random((rows, meta.moe_layers, meta.experts))
            return np.argsort(scores, axis=2)[:, :, :width].astype(np.int16)

        guesses = {(p.predictor, p.depth): ranked(p.width) for p in predictions}
        for (_, depth), block in guesses.items():
            block[:, :depth] = -1
        weights = rng.random((rows, meta.moe_layers, meta.top_k)).astype(np.float16) if meta.has_weights else None
        return Trace(
            meta=meta,
            request=request,
            step=step,
            phase=np.tile(np.where(step_in_request == 0, PREFILL, DECODE), requests).astype(np.int8),
            position=np.tile(np.arange(prompt + tokens, dtype=np.int32), requests),
            token_id=rng.integers(0, 64, rows, dtype=np.int32),
            accepted=np.ones(rows, np.bool_),
            experts=ranked(meta.top_k),
            weights=weights,
            predictions=guesses,
        )

    return make


@pytest.fixture
def write_trace() -> Callable[..., None]:
    """Write a trace through the writer, a step at a time, as an engine would."""
    from foreload.traces.io import TraceWriter

    def write(path: Any, trace: Trace, flush_rows: int = 1024) -> None:
        with TraceWriter(path, trace.meta, flush_rows) as writer:
            append_steps(writer, trace)

    return write


def append_steps(writer: Any, trace: Trace) -> None:
    """Append every step of `trace`."""
    starts = trace.step_starts()
    for first, last in itertools.pairwise(starts):
        rows = trace.take(slice(int(first), int(last)))
        writer.append(
            int(rows.request[0]),
            int(rows.step[0]),
            int(rows.phase[0]),
            rows.position,
            rows.token_id,
            rows.experts,
            accepted=rows.accepted,
            weights=rows.weights,
            predictions=rows.predictions,
        )


@pytest.fixture
def make_profile(shape: ModelShape) -> Callable[..., HardwareProfile]:
    """A made-up profile of `shape` that holds every probe; keywords replace fields of its metadata."""
    points: list[tuple[str, dict[str, int], float]] = [
        ("copy", {"bytes": 384, "pinned": 0}, 30.0),
        ("copy", {"bytes": 1536, "pinned": 0}, 100.0),
        ("embed", {}, 5.0),
        ("attention", {"context": 1}, 30.0),
        ("attention", {"context": 101}, 40.0),
        ("route", {}, 10.0),
        ("predict", {"depth": 1}, 4.0),
        ("predict", {"depth": 2}, 8.0),
        ("plan", {"copies": 0}, 8.0),
        ("plan", {"copies": 1}, 8.0),
        ("after_wait", {"wait_us": 0}, 60.0),
        ("after_wait", {"wait_us": 1000}, 60.0),
        ("after_cpu", {"threads": 1}, 60.0),
        ("interrupt", {}, 0.0),
        ("finish", {}, 6.0),
        ("experts_gpu", {"experts": 1}, 20.0),
        ("experts_gpu", {"experts": 2}, 40.0),
        ("experts_cpu", {"experts": 1, "threads": 1}, 60.0),
        ("experts_cpu", {"experts": 2, "threads": 1}, 120.0),
        ("experts_cpu_beside_copy", {"experts": 1, "threads": 1}, 90.0),
        ("experts_cpu_beside_copy", {"experts": 2, "threads": 1}, 180.0),
        ("copy_beside_cpu", {"threads": 1}, 125.0),
        ("both", {"gpu": 1, "cpu": 1, "threads": 1}, 64.0),
        ("wait", {}, 3.0),
        ("head", {}, 30.0),
        ("prefill_layer", {"tokens": 1}, 41.0),
        ("prefill_layer", {"tokens": 64}, 104.0),
        ("prefill_expert", {"tokens": 1}, 21.0),
        ("prefill_expert", {"tokens": 64}, 84.0),
        ("draft_ngram", {"tokens": 1}, 5.0),
        ("window_experts_gpu", {"experts": 1, "tokens": 2}, 30.0),
        ("window_experts_gpu", {"experts": 2, "tokens": 2}, 50.0),
        ("window_experts_gpu", {"experts": 4, "tokens": 8}, 120.0),
        ("window_experts_cpu", {"experts": 1, "tokens": 2, "threads": 1}, 80.0),
        ("window_experts_cpu", {"experts": 2, "tokens": 2, "threads": 1}, 140.0),
        ("window_experts_cpu", {"experts": 4, "tokens": 8, "threads": 1}, 300.0),
    ]
    blocks = ("embed", "attention", "route", "predict", "plan", "finish", "head")
    points += [(f"window_{block}", {"tokens": n}, 20.0 + n) for block in blocks for n in (1, 8)]

    def make(**fields: Any) -> HardwareProfile:
        base: dict[str, Any] = {
            "device": "cpu",
            "device_name": "AMD EPYC 9B14",
            "machine": "AMD EPYC 9B14, 2 cores, Linux x86_64",
            "cores": 2,
            "dtype": "float32",
            "shape": asdict(shape),
            "shape_hash": shape.hash,
            "expert_bytes": shape.expert_bytes("float32"),
            "mode": "quick",
            "emulated_link_bytes_per_s": 2 * 10**9,
            "date": "2026-11-29",
            "software": {"python": "3.11.7"},
            "noise_pct": 1.8,
        }
        measurements = tuple(
            Measurement(probe=probe, at=at, p50_us=us, p95_us=us * 1.1, repeats=20, source=source_of(probe))
            for probe, at, us in points
        )
        return HardwareProfile(meta=ProfileMeta(**{**base, **fields}), measurements=measurements)

    def source_of(probe: str) -> Any:
        return "assumed" if probe == "wait" else "measured"

    return make
