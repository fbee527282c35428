"""What a step over several tokens costs beyond one over a single token (probes `window_*`, `draft_*` and `sample`).

A block over n tokens costs what it does over one (at the context, or the number of layers ahead, in question) and the
difference that was measured between n tokens and one. Experts cost e per distinct expert and f per token, fitted to the
measured groups; so do CPU experts, and a hand-off besides. Both are therefore at best `interpolated`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from foreload.errors import FileError
from foreload.profiler.schema import HardwareProfile
from foreload.units import us_to_ns


@dataclass(frozen=True)
class Plane:
    """Nanoseconds of a group of experts: base + per expert + per token, on the host thread and on the GPU."""

    host: tuple[float, float, float]
    gpu: tuple[float, float, float]

    def host_ns(self, experts: int, tokens: int) -> int:
        """Time on the host thread."""
        return _value(self.host, experts, tokens)

    def gpu_ns(self, experts: int, tokens: int) -> int:
        """Time the GPU is busy."""
        return _value(self.gpu, experts, tokens)


def _value(plane: tuple[float, float, float], experts: int, tokens: int) -> int:
    return round(plane[0] + plane[1] * experts + plane[2] * tokens)


def plane(profile: HardwareProfile, probe: str, with_base: bool, **fixed: int) -> Plane:
    """Fit `probe`, measured over experts and tokens; FileError if it is not there or at too few points.

    Least squares of relative errors, no term below 0.
    """
    found = profile.points(probe, **fixed)
    points = [m for m in found if {"experts", "tokens"} <= m.at.keys()]
    places = np.array([[m.at["experts"], m.at["tokens"]] for m in points], np.float64)
    if len(points) < 3 or np.linalg.matrix_rank(places) < 2:
        raise FileError(f"profile: {probe!r} is measured at too few numbers of experts and tokens for windows")
    return Plane(
        _fit(places, [us_to_ns(m.cost_us[0]) for m in points], with_base),
        _fit(places, [us_to_ns(m.cost_us[1]) for m in points], with_base),
    )


def _fit(places: NDArray[np.float64], times_ns: Sequence[int], with_base: bool) -> tuple[float, float, float]:
    weights = 1.0 / np.maximum(np.asarray(times_ns, np.float64), 1.0)
    columns = np.column_stack([np.full(len(places), float(with_base)), places])
    found, _ = nnls(columns * weights[:, None], np.asarray(times_ns) * weights)
    return float(found[0]), float(found[1]), float(found[2])
