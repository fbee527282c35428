"""`render_analysis`: one self-contained HTML page about a recording, readable without a network.

foreload trace analyze recording.parquet --out page.html
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

import foreload
from foreload.dashboard import svg
from foreload.dashboard.pages import page_environment
from foreload.files import write_text
from foreload.settings import Settings
from foreload.simulator.curves import POLICIES, Curves, slot_points
from foreload.traces.statistics import Statistics

TEMPLATE = "analysis.html.j2"
LAYER_COLUMNS = {
    "layer": "MoE layer",
    "unused": "never used",
    "top_share": "busiest expert",
    "busiest_eighth": "busiest eighth",
    "entropy_bits": "entropy, bits",
    "effective_experts": "effective experts",
    "next_token_overlap": "next token again",
    "reuse_p50": "reuse, P50",
    "reuse_p90": "reuse, P90",
    "subject_cosine": "cosine of subjects",
    "window_cosine": "cosine of windows",
}
SHARES = {"top_share", "busiest_eighth", "next_token_overlap", "recall", "weighted_recall", "recall_2k", "share"}
WHOLE = {"layer", "unused", "reuse_p50", "reuse_p90", "depth", "slots"}
POLICY_NAMES = {"belady": "best possible (Belady)", "static": "static (this recording's)"}


def render_analysis(path: Path, found: Statistics, curves: Curves, out: Path) -> None:
    """Write the page about the recording `path` to `out`, atomically; FileError if it cannot be written."""
    write_text(Path(out), page_environment().get_template(TEMPLATE).render(view(path, found, curves)))


def view(path: Path, found: Statistics, curves: Curves) -> dict[str, Any]:
    """What the template shows."""
    layers = found.layers[list(LAYER_COLUMNS)].rename(columns=LAYER_COLUMNS)
    return {
        "version": foreload.__version__,
        "file": path.name,
        "meta": found.meta,
        "found": found,
        "curves": curves,
        "half_life": Settings().half_life,
        "overall": {LAYER_COLUMNS[name]: shown(name, found.overall[name]) for name in LAYER_COLUMNS if name != "layer"},
        "hit_figure": Markup(hit_figure(curves)),
        "hit_table": cells(curves.table(slot_points(found.meta.experts))),
        "hit_names": ["slots per layer", "of all", *curves.hits],
        "layer_figure": Markup(layer_figure(found, curves)),
        "recall_figure": Markup(recall_figure(found)),
        "recall_table": cells(found.recall()),
        "drift_figure": Markup(drift_figure(found)),
        "subjects": cells(found.subjects),
        "layers": cells(found.layers[list(LAYER_COLUMNS)]),
        "layer_names": list(layers.columns),
    }


def policy_name(policy: str) -> str:
    """As figures and tables call it."""
    return POLICY_NAMES.get(policy, policy)


def shown(name: str, value: Any) -> str:
    """One value of a column as text."""
    if isinstance(value, str):
        return value
    if value != value:
        return "not known"
    if name in WHOLE:
        return f"{value:.3g}" if value % 1 else f"{value:.0f}"
    share = name in SHARES or name in POLICIES
    return f"{value:.1%}" if share else f"{value:.3g}"


def cells(table: pd.DataFrame) -> list[list[str]]:
    """Rows of a table as text."""
    return [[shown(str(name), value) for name, value in row.items()] for row in table.to_dict("records")]


def hit_figure(curves: Curves) -> str:
    """Hit rate against slots per layer, one line per policy."""
    slots = [float(count) for count in range(curves.meta.experts + 1)]
    series = {policy_name(policy): curves.rate(policy).tolist() for policy in curves.hits}
    return svg.lines("Hit rate against slots", slots, series, "slots per layer", [policy_name("belady")])


def layer_figure(found: Statistics, curves: Curves) -> str:
    """Per layer: overlap, skew, and hit rates with a quarter of the experts resident."""
    quarter = found.meta.experts // 4
    series: dict[str, Sequence[float]] = {
        "needed again by the next token": found.layers["next_token_overlap"].tolist(),
        "load of the busiest eighth": found.layers["busiest_eighth"].tolist(),
    }
    for policy in ("lru", "belady"):
        if policy in curves.hits:
            rates = curves.layer_rates(policy)[:, quarter].tolist()
            series[f"hits of {policy_name(policy)}, {quarter} slots"] = rates
    return svg.lines("Per layer", _numbers(found), series, "MoE layer")


def recall_figure(found: Statistics) -> str:
    """Recall at k per layer, one line per predictor and depth; empty without predictions."""
    series: dict[str, Sequence[float]] = {}
    for (predictor, depth), part in found.predictions.groupby(["predictor", "depth"], sort=False):
        by_layer = part.set_index("layer")["recall"]
        series[f"{predictor}, depth {depth}"] = [float(by_layer.get(number, np.nan)) for number in _numbers(found)]
    return svg.lines("Recall per layer", _numbers(found), series, "MoE layer") if series else ""


def drift_figure(found: Statistics) -> str:
    """Cosine of the load of windows, over the recording; empty if it is shorter than two windows."""
    if found.windows.empty:
        return ""
    at = found.windows["first_token"].tolist()
    series = {"with the window before": found.windows["to_previous"], "with the first": found.windows["to_first"]}
    values: dict[str, Sequence[float]] = {name: column.tolist() for name, column in series.items()}
    return svg.lines("Drift over time", at, values, "token")


def _numbers(found: Statistics) -> list[float]:
    return [float(number) for number in found.meta.layer_numbers]
