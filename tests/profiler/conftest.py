"""Profiles of a tiny random model and of the bundled one, measured once with little effort."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "backend"))
sys.path.insert(0, str(Path(__file__).parents[1] / "backend" / "cuda"))

from tiny_models import save_calibration, save_tiny

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy.state import KEPT
from foreload.profiler import probes
from foreload.profiler.run import bench_settings, profile
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape

RATE = 10**8
EFFORT = replace(probes.QUICK, rounds=10, contexts=(1, 32), chunks=(1, 8), sizes=(1 << 14, 1 << 17), waits=(0, 50))


@dataclass(frozen=True)
class Profiled:
    """A profile, and how the engine was found afterwards."""

    profile: HardwareProfile
    shape: ModelShape
    calibrated: bool
    progress: list[tuple[str, int, int]]
    before: Settings
    after: Settings
    capacity: tuple[int, ...]
    residents: int
    text: tuple[list[int], list[int]]  # before and after


def measure(model: str) -> Profiled:
    checkpoint, calls = Checkpoint.open(model), []
    shape = checkpoint.shape
    settings = bench_settings(shape).changed(eviction="lfu")
    options = EngineOptions(context_tokens=64, link_bytes_per_s=RATE)
    with Engine(checkpoint, options, settings) as engine:
        text = engine.generate([1, 2, 3], 6, stop=False).token_ids
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "profile: a fixed block varied")
            found = profile(engine, "quick", lambda *call: calls.append(call))
        residents = int((engine.brain.state.status == KEPT).sum())
        engine.brain.check_integrity()
        again = engine.generate([1, 2, 3], 6, stop=False).token_ids
        after = engine.settings
        return Profiled(
            found, shape, engine.calibrated, calls, settings, after, engine.capacity, residents, (text, again)
        )


@pytest.fixture(scope="session", params=["tiny", "mini"])
def profiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiled]:
    """A profile over an emulated link of 100 MB/s."""
    model = "mini"
    if request.param == "tiny":
        folder = save_tiny(tmp_path_factory.mktemp("models") / "tiny")
        save_calibration(folder / "calibration", folder)
        model = str(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "QUICK", EFFORT)
        yield measure(model)
