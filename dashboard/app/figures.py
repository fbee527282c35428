"""Plotly figures from results; no figure computes what it shows. Colours read on light and on dark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import log10
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from foreload.dashboard.report import KIND_NAMES
from foreload.dashboard.svg import decades
from foreload.simulator.timeline import TimelineEvent

KINDS = {
    "attention": "#0d9488",
    "experts_gpu": "#65a30d",
    "experts_cpu": "#a3b18a",
    "route": "#0284c7",
    "plan": "#6366f1",
    "finish": "#5eaaa8",
    "predict": "#8b5cf6",
    "embed": "#7c8ba1",
    "head": "#4f6d9a",
    "cold": "#94a3b8",
    "interrupt": "#c4b5fd",
    "fetch": "#0ea5e9",
    "prefetch": "#a855f7",
    "upload": "#64748b",
    "wait_link": "#dc2626",
    "wait": "#dc2626",
    "wake": "#f59e0b",
    "wait_cpu": "#ec4899",
    "wait_issue": "#b45309",
    "wait_gpu": "#fbbf24",
}
"""Each kind of work in a cool colour and each kind of waiting in a warm one, the same in every figure."""
OTHERS = ("#2f855a", "#1d4ed8", "#0f766e", "#7e22ce", "#475569")
LINES = ("#0d9488", "#0284c7", "#d97706", "#8b5cf6", "#64748b", "#dc2626", "#65a30d")
DEFAULT, CHOSEN, BOUND, MEASURED = "#94a3b8", "#0d9488", "#dc2626", "#16a34a"
STREAMS = ("cpu", "link", "gpu", "host")
STREAM_NAMES = {"host": "decoding thread", "gpu": "GPU", "link": "link", "cpu": "CPU experts"}
TICKS = [digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5)]
"""Of logarithmic axes."""
HEAT = [[0.0, "rgba(13,148,136,0.04)"], [1.0, "#0d9488"]]
CONFIG: dict[str, Any] = {"displaylogo": False, "modeBarButtonsToRemove": ["lasso2d", "select2d", "autoScale2d"]}


def words(kind: str) -> str:
    """A kind of work or wait as people call it."""
    return KIND_NAMES.get(kind, kind.replace("_", " "))


def _layout(figure: go.Figure, height: int, x: str = "", y: str = "", legend: bool = True) -> go.Figure:
    figure.update_layout(
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        showlegend=legend,
        legend={"orientation": "h", "y": -0.28, "x": 0, "title": "", "traceorder": "normal"},
        hoverlabel={"align": "left"},
    )
    figure.update_xaxes(title=x, automargin=True)
    figure.update_yaxes(title=y, automargin=True)
    return figure


def time_bars(
    rows: Mapping[str, Mapping[str, float]], stalls: Sequence[str], marks: Mapping[str, float] | None = None
) -> go.Figure:
    """Where a token's time goes: one stacked bar per row, in ms by kind, waits in warm colours and last."""
    kinds = sorted({kind for parts in rows.values() for kind in parts}, key=lambda kind: (kind in stalls, kind))
    largest = max((sum(parts.values()) for parts in rows.values()), default=0.0)
    colours = _colours(kinds)
    figure = go.Figure()
    for kind in kinds:
        values = [parts.get(kind, 0.0) for parts in rows.values()]
        if max(values) > largest / 1000:
            figure.add_bar(
                y=list(rows),
                x=values,
                name=words(kind),
                orientation="h",
                marker_color=colours[kind],
                width=0.62,
                hovertemplate=f"{words(kind)}: %{{x:.3g}} ms<extra>%{{y}}</extra>",
            )
    for name, value in (marks or {}).items():
        if value <= 1.2 * largest:
            figure.add_vline(
                x=value, line={"color": BOUND, "dash": "dot"}, annotation={"text": name, "yanchor": "bottom"}
            )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    _layout(figure, 120 + 62 * len(rows), "ms per token")
    figure.update_layout(margin={"t": 26}, legend={"y": -0.5})
    return figure


def _colours(kinds: Sequence[str]) -> dict[str, str]:
    others = cycle(OTHERS)
    return {kind: KINDS.get(kind) or next(others) for kind in kinds}


def gantt(events: Sequence[TimelineEvent]) -> go.Figure:
    """Spans of host, GPU, link and CPU of some tokens, from the first span's start."""
    start = min((event.start_ns for event in events), default=0)
    used = [stream for stream in STREAMS if any(event.stream == stream for event in events)]
    kinds = list(dict.fromkeys(event.kind for event in events))
    colours = _colours(kinds)
    figure = go.Figure()
    for kind in kinds:
        spans = [event for event in events if event.kind == kind]
        figure.add_bar(
            y=[STREAM_NAMES[event.stream] for event in spans],
            x=[event.duration_ns / 1e6 for event in spans],
            base=[(event.start_ns - start) / 1e6 for event in spans],
            customdata=[_about(event) for event in spans],
            name=words(kind),
            orientation="h",
            width=0.7,
            marker={"color": colours[kind], "line": {"width": 0}},
            hovertemplate="%{customdata}<extra></extra>",
        )
    figure.update_layout(barmode="overlay")
    figure.update_yaxes(categoryorder="array", categoryarray=[STREAM_NAMES[stream] for stream in used])
    return _layout(figure, 150 + 60 * len(used), "ms")


def _about(event: TimelineEvent) -> str:
    parts = [f"<b>{words(event.kind)}</b>", f"{event.duration_ns / 1000:.1f} µs"]
    parts += [f"layer {event.layer}"] if event.layer >= 0 else []
    parts += [f"expert {event.expert}"] if event.expert >= 0 else []
    parts += [f"{event.bytes / 1024:.0f} KiB"] if event.bytes else []
    return "<br>".join(parts)


