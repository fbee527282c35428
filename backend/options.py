"""What is fixed while an engine lives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from foreload.backend.cuda.buffers import DeviceMemory
from foreload.budget import chunk_bytes
from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.shape import ModelShape

Device = Literal["cpu", "cuda"]
DEFAULT_DTYPE = {"cpu": "float32", "cuda": "bfloat16"}


@dataclass(frozen=True)
class EngineOptions:
    """What is fixed while an engine lives. `vram_bytes` None: what the device has free."""

    device: Device = "cpu"
    dtype: str | None = None  # float32 or bfloat16; None: float32 on cpu, bfloat16 on cuda
    context_tokens: int = 2048
    vram_bytes: int | None = None
    link_bytes_per_s: int | None = None  # emulated link rate, at most the real one's; None: as fast as it is
    calibration: Path | None = None  # folder of `foreload calibrate`; None: the model folder's own, if it has one
    shadow: bool = False  # run the gates of speculated layers too, to count their true recall
    eager: bool = False  # on cuda: launch every operator, not graphs
    debug_seed: int | None = None  # poison freed slots with NaN and delay copies at random

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("device 'cuda' is not available: no CUDA GPU is visible to torch; use 'cpu'")
        if self.link_bytes_per_s is not None and self.link_bytes_per_s < 1:
            raise UsageError(f"link_bytes_per_s {self.link_bytes_per_s} must be at least 1")
        if self.resolved_dtype not in ("float32", "bfloat16"):
            raise UsageError(f"dtype {self.dtype!r} is not known: float32 or bfloat16")
        if self.context_tokens < 1:
            raise UsageError(f"context_tokens {self.context_tokens} must be at least 1")

    @property
    def resolved_dtype(self) -> str:
        """The dtype's name."""
        return self.dtype or DEFAULT_DTYPE[self.device]


def working_bytes(options: EngineOptions, shape: ModelShape, settings: Settings) -> int:
    """Device bytes, on a GPU, of a prompt chunk and of the static memory of graphs, for steps as long as drafts are."""
    if options.device != "cuda":
        return 0
    dtype = getattr(torch, options.resolved_dtype)
    chunk, context = settings.prefill_chunk_tokens, options.context_tokens
    found = chunk_bytes(shape, options.resolved_dtype, chunk, context, not options.eager)
    if not options.eager:
        found += DeviceMemory.bytes(shape, settings.draft.gamma + 1, options.context_tokens, dtype)
    return found


def available_bytes(options: EngineOptions) -> int:
    """Device memory an engine may use: as the options say, or most of what is free now."""
    if options.vram_bytes is not None:
        return options.vram_bytes
    if options.device == "cuda":
        return int(torch.cuda.mem_get_info()[0] * 0.95)
    return int(psutil.virtual_memory().available * 0.5)
