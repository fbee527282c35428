"""Published shapes: the configurations of models that `shape:NAME` stands for, as their authors wrote them."""

from __future__ import annotations

from typing import Any

from foreload.assets import ASSETS
from foreload.errors import UsageError
from foreload.files import read_mapping

SCHEME = "shape:"
SHAPES = ASSETS / "shapes"


def published_names() -> tuple[str, ...]:
    """The names that `shape:` accepts."""
    return tuple(sorted(path.stem for path in SHAPES.glob("*.json")))


def published_config(name: str) -> dict[str, Any]:
    """The configuration published under `name`; UsageError lists the known ones."""
    if name not in published_names():
        raise UsageError(f"shape {name!r} is not known: known are {', '.join(published_names())}")
    return read_mapping(SHAPES / f"{name}.json", "model configuration")
