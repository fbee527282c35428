"""Settings tuned from a profile for every workload and cache size, side by side on this machine's cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed
from joblib.externals.loky import get_reusable_executor
from numpy.typing import NDArray

from benchmarks.workloads import Workload
from foreload.files import read_mapping, write_json
from foreload.machine import cores
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, staging_slots
from foreload.simulator.costs import CostModel
from foreload.simulator.tune import tune
from foreload.traces.schema import Trace

TUNE_TOKENS = 64
Tuned = dict[str, dict[float, Settings]]
"""Workload -> cache size -> settings."""


def tune_all(costs: CostModel, workloads: Sequence[Workload], ratios: Sequence[float], seconds: float) -> Tuned:
    """The settings that were found within about so many seconds; with one core there is no limit.

    A tuner sees tokens that are not replayed, and may use the slots of the default at that cache size.
    """
    jobs = [
        delayed(_tuned)(one.name, ratio, one.rest(TUNE_TOKENS), costs.profile, one.start)
        for one in workloads
        for ratio in ratios
    ]
    workers, found = min(cores(), len(jobs)), Tuned({one.name: {} for one in workloads})
    limit = seconds if workers > 1 else None
    try:
        with suppress(multiprocessing.TimeoutError):
            for name, ratio, settings in Parallel(workers, return_as="generator_unordered", timeout=limit)(jobs):
                found[name][ratio] = Settings.model_validate(settings)
    finally:
        if workers > 1:
            get_reusable_executor().shutdown(wait=False, kill_workers=True)
    return found


def _tuned(
    name: str, ratio: float, trace: Trace, profile: HardwareProfile, start: NDArray[Any]
) -> tuple[str, float, dict[str, Any]]:
    shape = trace.meta.model_shape()
    slots = round(ratio * shape.all_experts) + staging_slots(Settings(), shape)
    result = tune(trace, profile, shape, profile.meta.dtype, slots=slots, warm=start, replayed=True)
    return name, ratio, result.best.settings.model_dump(mode="json")


def write_tuned(path: Path, tuned: Tuned) -> None:
    """As JSON."""
    shown = {
        name: {str(ratio): s.model_dump(mode="json", exclude_none=True) for ratio, s in of.items()}
        for name, of in tuned.items()
    }
    write_json(path, shown)


def read_tuned(path: Path) -> Tuned:
    """What `write_tuned` wrote; FileError or SettingsError if it is no such file."""
    found: Mapping[str, Mapping[str, Any]] = read_mapping(path, "tuned settings")
    return {
        name: {float(ratio): Settings.parse(value, str(path)) for ratio, value in of.items()}
        for name, of in found.items()
    }


def read_prepared(path: Path, workload: str) -> Tuned:
    """The settings that `benchmarks.tuned_h200` has found for a workload on the link as it is."""
    budgets = read_mapping(path, "prepared settings")["budgets"].values()
    held = [one for one in budgets if one["link_bytes_per_s"] is None and "tuned" in one["named"]]
    found = {float(one["cache_ratio"]): Settings.parse(one["named"]["tuned"][0], str(path)) for one in held}
    return {workload: found} if found else {}
