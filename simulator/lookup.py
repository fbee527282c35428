"""One probe's measurements as points to look up: exact, between two of them, or outside (see `costs`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from foreload.errors import FileError
from foreload.profiler.schema import Measurement
from foreload.settings import GATE_SIDE
from foreload.units import us_to_ns

Source = Literal["measured", "interpolated", "extrapolated", "assumed"]


WINDOW_BLOCKS = tuple(
    f"window_{block}" for block in ("embed", "attention", "route", "predict", "plan", "finish", "head")
)
GRAPH_WINDOW_BLOCKS = tuple(block for block in (*WINDOW_BLOCKS, "window_whole") if block != "window_route")
AXIS = {
    "copy": "bytes",
    "attention": "context",
    "whole": "context",
    **{f"predict{kind}": "depth" for kind in ("", *(f"_{p}{form}" for p in GATE_SIDE for form in ("", "_rolled")))},
    "after_wait": "wait_us",
    "experts_gpu": "experts",
    "experts_cpu": "experts",
    "experts_cpu_beside_copy": "experts",
    "read_ahead": "idle_us",
    "cpu_format": "experts",
    "gpu_format": "experts",
    "prefill_layer": "tokens",
    "prefill_expert": "tokens",
    "sample": "tokens",
    **dict.fromkeys((*WINDOW_BLOCKS, "window_whole", "window_whole_expert"), "tokens"),
    **dict.fromkeys(("draft_ngram", "draft_model"), "tokens"),
}
SLOPED = (
    "after_wait", "attention", "whole", "prefill_layer", "prefill_expert", "sample", "draft_ngram", "draft_model",
    "window_whole", "window_whole_expert", *WINDOW_BLOCKS,
)  # fmt: skip
"""Probes that hold their slope outside, not their rate."""


@dataclass(frozen=True)
class Point:
    """Host and device time at a coordinate."""

    at: int
    host_ns: int
    gpu_ns: int
    assumed: bool


def between(low: int, high: int, left: int, right: int, at: int) -> int:
    """On the line through (left, low) and (right, high), rounded."""
    span = right - left
    return (low * (right - at) + high * (at - left) + span // 2) // span


def on_line(points: Sequence[tuple[int, int]], at: int) -> int:
    """Value at `at` on the lines between (coordinate, value), ascending; beyond the last, the last's."""
    for (left, low), (right, high) in pairwise(points):
        if at < right:
            return between(low, high, left, right, at)
    return points[-1][1]


def interpolate(points: list[Point], at: int, sloped: bool) -> tuple[int, int, Source]:
    """Host and GPU nanoseconds at `at` from points sorted by coordinate, and how they were found."""
    index = bisect_left([p.at for p in points], at)
    if index < len(points) and points[index].at == at:
        return points[index].host_ns, points[index].gpu_ns, "assumed" if points[index].assumed else "measured"
    if 0 < index < len(points):
        a, b = points[index - 1], points[index]
        host = between(a.host_ns, b.host_ns, a.at, b.at, at)
        gpu = between(a.gpu_ns, b.gpu_ns, a.at, b.at, at)
        return host, gpu, "assumed" if a.assumed or b.assumed else "interpolated"
    edge = points[min(index, len(points) - 1)]
    source: Source = "assumed" if edge.assumed else "extrapolated"
    if not sloped:
        half = edge.at // 2
        return (edge.host_ns * at + half) // edge.at, (edge.gpu_ns * at + half) // edge.at, source
    if index == 0 or len(points) == 1:
        return edge.host_ns, edge.gpu_ns, source
    a = points[-2]
    host = max(edge.host_ns, between(a.host_ns, edge.host_ns, a.at, edge.at, at))
    return host, max(edge.gpu_ns, between(a.gpu_ns, edge.gpu_ns, a.at, edge.at, at)), source


def points_of(probe: str, found: list[Measurement]) -> list[Point]:
    """`found`, measurements of `probe` by its coordinate, in order; FileError if they are not those of one line."""
    axis = AXIS.get(probe, "")
    points = []
    for m in found:
        if axis and axis not in m.at:
            raise FileError(f"profile: a measurement of {probe!r} at {m.at} lacks the coordinate {axis!r}")
        at = m.at[axis] if axis else 0
        host_us, gpu_us = m.cost_us
        points.append(Point(at, us_to_ns(host_us), us_to_ns(gpu_us), m.source == "assumed"))
    points.sort(key=lambda p: p.at)
    for a, b in pairwise(points):
        if a.at == b.at:
            raise FileError(f"profile: {probe!r} is measured twice at {axis or 'the same point'} {a.at}")
    if points[0].at < 0 or (axis and probe not in SLOPED and points[0].at == 0):
        raise FileError(f"profile: {probe!r} is measured at {axis} {points[0].at}: it must be above 0")
    return points
