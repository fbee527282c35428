"""Metadata of the recordings and the cards beside them."""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from foreload.backend.models.config import ConfigFields
from foreload.backend.models.qwen import qwen3_moe
from foreload.traces.schema import TraceMeta
from recipes.train.config import ModelConfig
from recipes.train.export import hf_config

from .record import Recording
from .text import title

SOURCE = "recipes.topo"


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def machine() -> str:
    """The device, in words."""
    if torch.cuda.is_available():
        return f"one {torch.cuda.get_device_name()}"
    return f"{platform.processor() or platform.machine()} CPU"


def software() -> dict[str, str]:
    """Versions that results depend on."""
    found = {"python": platform.python_version()}
    for name in ("foreload", "torch", "numpy", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def trace_meta(name: str, c: ModelConfig, weights: Path, tokenizer: Path) -> TraceMeta:
    """Metadata common to all recordings of the exported weights; hashes are cut to 16 digits as the engine's are."""
    shape = qwen3_moe(ConfigFields(hf_config(c), f"{name}/config.json"))
    return TraceMeta.of(
        shape,
        model=name,
        weights_hash=sha256(weights)[:16],
        tokenizer_hash=sha256(tokenizer)[:16],
        source=SOURCE,
        sampling={},
        machine=machine(),
        software=software(),
        seed=0,
    )


def card(recording: Recording, meta: TraceMeta, weights_sha256: str, bits: dict[str, float], size: int) -> str:
    """The Markdown card of one recording; `bits` are held-out bits per byte by kind of text."""
    subjects = ", ".join(
        f"{title(kind)} ({bits[kind]:.3f} bits per byte held out)" if kind in bits else title(kind)
        for kind in recording.subjects
    )
    rows: list[tuple[str, Any]] = [
        ("what", recording.what),
        ("model", f"`{meta.model}`: {meta.moe_layers} layers, {meta.experts} experts, top-{meta.top_k}"),
        ("subject", subjects),
        ("prompt", "the beginning of a held-out document"),
        ("made by", f"`python -m {SOURCE}.run` on {meta.machine}"),
        ("software", ", ".join(f"{k} {v}" for k, v in meta.software.items())),
        ("seed", recording.seed if recording.sampling.get("temperature") else "none (greedy)"),
        (
            "sampling",
            ", ".join(f"{k.replace('_', '-')} {v}" for k, v in recording.sampling.items())
            + ("; the end of a document is never drawn" if recording.sampling.get("temperature") else ""),
        ),
        ("weights", f"SHA-256 `{weights_sha256}` (not shipped; a later run gives other weights)"),
        ("tokenizer", f"SHA-256 begins `{meta.tokenizer_hash}`"),
        ("shape", f"`{meta.shape_hash}`"),
        *((key.replace("_", " "), value) for key, value in recording.facts.items()),
        ("file", f"{size:,} bytes"),
    ]
    lines = "\n".join(f"| {key} | {value} |" for key, value in rows)
    return f"# {recording.name}\n\n| | |\n|---|---|\n{lines}\n"
