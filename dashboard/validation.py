"""The page of a validation: predicted against measured, errors by metric and regime, every row.

foreload validate MODEL --profile P --trace T --page validation.html
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

import foreload
from foreload.dashboard import svg
from foreload.dashboard.pages import page_environment
from foreload.files import write_text
from foreload.simulator.validation import METRICS

TEMPLATE = "validation.html.j2"


def write_page(path: Path, found: Mapping[str, Any]) -> None:
    """Write the page about what `foreload validate --out` holds, in one file without outside resources."""
    write_text(Path(path), render(found))


def render(found: Mapping[str, Any]) -> str:
    """The page as text."""
    rows = sorted(found["rows"], key=lambda row: -abs(row["error_pct"]))
    link = found["emulated_link_bytes_per_s"]
    values = {
        "version": foreload.__version__,
        "found": found,
        "summary": found["summary"],
        "link": "" if link is None else f", link emulated at {link / 1e9:.3g} GB/s",
        "figure": Markup(figure(found)),
        "errors": error_rows(found["summary"]),
        "rows": rows,
    }
    return page_environment().get_template(TEMPLATE).render(values)


def figure(found: Mapping[str, Any]) -> str:
    """Predicted against measured time per token, by what binds a setting."""
    dots = [
        svg.Dot(
            row["measured_tpot_ms"],
            row["predicted_tpot_ms"],
            f"bound by {row['regime']}",
            f"{row['settings']}: measured {row['measured_tpot_ms']:.3g} ms, "
            f"predicted {row['predicted_tpot_ms']:.3g} ms ({row['error_pct']:+.1f} %)",
        )
        for row in found["rows"]
    ]
    return svg.scatter("Predicted against measured", dots, "measured, ms per token", "predicted, ms per token")


def error_rows(summary: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Errors by metric, then by regime, as text."""
    found: list[tuple[str, ...]] = []
    for metric, parts in summary["errors"].items():
        for regime, e in parts.items():
            name = METRICS[metric] if regime == "all" else f"bound by {regime}"
            signed = (
                f"{e['mean']:+.1f}",
                f"{e['p50']:.1f}",
                f"{e['p90']:.1f}",
                f"{e['p99']:.1f}",
                f"{e['worst']:+.1f}",
            )
            found.append((name, str(e["settings"]), *signed))
    return found
