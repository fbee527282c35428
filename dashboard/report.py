"""`render_report`: one self-contained HTML page about a run, readable without a network.

foreload report out/demo --out report.html
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

import foreload
from foreload.dashboard import svg
from foreload.dashboard.pages import page_environment
from foreload.dashboard.result import Candidate, Outcome, Run, RunResult, load_run
from foreload.files import write_text
from foreload.profiler.schema import HardwareProfile, Measurement, coordinate
from foreload.settings import Settings, flat_fields
from foreload.units import format_bytes

TEMPLATE = "report.html.j2"
BOUND_NAMES = {
    "link_ms": "bound: what the best possible cache still moves, by link and CPU together",
    "compute_ms": "bound: the computing alone, with every expert at hand",
    "floor_ms": "bound: the larger of the two",
    "resident_ms": "for comparison: every expert resident",
}
MARKS = {"floor_ms": "bound", "resident_ms": "every expert resident"}
KIND_NAMES = {
    "experts_gpu": "experts on the device",
    "experts_cpu": "experts on the CPU",
    "wait_link": "wait for a copy",
    "wait_issue": "wait for the link to be free",
    "wait_cpu": "wait for the CPU",
    "wait_gpu": "GPU still busy",
    "wake": "wake up",
    "cold": "slower after a wait",
    "interrupt": "interrupted by a copy",
    "head": "output head",
}
SHOWN = 8  # candidates before the rest is folded away
NOISY_PCT = 20.0
"""Above this noise of the profile the page says that the machine was busy."""
NO_GAIN = 1.02
"""Below this speed-up the page says that the default stays."""


def render_report(run: Run | Path, out: Path) -> None:
    """Write the page about `run` (a folder, or one loaded with `load_run`) to `out`, atomically.

    Raises FileError if the folder's files are missing or wrong, or the page cannot be written.
    """
    write_text(Path(out), render(run if isinstance(run, Run) else load_run(run)))


def render(run: Run) -> str:
    """The page as text."""
    environment = page_environment()
    environment.filters["ms"] = _ms
    environment.filters["bytes"] = format_bytes
    environment.filters["percent"] = _percent
    return environment.get_template(TEMPLATE).render(view(run))


def view(run: Run) -> dict[str, Any]:
    """What the template shows, all of it taken from the run's files."""
    result = run.result
    ranked = sorted(result.candidates, key=lambda candidate: (not candidate.chosen, candidate.predicted_tpot_ms))
    return {
        "version": foreload.__version__,
        "run": run,
        "result": result,
        "meta": result.meta,
        "gain": result.speedup >= NO_GAIN,
        "measured": result.tuned.measured_tpot_ms is not None,
        "outcomes": [
            ("default", result.default, result.error_pct.default),
            ("tuned", result.tuned, result.error_pct.tuned),
        ],
        "bounds": bound_rows(result),
        "headline": Markup(headline_figure(result)),
        "time": Markup(time_figure(result)),
        "layers": Markup(layer_figure(run)),
        "stalls": stall_names(result),
        "sources": sorted({breakdown.source for breakdown in result.breakdown.values()}),
        "settings": [row for row in settings_rows(run) if row[3]],
        "same_settings": [row for row in settings_rows(run) if not row[3]],
        "candidates": [c for at, c in enumerate(ranked) if at < SHOWN or c.name == "default"],
        "other_candidates": [c for at, c in enumerate(ranked) if at >= SHOWN and c.name != "default"],
        "describe": describe_candidate,
        "profile": profile_rows(run.profile) if run.profile else [],
        "noisy": run.profile is not None and run.profile.meta.noise_pct > NOISY_PCT,
    }


def _ms(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:+.1f} %"


def headline_figure(result: RunResult) -> str:
    """Predicted and measured time per token of default and tuned, with the bounds as marks."""
    items: list[svg.Bar] = []
    sides: list[tuple[str, Outcome, str]] = [
        ("default", result.default, svg.DEFAULT_COLOUR),
        ("tuned", result.tuned, svg.TUNED_COLOUR),
    ]
    for name, outcome, colour in sides:
        if outcome.measured_tpot_ms is not None:
            value = outcome.measured_tpot_ms
            items.append(svg.Bar(f"{name}, measured", value, _ms(value), colour))
        value = outcome.predicted_tpot_ms
        items.append(svg.Bar(f"{name}, simulated", value, _ms(value), colour, hollow=True))
    slowest = max(bar.value for bar in items)
    marks = {MARKS[name]: value for name, value in result.bounds.items() if name in MARKS and value <= 1.2 * slowest}
    return svg.bars("Time per output token", items, marks, "ms per token")


