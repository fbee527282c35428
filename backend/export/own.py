"""Foreload's own settings file: the default target."""

from __future__ import annotations

import json

from foreload import __version__
from foreload.backend.export.base import Exported, Exporter, Target
from foreload.settings import Settings, slot_counts

NAME = "foreload"
CHECKED = f"foreload {__version__}"
FILE = "settings.json"


def make(target: Target) -> Exported:
    """The settings, checked against the model where they name slots by layer."""
    settings = target.settings
    if settings.slots_per_layer is not None:
        slot_counts(settings, target.shape)
    content = json.dumps(settings.model_dump(mode="json", exclude_none=True), indent=1) + "\n"
    notes = ("run it: foreload run MODEL --settings settings.json",)
    return Exported(NAME, CHECKED, files={FILE: content.encode()}, notes=notes)


EXPORTER = Exporter(NAME, CHECKED, frozenset(Settings.model_fields), make, several_gpus=True)
