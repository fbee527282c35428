"""`foreload simulate`: what settings would do on a machine, by its profile and a recording."""

from __future__ import annotations

from foreload.cli.output import JsonFlag
from foreload.errors import UsageError


def simulate(as_json: JsonFlag = False) -> None:
    """What these settings would do on this machine, for this recording."""
    raise UsageError("simulate: not available yet")
