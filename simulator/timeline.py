"""Timeline events of a simulated run, named as a measured one names them (design: section 7b)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One span on a track: `host`, `gpu`, `link` or `cpu`. Layer and expert are -1 where they do not apply."""

    step: int
    layer: int
    kind: str
    expert: int
    stream: str
    start_ns: int
    duration_ns: int
    bytes: int = 0


class Timeline:
    """Collects events when `on`; spans of no length are left out."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.step = 0
        self.events: list[TimelineEvent] = []

    def add(
        self, stream: str, kind: str, start_ns: int, end_ns: int, layer: int = -1, expert: int = -1, size: int = 0
    ) -> None:
        """Record a span."""
        if self.on and end_ns > start_ns:
            self.events.append(TimelineEvent(self.step, layer, kind, expert, stream, start_ns, end_ns - start_ns, size))
