"""Random weights: each tensor is made when it is asked for, from its name, on the device where it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from foreload.backend.models.packed import MX_BIAS, MX_BLOCK, MX_BYTES, Mxfp4
from foreload.backend.models.source import Found, Wanted

SMALL = 0.02
"""Spread of biases."""
_E2M1_SPREAD = 2.6  # of 16 equally likely values


class RandomWeights:
    """Norms are 1; matrices keep the scale of what they multiply. The same name gives the same numbers on one device.

    Floats are bfloat16, as published; packed experts have random blocks.
    """

    where = "random weights"

    def __init__(self, seed: str) -> None:
        self._seed = seed

    def has(self, name: str) -> bool:
        """Whatever is asked for is there."""
        return True

    def files(self) -> list[Path]:
        """There are none."""
        return []

    def hash(self) -> str:
        """Sixteen hex digits of the seed."""
        return hashlib.sha256(f"random {self._seed}".encode()).hexdigest()[:16]

    def read(self, wanted: Sequence[Wanted], device: torch.device | None = None) -> Iterator[tuple[Wanted, Found]]:
        """The wanted tensors on `device` (default: the CPU)."""
        for one in wanted:
            yield one, self._make(one, device or torch.device("cpu"))

    def _make(self, one: Wanted, device: torch.device) -> Found:
        if one.name.endswith("norm.weight"):
            return torch.ones(one.size, device=device, dtype=torch.bfloat16)
        place = "" if one.index is None else f" {one.index[0]}"
        digest = hashlib.sha256(f"{self._seed} {one.name}{place}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        fan_in = one.size[-1] if len(one.size) > 1 else 0
        if one.stored == "mxfp4":
            return self._packed(one.size, fan_in, generator)
        spread = 1.0 if "embed" in one.name or one.name.endswith("sinks") else fan_in**-0.5 if fan_in else SMALL
        made = torch.randn(one.size, generator=generator, device=device)
        return made.mul_(spread).to(torch.bfloat16)

    @staticmethod
    def _packed(size: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Mxfp4:
        shape = (size[0], size[1] // MX_BLOCK)
        made = torch.randint(256, (*shape, MX_BYTES), generator=generator, device=generator.device, dtype=torch.uint8)
        exponent = round(torch.tensor(fan_in**-0.5 / _E2M1_SPREAD).log2().item())
        scales = torch.full(shape, MX_BIAS + exponent, device=generator.device, dtype=torch.uint8)
        return Mxfp4(made, scales)
