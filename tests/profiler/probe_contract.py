"""The contract between profiler and cost model, as the tables in `profiler.schema` have it."""

from __future__ import annotations

import re

from foreload.profiler import schema


def contract(table: int = 0) -> dict[str, set[str]]:
    """Probe -> coordinates, as a table in `profiler.schema` has them; 1: that of the graph path."""
    assert schema.__doc__ is not None
    text = schema.__doc__.split("On the graph path")[table]
    rows = re.findall(r"^    (\w+) +(.*)$", text, flags=re.MULTILINE)
    known = {"bytes", "pinned", "context", "depth", "copies", "wait_us", "threads", "experts", "gpu", "cpu", "tokens"}
    known |= {"format", "idle_us"}
    found = {}
    for probe, rest in rows:
        first = re.split(r"\s{2,}|(?<=threads) ", rest)[0]
        words = first.split(", ")
        found[probe] = set(words) if set(words) <= known else set()
    return found
