"""Where figures come from, as coloured labels, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from foreload.dashboard.app.data import Dataset
from foreload.simulator.result import SimResult
from foreload.simulator.whatif import Machine

COLOURS = {"measured": "green", "calibrated": "blue", "simulated": "violet", "assumed": "orange"}
MEANINGS = {
    "measured": "by a probe or the engine, on the machine named",
    "calibrated": "from a calibration run of the model",
    "simulated": "by the engine model, from the profile and the recording",
    "assumed": "nobody measured it: a factor of yours, or a figure beyond the measured points",
}


def badge(*sources: str) -> str:
    """Sources as Markdown labels."""
    return " ".join(f":{COLOURS[source]}-badge[{source}]" for source in sources)


def of_simulation(result: SimResult, machine: Machine) -> str:
    """The labels of a simulated figure: assumed too, if a cost it used was."""
    beyond = machine.changed or any(source == "assumed" for source in result.sources.values())
    return badge("simulated", "assumed") if beyond else badge("simulated")


def milliseconds(value: float) -> str:
    """Three digits, with the unit."""
    return f"{value:.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def stated_error(data: Dataset, machine: Machine) -> str:
    """How far predictions were off on this machine, if it was validated."""
    if machine.changed:
        return "error unknown: this machine does not exist"
    if data.validation is None:
        return "error unknown on this machine: `foreload validate` measures it"
    every = errors_of_all(data.validation["summary"])
    plural = "s" if every["settings"] != 1 else ""
    return (
        f"off by {every['p50']:.1f} % in the median and {every['p90']:.0f} % in one of ten "
        f"of {every['settings']} setting{plural} measured on {data.validation['machine']}"
    )


def errors_of_all(summary: Mapping[str, Any]) -> dict[str, float]:
    """Settings, median, 90th percentile and worst of a validation, with those that its own figures leave out."""
    if summary.get("all_settings"):
        return dict(summary["all_settings"])
    return {"settings": summary["settings"], **{name: summary[f"{name}_error_pct"] for name in ("p50", "p90", "worst")}}


def settings_rows(*chosen: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Fields in which settings differ, with each one's value."""
    fields: Iterable[str] = dict.fromkeys(key for values in chosen for key in values)
    rows = []
    for field in fields:
        values = [_plain(one.get(field)) for one in chosen]
        if len(set(values)) > 1:
            rows.append((field, *values))
    return rows


def _plain(value: Any) -> str:
    if value is None:
        return "not set"
    if not isinstance(value, list | tuple):
        return str(value)
    return f"{value[0]} in each of {len(value)}" if len(set(value)) == 1 < len(value) else ", ".join(map(str, value))