def curves(shares: Mapping[str, NDArray[np.float64]], kept: float, hit_rate: float) -> go.Figure:
    """Hit rate against slots per layer, the best possible dashed, and where the settings are."""
    figure = go.Figure()
    for (name, values), colour in zip(shares.items(), LINES, strict=False):
        dash = "dash" if "Belady" in name else "solid"
        figure.add_scatter(
            x=list(range(len(values))),
            y=values,
            name=name,
            mode="lines",
            line={"color": colour, "dash": dash},
            hovertemplate="%{x} slots: %{y:.1%}<extra>" + name + "</extra>",
        )
    figure.add_scatter(
        x=[kept],
        y=[hit_rate],
        name="these settings",
        mode="markers",
        marker={"size": 13, "color": CHOSEN, "symbol": "diamond", "line": {"width": 2, "color": "white"}},
        hovertemplate="%{x:.3g} slots: %{y:.1%}<extra>these settings</extra>",
    )
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02])
    return _layout(figure, 420, "slots per layer", "experts found on the device")


def heat(values: NDArray[Any], rows: Sequence[int], x: str, unit: str, top: float | None = None) -> go.Figure:
    """One row per MoE layer; `unit` names what a cell holds."""
    percent = unit.endswith("%")
    figure = go.Figure(
        go.Heatmap(
            z=values,
            y=[str(row) for row in rows],
            colorscale=HEAT,
            zmin=0,
            zmax=top,
            colorbar={"title": "", "thickness": 10, "tickformat": ".0%" if percent else None},
            hovertemplate=f"layer %{{y}}, {x} %{{x}}: %{{z:{'.1%' if percent else '.3g'}}}<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", type="category")
    return _layout(figure, 110 + 24 * len(rows), x, "MoE layer", legend=False)


def columns(labels: Sequence[str], parts: Mapping[str, Sequence[float]], colours: Sequence[str], y: str) -> go.Figure:
    """Stacked columns, one per MoE layer."""
    figure = go.Figure()
    for (name, values), colour in zip(parts.items(), colours, strict=True):
        figure.add_bar(x=list(labels), y=list(values), name=name, marker_color=colour)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(type="category")
    return _layout(figure, 300, "MoE layer", y)


def front(
    points: Mapping[str, Sequence[tuple[float, float, str]]],
    best: Sequence[tuple[float, float]],
    here: tuple[float, float] | None,
) -> go.Figure:
    """Device memory against time per token, (MiB, ms, what): a line per kind of settings, and the `best` of them."""
    figure = go.Figure()
    figure.add_scatter(
        x=[p[0] for p in best],
        y=[p[1] for p in best],
        name="Pareto front",
        mode="lines",
        line={"color": "rgba(148,163,184,0.45)", "width": 11, "shape": "hv"},
        hoverinfo="skip",
    )
    for (name, found), colour in zip(points.items(), LINES, strict=False):
        figure.add_scatter(
            x=[p[0] for p in found],
            y=[p[1] for p in found],
            text=[p[2] for p in found],
            name=name,
            mode="lines+markers",
            line={"color": colour, "shape": "linear"},
            hovertemplate="%{x:.1f} MiB: %{y:.3g} ms<br>%{text}<extra>" + name + "</extra>",
        )
    if here is not None:
        figure.add_scatter(
            x=[here[0]],
            y=[here[1]],
            name="these settings",
            mode="markers",
            marker={"size": 13, "color": CHOSEN, "symbol": "diamond", "line": {"width": 2, "color": "white"}},
        )
    figure.update_yaxes(type="log", tickvals=TICKS)
    return _layout(figure, 420, "device memory, MiB", "ms per token")


def scatter(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Predicted against measured time per token; on the dashed line a prediction is exact."""
    every = [row[name] for row in rows for name in ("predicted_tpot_ms", "measured_tpot_ms")]
    low, high = min(every) / 1.15, max(every) * 1.15
    figure = go.Figure()
    figure.add_scatter(
        x=[low, high],
        y=[low, high],
        mode="lines",
        name="exact",
        line={"color": DEFAULT, "dash": "dash"},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=[row["measured_tpot_ms"] for row in rows],
        y=[row["predicted_tpot_ms"] for row in rows],
        mode="markers",
        name="a setting",
        marker={"size": 9, "color": CHOSEN, "line": {"width": 1, "color": "white"}},
        customdata=[(row["settings"], row["error_pct"]) for row in rows],
        hovertemplate="%{customdata[0]}<br>measured %{x:.3g} ms, predicted %{y:.3g} ms "
        "(%{customdata[1]:+.1f} %)<extra></extra>",
    )
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(type="log", range=[log10(low), log10(high)], tickvals=decades(low, high))
    return _layout(figure, 440, "measured, ms per token", "predicted, ms per token", legend=False)


def history(looks: Sequence[tuple[float, float]]) -> go.Figure:
    """Time per token over an engine's time, (seconds, ms) each."""
    figure = go.Figure()
    figure.add_scatter(
        x=[look[0] for look in looks],
        y=[look[1] for look in looks],
        mode="lines+markers",
        line={"color": MEASURED},
        hovertemplate="%{x:.0f} s: %{y:.3g} ms<extra></extra>",
    )
    figure.update_yaxes(rangemode="tozero")
    return _layout(figure, 240, "engine's time, s", "ms per token", legend=False)
