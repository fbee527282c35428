"""`foreload tune`: the best settings for a machine and a recording."""

from __future__ import annotations

from foreload.cli.output import JsonFlag
from foreload.errors import UsageError


def tune(as_json: JsonFlag = False) -> None:
    """The best settings for this machine and this recording."""
    raise UsageError("tune: not available yet")
