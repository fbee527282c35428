"""What an export is made for, and what it is: values shared by all targets."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.settings import Settings
from foreload.shape import ModelShape

CPU = -1
"""Device number of host memory; devices count from 0."""


def device_name(device: int, backend: str = "CUDA") -> str:
    """`CPU`, or the backend's name and number as engines write it."""
    return "CPU" if device == CPU else f"{backend}{device}"


@dataclass(frozen=True)
class Target:
    """Model, settings and machine that an export is for; L = MoE layers, E = experts per layer."""

    shape: ModelShape
    settings: Settings
    weights: str  # how a command names the weights
    gpus: tuple[int, ...] = ()  # free bytes of each device; empty: one device that holds what the settings say
    context: int = 8192
    bits: float = 16.0  # bits per weight as the target stores them
    counts: NDArray[np.int64] | None = None  # [L, E] how often each expert was used
    folder: str = ""  # where files will be, as the command has to name them
    backend: str = "CUDA"

    @property
    def devices(self) -> int:
        """Number of GPUs."""
        return max(1, len(self.gpus))

    def size(self, weights: int) -> int:
        """Bytes of so many weights, rounded up."""
        return math.ceil(weights * self.bits / 8)


@dataclass(frozen=True)
class Placement:
    """Where layers are: `CPU` or a device number."""

    dense: tuple[int, ...]  # per decoder layer: attention, norms, gate, shared experts, dense feed-forward
    experts: tuple[int, ...]  # per MoE layer: all of its routed experts
    cache_experts: int = 0  # experts of the CPU's layers that a cache on the device may hold


@dataclass(frozen=True)
class Placed:
    """One tensor, or a share of one: where it is, and which part of the command says so."""

    name: str
    layer: int  # of the decoder; -1: of none
    role: str
    device: str
    bytes: int
    because: str


@dataclass(frozen=True)
class Explanation:
    """What a command line does with the tensors of a model."""

    engine: str
    tensors: tuple[Placed, ...]
    warnings: tuple[str, ...] = ()
    extra: Mapping[str, int] = field(default_factory=dict)  # device -> bytes of caches and buffers
    not_read: tuple[str, ...] = ()  # flags that are not understood here, as if they were not given

    def bytes_by_device(self) -> dict[str, int]:
        """Bytes of weights, caches and buffers per device."""
        total: dict[str, int] = dict(self.extra)
        for tensor in self.tensors:
            total[tensor.device] = total.get(tensor.device, 0) + tensor.bytes
        return dict(sorted(total.items()))

    def expert_devices(self) -> dict[int, set[str]]:
        """Decoder layer -> devices that hold its routed experts."""
        found: dict[int, set[str]] = {}
        for tensor in self.tensors:
            if tensor.role == "experts":
                found.setdefault(tensor.layer, set()).add(tensor.device)
        return found


@dataclass(frozen=True)
class Exported:
    """A command line, files, or both, with what the target cannot express."""

    engine: str
    checked: str  # the version its options were checked against
    command: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    placement: Placement | None = None

    @property
    def shell(self) -> str:
        """The command as one line for a shell; empty if there is none."""
        return shlex.join(self.command)

    def as_dict(self) -> dict[str, Any]:
        """JSON values, without the files' content."""
        placed = None
        if self.placement is not None:
            placed = {
                "dense": list(self.placement.dense),
                "experts": list(self.placement.experts),
                "cache_experts": self.placement.cache_experts,
            }
        return {
            "engine": self.engine,
            "checked_against": self.checked,
            "command": list(self.command),
            "shell": self.shell,
            "files": sorted(self.files),
            "notes": list(self.notes),
            "placement": placed,
        }


@dataclass(frozen=True)
class Exporter:
    """One engine: how settings become its command, and how its commands are read."""

    name: str
    checked: str
    expresses: frozenset[str]  # fields of Settings that reach the target
    make: Callable[[Target], Exported]
    explain: Callable[[Sequence[str], Target], Explanation] | None = None
    several_gpus: bool = False


def unexpressed(settings: Settings, expresses: Iterable[str], engine: str) -> tuple[str, ...]:
    """One note per setting that differs from the default and has no counterpart in `engine`."""
    known = set(expresses)
    changed = settings.model_dump(exclude_defaults=True)
    return tuple(f"{name}={value}: {engine} has no counterpart" for name, value in changed.items() if name not in known)
