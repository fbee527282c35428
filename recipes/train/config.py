"""Configurations: the shape of a model and how it is trained, read from one JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model; `experts` = 0 means a dense Qwen3, else Qwen3-MoE with that many experts in every layer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    expert_width: int
    experts: int = 0
    top_k: int = 0
    vocabulary: int = 4096
    max_positions: int = 4096
    rope_theta: float = 10000.0
    eps: float = 1e-6

    @property
    def active_parameters(self) -> int:
        """Weights multiplied per token, the output head included."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        width = self.expert_width * (self.top_k or 1)
        return self.layers * (attention + 3 * self.hidden * width + self.hidden * self.experts) + (
            self.vocabulary * self.hidden
        )


@dataclass(frozen=True)
class Phase:
    """Sequence length used until `until` (share of the time budget)."""

    sequence: int
    until: float


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained; the schedule runs on elapsed time, so it always ends annealed."""

    batch_tokens: int = 65536
    phases: tuple[Phase, ...] = (Phase(1024, 1.0),)
    optimizer: str = "muon"
    matrix_rate: float = 5e-3
    adam_rate: float = 3e-3
    weight_decay: float = 0.02
    warmup_steps: int = 200
    decay_share: float = 0.4
    balance: float = 0.002
    router_z: float = 1e-4
    clip_norm: float = 1.0
    seed: int = 1


@dataclass(frozen=True)
class Config:
    """A named model and its training."""

    name: str
    model: ModelConfig
    train: TrainConfig = field(default_factory=TrainConfig)

    @staticmethod
    def load(path: Path) -> Config:
        """Read a configuration file; unknown fields are errors."""
        return Config.from_dict(json.loads(path.read_text()))

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> Config:
        """The inverse of `to_dict`."""
        train = dict(raw.get("train", {}))
        if "phases" in train:
            train["phases"] = tuple(Phase(**p) for p in train["phases"])
        return Config(raw["name"], ModelConfig(**raw["model"]), TrainConfig(**train))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as written beside a checkpoint."""
        return asdict(self)
