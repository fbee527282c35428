"""Straight lines through measurements, with how far they are off: fixed cost and rate of a link, cost per expert.

The cost model does not use them: it looks measurements up. They say at a glance what the machine does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from foreload.profiler.schema import HardwareProfile, Measurement

BY_BYTES = ("copy", "to_host", "both_ways", "storage")


@dataclass(frozen=True)
class Fit:
    """Microseconds = `fixed_us` + `each_us` per unit, over the measurements of one probe."""

    what: str
    unit: str
    fixed_us: float
    each_us: float
    median_error_pct: float
    worst_error_pct: float
    points: int

    @property
    def bytes_per_s(self) -> float | None:
        """The rate, of a fit by bytes that found one."""
        return 1e6 / self.each_us if self.unit == "bytes" and self.each_us else None


def line(what: str, unit: str, at: Sequence[float], times_us: Sequence[float]) -> Fit | None:
    """Least squares of relative errors, neither term below 0; None for fewer than three points, or a time of 0."""
    places, times = np.asarray(at, np.float64), np.asarray(times_us, np.float64)
    if len(places) < 3 or len(set(at)) < 3 or times.min() <= 0:
        return None
    scale = places.max()
    columns = np.column_stack([np.ones(len(places)), places / scale]) / times[:, None]
    (fixed, each), _ = nnls(columns, np.ones(len(places)))
    error: NDArray[np.float64] = np.abs((fixed + each * places / scale) / times - 1) * 100
    return Fit(what, unit, float(fixed), float(each / scale), float(np.median(error)), float(error.max()), len(places))


def fits(measurements: Sequence[Measurement]) -> list[Fit]:
    """Every line that the measurements allow."""
    found = []
    for probe in BY_BYTES:
        for pinned in (1, 0, None):
            some = [m for m in measurements if m.probe == probe and m.at.get("pinned") == pinned]
            kind = {1: ", pinned", 0: ", pageable", None: ""}[pinned]
            found.append(line(f"{probe}{kind}", "bytes", [m.at["bytes"] for m in some], [m.p50_us for m in some]))
    busy = [m for m in measurements if m.probe in ("attention", "experts_gpu")]
    for probe, unit in (("attention", "context"), ("experts_gpu", "experts")):
        some = [m for m in busy if m.probe == probe]
        found.append(line(probe, unit, [m.at[unit] for m in some], [max(m.p50_us, m.gpu_us) for m in some]))
    for threads in sorted({m.at["threads"] for m in measurements if m.probe == "experts_cpu"}):
        some = [m for m in measurements if m.probe == "experts_cpu" and m.at["threads"] == threads]
        what = f"experts_cpu, {threads} thread{'s' if threads > 1 else ''}"
        found.append(line(what, "experts", [m.at["experts"] for m in some], [m.p50_us for m in some]))
    return [fit for fit in found if fit is not None]


def fits_of(profile: HardwareProfile) -> list[Fit]:
    """Lines through a profile."""
    return fits(profile.measurements)
