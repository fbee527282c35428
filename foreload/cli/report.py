"""`foreload report`: one self-contained page about a run."""

from __future__ import annotations

from foreload.cli.output import JsonFlag
from foreload.errors import UsageError


def report(as_json: JsonFlag = False) -> None:
    """Write one self-contained page about a run."""
    raise UsageError("report: not available yet")
