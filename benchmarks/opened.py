"""An engine for a benchmark's own command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.settings import Settings


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model on which device, where results go and how long it may take."""
    parser.add_argument("--model", default="shape:qwen3-30b-a3b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--link", type=float, help="bytes per second of an emulated link")
    parser.add_argument("--draft-model", help="draft model to have on the device")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--out", type=Path, help="folder of the results, and of the machine's profile if there is one")


def opened(given: argparse.Namespace, context: int, checkpoint: Checkpoint | None = None) -> Engine:
    """The engine that the flags describe, without a cache yet."""
    options = EngineOptions(
        device=given.device, context_tokens=context, link_bytes_per_s=int(given.link) if given.link else None
    )
    settings = Settings.parse({"cache_ratio": 0.0, "draft": {"model": given.draft_model}})
    return Engine(checkpoint or Checkpoint.open(given.model), options, settings)
