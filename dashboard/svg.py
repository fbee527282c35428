"""Figures as inline SVG: small, sharp, readable without a network. Each function takes values and returns markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH = 860
LABEL = 150  # pixels left of the bars
WORK = ("#0f766e", "#0369a1", "#475569", "#4d7c0f", "#5eaaa8", "#7c93ab", "#6d5fb0", "#94a3b8", "#2f855a", "#1e3a5f")
STALL = ("#b91c1c", "#d97706", "#e11d74", "#92400e", "#f59e0b")
LINES = ("#0f766e", "#0369a1", "#b45309", "#6d5fb0", "#475569", "#b91c1c", "#4d7c0f", "#9d174d", "#94a3b8")
DEFAULT_COLOUR, TUNED_COLOUR = "#94a3b8", "#0f766e"
_INK, _GREY, _RULE = "#1f2937", "#6b7280", "#e5e7eb"


@dataclass(frozen=True)
class Bar:
    """One horizontal bar; `hollow` ones are predictions."""

    label: str
    value: float
    text: str
    colour: str
    hollow: bool = False


def _svg(width: int, height: float, title: str, body: Sequence[str]) -> str:
    name = escape(title, quote=True)
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{name}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(body)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = _INK, size: int = 13) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{escape(text)}</text>'
    )


def _rect(x: float, y: float, width: float, height: float, colour: str, tip: str, hollow: bool = False) -> str:
    look = f'fill="{colour}"'
    if hollow:
        look += f' fill-opacity=".16" stroke="{colour}" stroke-dasharray="4 3"'
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}" rx="2" {look}>'
        f"<title>{escape(tip)}</title></rect>"
    )


def ticks(top: float, count: int = 5) -> list[float]:
    """Round values from 0 to `top`, about `count` of them."""
    if top <= 0:
        return [0.0]
    raw = top / count
    unit = 10.0 ** floor(log10(raw))
    step = next(unit * m for m in (1, 2, 2.5, 5, 10) if unit * m >= raw * 0.999)
    return [step * i for i in range(int(top / step + 1e-9) + 1)]


def bars(title: str, items: Sequence[Bar], marks: Mapping[str, float], unit: str) -> str:
    """Horizontal bars with vertical `marks` (name -> value) across them."""
    room, top, pitch = WIDTH - LABEL - 90, 10 + 18 * len(marks), 30
    bottom = top + pitch * len(items)
    scale = room / (max([bar.value for bar in items] + list(marks.values()) + [1e-12]))
    body = _axis(scale, top, bottom, room, unit)
    for index, bar in enumerate(items):
        y = top + pitch * index + 4
        body.append(_text(LABEL - 10, y + 16, bar.label, "end"))
        body.append(_rect(LABEL, y, bar.value * scale, 22, bar.colour, f"{bar.label}: {bar.text}", bar.hollow))
        body.append(_text(LABEL + bar.value * scale + 8, y + 16, bar.text))
    for index, (name, value) in enumerate(sorted(marks.items(), key=lambda mark: mark[1])):
        x, y = LABEL + value * scale, 12 + 18 * index
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y + 4}" y2="{bottom}" stroke="#b91c1c" stroke-dasharray="2 3"/>'
        )
        right = x + 7.2 * len(name) > WIDTH
        body.append(_text(x - 6 if right else x + 6, y + 6, name, "end" if right else "start", "#b91c1c", 12))
    return _svg(WIDTH, bottom + 34, title, body)


def _axis(scale: float, top: float, bottom: float, room: float, unit: str) -> list[str]:
    body = []
    for value in ticks(room / scale):
        x = LABEL + value * scale
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="{_RULE}"/>')
        body.append(_text(x, bottom + 18, f"{value:g}", "middle", _GREY, 12))
    body.append(_text(WIDTH - 4, bottom + 18, unit, "end", _GREY, 12))
    return body


def stacked(title: str, rows: Mapping[str, Mapping[str, float]], unit: str, stalls: Sequence[str] = ()) -> str:
    """One stacked bar per row with a legend below; `stalls` are the parts in warm colours, drawn last."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    names = [name for name in names if name not in stalls] + [name for name in names if name in stalls]
    colours = _colours(names, stalls)
    room, top, pitch = WIDTH - LABEL - 90, 8, 38
    bottom = top + pitch * len(rows)
    scale = room / max([sum(parts.values()) for parts in rows.values()] + [1e-12])
    body = _axis(scale, top, bottom, room, unit)
    for index, (label, parts) in enumerate(rows.items()):
        x, y = float(LABEL), top + pitch * index + 5
        body.append(_text(LABEL - 10, y + 19, label, "end"))
        for name in names:
            value = parts.get(name, 0.0)
            if value > 0:
                body.append(_rect(x, y, value * scale, 28, colours[name], f"{label}, {name}: {value:.3g} {unit}"))
            x += value * scale
        body.append(_text(x + 8, y + 19, f"{sum(parts.values()):.3g} {unit}"))
    return _svg(WIDTH, bottom + 30 + _legend(body, colours, bottom + 46), title, body)