def bound_rows(result: RunResult) -> list[tuple[str, float]]:
    """The bounds that are times, in ms per token, by their full names."""
    known = {name: value for name, value in result.bounds.items() if name.endswith("_ms")}
    return [
        (BOUND_NAMES.get(name, f"bound: {_words(name.removesuffix('_ms'))}"), value) for name, value in known.items()
    ]


def time_figure(result: RunResult) -> str:
    """Where a token's time goes, default beside tuned; empty if the run does not say."""
    rows: dict[str, dict[str, float]] = {
        name: {_words(kind): value for kind, value in breakdown.time_ms.items()}
        for name, breakdown in result.breakdown.items()
        if breakdown.time_ms
    }
    return svg.stacked("Where the time goes", rows, "ms", stall_names(result)) if rows else ""


def stall_names(result: RunResult) -> list[str]:
    """The causes of stalls, of both sides."""
    return sorted({_words(kind) for breakdown in result.breakdown.values() for kind in breakdown.stalls})


def _words(kind: str) -> str:
    return KIND_NAMES.get(kind, kind.replace("_", " "))


def layer_figure(run: Run) -> str:
    """Hit rate of each MoE layer, default beside tuned; empty if the run does not say."""
    series: dict[str, tuple[float, ...]] = {
        name: breakdown.hit_rate_per_layer
        for name, breakdown in run.result.breakdown.items()
        if breakdown.hit_rate_per_layer
    }
    if not series:
        return ""
    count = min(len(values) for values in series.values())
    numbers = run.trace.layer_numbers if run.trace else range(count)
    colours = [svg.DEFAULT_COLOUR if name == "default" else svg.TUNED_COLOUR for name in series]
    return svg.columns("Hit rate per layer", [str(number) for number in numbers][:count], series, colours)


def settings_rows(run: Run) -> list[tuple[str, str, str, bool]]:
    """(field, default, tuned, differs) of every setting; empty without settings.json."""
    if run.settings is None:
        return []
    base = Settings.parse(run.result.default_settings, "result.json: default_settings")
    default, tuned = (dict(flat_fields(settings.model_dump(mode="json"))) for settings in (base, run.settings))
    return [(name, _plain(default[name]), _plain(tuned[name]), default[name] != tuned[name]) for name in tuned]


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if not isinstance(value, list):
        return str(value)
    return f"{value[0]} in each of {len(value)}" if len(set(value)) == 1 < len(value) else ", ".join(map(str, value))


def describe_candidate(candidate: Candidate) -> str:
    """The candidate's settings that differ from the default, on one line."""
    known = {name: value for name, value in flat_fields(candidate.settings) if value is not None}
    base = dict(flat_fields(Settings().model_dump(mode="json")))
    parts = [f"{name} {_plain(value)}" for name, value in known.items() if value != base.get(name)]
    return ", ".join(parts) or "all at their defaults"


def profile_rows(profile: HardwareProfile) -> list[dict[str, str]]:
    """One row per probe: where it was measured, the range of its medians, its spread and its source."""
    probes: dict[str, list[Measurement]] = {}
    for measurement in profile.measurements:
        probes.setdefault(measurement.probe, []).append(measurement)
    return [_profile_row(probe, found, profile) for probe, found in probes.items()]


def _profile_row(probe: str, found: list[Measurement], profile: HardwareProfile) -> dict[str, str]:
    axes: dict[str, set[int]] = {}
    for measurement in found:
        for axis, at in measurement.at.items():
            axes.setdefault(axis, set()).add(at)
    medians = [measurement.p50_us for measurement in found]
    spread = max(measurement.p95_us / measurement.p50_us if measurement.p50_us else 1.0 for measurement in found)
    emulated = profile.meta.emulated_link_bytes_per_s if probe.startswith("copy") else None
    sources = ", ".join(sorted({measurement.source for measurement in found}))
    return {
        "probe": _words(probe),
        "at": "; ".join(f"{axis} {_range(axis, sorted(values))}" for axis, values in axes.items()) or "one point",
        "points": str(len(found)),
        "median": _span(min(medians), max(medians)),
        "spread": f"{spread:.2f}",
        "source": f"{sources}, on an emulated link" if emulated else sources,
    }


def _range(axis: str, values: list[int]) -> str:
    if len(values) <= 3 or axis == "format":
        return ", ".join(coordinate(axis, value) for value in values)
    return f"{values[0]} to {values[-1]}"


def _span(low: float, high: float) -> str:
    return _figure(low) if low == high else f"{_figure(low)} to {_figure(high)}"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
