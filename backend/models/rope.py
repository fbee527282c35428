"""Rotary embeddings: what a configuration says, and the tables of cosine and sine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foreload.backend.models.config import ConfigFields, shown
from foreload.shape import ModelShape, Yarn

ROPE_TYPES = ("default", "yarn")


@dataclass(frozen=True)
class Rope:
    """Base and scaling of a model's rotary embedding."""

    theta: float
    yarn: Yarn | None


def read_rope(config: ConfigFields, latent: bool = False) -> Rope:
    """The rotary embedding in a configuration, in the spelling of either `rope_parameters` or `rope_scaling`.

    With `latent` attention YaRN's `mscale_all_dim` also scales the attention scores (DeepSeek-V2, arXiv 2405.04434).
    FileError names a type that is not known, or a field that is missing.
    """
    where = "rope_scaling" if config.section("rope_scaling") is not None else "rope_parameters"
    section = config.section(where)
    if section is None:
        return Rope(_theta(config), None)
    kind = section.get("rope_type") or section.get("type") or ("default" if section.get("factor") is None else None)
    if kind not in ROPE_TYPES:
        raise config.refuse(where, f"rotary embedding {shown(kind)} is not known: known are {', '.join(ROPE_TYPES)}")
    places = [place for place in (section, config.section("rope_parameters"), config) if place is not None]
    theta = _theta(next((place for place in places if place.get("rope_theta") is not None), section))
    for fields in (section, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.refuse("partial_rotary_factor", "1 is needed")
    if kind == "default":
        return Rope(theta, None)
    positions = section.count("original_max_position_embeddings")
    factor = section.positive("factor", config.positive("max_position_embeddings") / positions)
    every, some = section.number("mscale_all_dim", 0.0), section.number("mscale", 0.0)
    rotary = _mscale(factor, some) / _mscale(factor, every) if some and every else _mscale(factor, 1.0)
    return Rope(
        theta,
        Yarn(
            factor,
            positions,
            section.positive("beta_fast", 32.0),
            section.positive("beta_slow", 1.0),
            section.flag("truncate", True),
            section.positive("attention_factor", rotary),
            _mscale(factor, every) ** 2 if latent and every else 1.0,
        ),
    )


def _theta(place: ConfigFields) -> float:
    theta = place.positive("rope_theta")
    if theta <= 1:
        raise place.refuse("rope_theta", "a number above 1 is needed")
    return theta


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def inverse_frequencies(shape: ModelShape) -> Tensor:
    """Angle per position of each pair of rotated dimensions, fp32 [rotated / 2]."""
    dim = shape.latent.rope_dim if shape.latent is not None else shape.head_dim
    plain = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    yarn = shape.yarn
    if yarn is None:
        return plain
    low, high = (_corrected(yarn, turns, dim, shape.rope_theta) for turns in (yarn.beta_fast, yarn.beta_slow))
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if high == low else 0.0
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _corrected(yarn: Yarn, turns: float, dim: int, theta: float) -> float:
    """The dimension that turns `turns` times over the original positions (arXiv 2309.00071, equation 17)."""
    return dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotary_tables(shape: ModelShape, positions: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [positions, 1, rotated dimensions], such that x * cos + x.roll(half) * sin rotates x."""
    inverse = inverse_frequencies(shape)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    scale = shape.yarn.rotary_scale if shape.yarn is not None else 1.0
    cos, sin = angles.cos() * scale, angles.sin() * scale
    sin[..., : inverse.numel()] *= -1
    return cos.to(device, dtype), sin.to(device, dtype)
