"""A tiny random model, engines on it, and a copy to spoil."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_models import CONTEXT, made_up_costs, save_calibration, save_tiny

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.settings import Settings


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder; not to be changed."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def spoilt(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model to change."""
    return shutil.copytree(tiny, tmp_path / "spoilt")


@pytest.fixture(scope="session")
def calibration(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a made-up calibration of the tiny model; not to be changed."""
    return save_calibration(tmp_path_factory.mktemp("calibration") / "tiny", tiny)


@pytest.fixture
def make_engine(tiny: Path) -> Iterator[Callable[..., Engine]]:
    """Engines on the tiny model (or `model`), closed at the end; keywords are engine options."""
    made: list[Engine] = []

    def make(
        settings: Settings | None = None, model: Path = tiny, costs: Any = made_up_costs, **options: Any
    ) -> Engine:
        chosen = EngineOptions(**{"context_tokens": CONTEXT, **options})
        made.append(Engine(Checkpoint.open(str(model)), chosen, settings or Settings(cache_ratio=0.5), costs))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
