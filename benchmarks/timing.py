"""Rates: how many units of work a second, median of repeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Rate:
    """One measured rate; `ratio` is to the first of its group."""

    name: str
    per_second: float
    unit: str
    ratio: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"name": self.name, f"{self.unit}_per_s": self.per_second, "ratio": self.ratio}


def measure(
    name: str,
    work: Callable[[], object],
    units: int,
    unit: str,
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> Rate:
    """The rate of `work`, which does `units` units; run once before, so that nothing is compiled meanwhile.

    `clock`: seconds; of work on one thread `time.process_time`, which other load changes less.
    """
    work()
    seconds = []
    for _ in range(repeats):
        begun = clock()
        work()
        seconds.append(clock() - begun)
    return Rate(name, units / median(seconds), unit)


def group(rates: list[Rate]) -> list[Rate]:
    """With ratios to the first."""
    return [replace(rate, ratio=rate.per_second / rates[0].per_second) for rate in rates]