def _colours(names: Sequence[str], stalls: Sequence[str]) -> dict[str, str]:
    work, waits = iter(WORK * len(names)), iter(STALL * len(names))
    return {name: next(waits if name in stalls else work) for name in names}


def _legend(body: list[str], colours: Mapping[str, str], y: float) -> float:
    """Add a legend from `y` down; returns its height."""
    x, first = float(LABEL), y
    for name, colour in colours.items():
        width = 26 + 7.2 * len(name)
        if x + width > WIDTH:
            x, y = float(LABEL), y + 20
        body.append(_rect(x, y - 10, 12, 12, colour, name))
        body.append(_text(x + 17, y, name, colour=_GREY, size=12))
        x += width
    return y - first + 26


def columns(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]], colours: Sequence[str]) -> str:
    """Grouped columns of shares (0 to 1): one group per label, one column per series."""
    left, height, top = 46, 150, 26
    slot = (WIDTH - left) / max(1, len(labels))
    width = min(26.0, slot * 0.8 / max(1, len(series)))
    body = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + height * (1 - share)
        body.append(f'<line x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_RULE}"/>')
        body.append(_text(left - 6, y + 4, f"{share:.0%}", "end", _GREY, 12))
    every = -(-len(labels) // 24)
    for index, label in enumerate(labels):
        middle = left + slot * (index + 0.5)
        for at, (name, values) in enumerate(series.items()):
            x = middle + (at - len(series) / 2) * width
            size = height * values[index]
            tip = f"{name}, layer {label}: {values[index]:.1%}"
            body.append(_rect(x, top + height - size, width * 0.9, size, colours[at], tip))
        if index % every == 0:
            body.append(_text(middle, top + height + 18, label, "middle", _GREY, 12))
    x = float(left)
    for at, name in enumerate(series):
        body.append(_rect(x, 2, 12, 12, colours[at], name))
        body.append(_text(x + 17, 12, name, colour=_GREY, size=12))
        x += 40 + 7.2 * len(name)
    body.append(_text(WIDTH, top + height + 36, "MoE layer", "end", _GREY, 12))
    return _svg(WIDTH, top + height + 42, title, body)


def lines(
    title: str, at: Sequence[float], series: Mapping[str, Sequence[float]], x_name: str, dashed: Sequence[str] = ()
) -> str:
    """One line per series of shares (0 to 1) over the values `at`, with a legend below; NaN leaves a gap."""
    left, right, top, height = 46, 16, 10, 230
    low, high = min(at), max(at)
    scale = (WIDTH - left - right) / ((high - low) or 1)
    body = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = top + height * (1 - share)
        body.append(f'<line x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_RULE}"/>')
        body.append(_text(left - 6, y + 4, f"{share:.0%}", "end", _GREY, 12))
    for value in [value for value in ticks(high, 8) if value >= low]:
        body.append(_text(left + (value - low) * scale, top + height + 18, f"{value:g}", "middle", _GREY, 12))
    colours = dict(zip(series, (LINES * len(series))[: len(series)], strict=True))
    for name, values in series.items():
        points = [(left + (x - low) * scale, top + height * (1 - y)) for x, y in zip(at, values, strict=True)]
        dash = ' stroke-dasharray="5 4"' if name in dashed else ""
        body.append(_path(name, points, colours[name], dash))
    body.append(_text(WIDTH - right, top + height + 36, x_name, "end", _GREY, 12))
    return _svg(WIDTH, top + height + 36 + _legend(body, colours, top + height + 54), title, body)


def _path(name: str, points: Sequence[tuple[float, float]], colour: str, dash: str) -> str:
    """A line through `points`, broken where a value is NaN; a point without neighbours is a dot."""
    parts, pen = [], False
    for x, y in points:
        known = y == y
        if known:
            parts.append(f"{'L' if pen else 'M'}{x:.1f} {y:.1f}" + ("" if pen else "h.1"))
        pen = known
    drawn = f'fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round" stroke-linecap="round"{dash}'
    return f'<path d="{" ".join(parts)}" {drawn}><title>{escape(name)}</title></path>'


@dataclass(frozen=True)
class Dot:
    """One point of a scatter: measured `x` and predicted `y`, both above 0, and its group."""

    x: float
    y: float
    group: str
    tip: str


def scatter(title: str, dots: Sequence[Dot], x_name: str, y_name: str) -> str:
    """Points on logarithmic axes of one range, coloured by group, about the line where both are equal."""
    left, top, right, side = 66, 12, 16, 460
    low, high = min(min(d.x, d.y) for d in dots) / 1.15, max(max(d.x, d.y) for d in dots) * 1.15
    width, span = WIDTH - left - right, log10(high / low)

    def place(x: float, y: float) -> tuple[float, float]:
        return left + width * log10(x / low) / span, top + side * (1 - log10(y / low) / span)

    body = []
    for value in decades(low, high):
        x, y = place(value, value)
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + side}" stroke="{_RULE}"/>')
        body.append(f'<line x1="{left}" x2="{WIDTH - right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_RULE}"/>')
        body.append(_text(x, top + side + 18, f"{value:g}", "middle", _GREY, 12))
        body.append(_text(left - 6, y + 4, f"{value:g}", "end", _GREY, 12))
    (x1, y1), (x2, y2) = place(low, low), place(high, high)
    body.append(
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_GREY}" stroke-dasharray="5 4"/>'
    )
    groups = list(dict.fromkeys(sorted(dot.group for dot in dots)))
    colours = dict(zip(groups, (LINES * len(groups))[: len(groups)], strict=True))
    for dot in dots:
        x, y = place(dot.x, dot.y)
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colours[dot.group]}" fill-opacity=".75" stroke="#fff">'
            f"<title>{escape(dot.tip)}</title></circle>"
        )
    body.append(_text(WIDTH - right, top + side + 36, x_name, "end", _GREY, 12))
    body.append(_text(left + 6, top + 14, y_name, "start", _GREY, 12))
    return _svg(WIDTH, top + side + 36 + _legend(body, colours, top + side + 54), title, body)


def decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten between two values; where they are too near, round values at equal distances."""
    first, last = floor(log10(low)), floor(log10(high))
    found = [float(f"{m}e{power}") for power in range(first, last + 1) for m in (1, 2, 5)]
    found = [value for value in found if low <= value <= high]
    if len(found) > 1:
        return found
    step = ticks(high - low)[1]
    return [float(f"{step * at:.12g}") for at in range(ceil(low / step), floor(high / step) + 1)]
