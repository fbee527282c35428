"""How what is simulated varies: by factors that the profile gives, each in its turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreload.profiler.schema import HardwareProfile

GOLDEN, SILVER = 2654435769, 1779033703
"""Of 2 ** 32, the golden ratio's inverse and the square root of 2 less 1: multiples of each, modulo 2 ** 32, are spread
evenly, however few there are, and those of one say nothing of the other's."""
_EVENLY = np.linspace(0, 1, 16)


def in_turn(factors: Sequence[int], turn: int, stride: int) -> int:
    """Factors spread evenly over turns; `stride`: GOLDEN or SILVER."""
    return factors[(turn * stride & 0xFFFFFFFF) * len(factors) >> 32]


def shares(profile: HardwareProfile, probe: str, threads: int) -> NDArray[np.float64]:
    """Equally likely times of what `probe` took on or beside so many threads, of their mean; ascending. One alone if
    the profile does not say.
    """
    held = [m for m in profile.measurements if m.probe == probe and m.at.get("threads") == threads]
    parts = [(m.parts_us, m.repeats) for m in held if m.parts_us and sum(m.parts_us)]
    if not parts:
        return np.ones(1)
    each = [np.interp(_EVENLY, np.linspace(0, 1, len(us)), np.asarray(us) / np.mean(us)) for us, _ in parts]
    mean = np.average(each, axis=0, weights=[repeats for _, repeats in parts])
    return np.asarray(mean / mean.mean())
