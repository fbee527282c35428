"""Compiles the simulator, on both paths, so that what simulates later finds it on disk.

python -m benchmarks.compiled
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.inputs import SHAPE, graph_profile, profile, trace
from foreload.settings import Settings
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel


def in_background() -> subprocess.Popen[bytes]:
    """A process that does it."""
    return subprocess.Popen([sys.executable, "-m", "benchmarks.compiled"])


def main() -> None:
    """Simulate a few tokens of an engine that launches blocks, and of one that launches graphs."""
    slots = (4,) * SHAPE.n_moe_layers
    for measured in (profile(), graph_profile()):
        for replayed in (False, True):
            simulate(
                trace(2), CostModel(measured, SHAPE, replayed=replayed), SHAPE, Settings(slots_per_layer=slots), slots
            )


if __name__ == "__main__":
    main()
