"""How far predictions are off: predicted beside measured."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import streamlit as st

from foreload.dashboard.app import figures, labels
from foreload.dashboard.app.view import View

NEEDED = {"settings", "predicted_tpot_ms", "measured_tpot_ms", "error_pct", "measured_spread_pct"}


def page(view: View) -> None:
    """Draw it."""
    st.header("Validation", anchor=False)
    found = _chosen(view)
    if found is None:
        return
    summary, rows = found["summary"], found["rows"]
    every = labels.errors_of_all(summary)
    tiles = st.columns(4)
    values = {
        "Error, median": f"{every['p50']:.1f} %",
        "Error, one of ten": f"{every['p90']:.0f} %",
        "Worst": f"{every['worst']:+.1f} %",
        "Chosen by prediction": "the best" if not summary["regret_pct"] else f"{summary['regret_pct']:.1f} % slower",
    }
    for tile, (name, value) in zip(tiles, values.items(), strict=True):
        with tile:
            st.metric(name, value, border=True, height="stretch")
    st.plotly_chart(figures.scatter(rows), config=figures.CONFIG, key="scatter")
    rate = found.get("emulated_link_bytes_per_s")
    link = f", link emulated at {rate / 1e6:g} MB/s" if rate else ""
    apart = len(summary.get("apart", ()))
    steady = f"; chosen among the {every['settings'] - apart} whose turns spread by at most 5 %" if apart else ""
    st.caption(
        f"{found['model']} on {found['machine']}{link}, {found['profile_date'][:10]}; measured: median of "
        f"{found['repeats']} turns{steady} {labels.badge('measured', 'simulated')}"
    )
    table = pd.DataFrame(rows)[
        ["settings", "predicted_tpot_ms", "measured_tpot_ms", "error_pct", "measured_spread_pct"]
    ]
    number = st.column_config.NumberColumn
    st.dataframe(
        table.sort_values("error_pct", key=abs, ascending=False),
        hide_index=True,
        column_config={
            "settings": st.column_config.TextColumn("settings", width="large"),
            "predicted_tpot_ms": number("predicted, ms", format="%.3f"),
            "measured_tpot_ms": number("measured, ms", format="%.3f"),
            "error_pct": number("error, %", format="%+.1f"),
            "measured_spread_pct": number("spread of turns, %", format="%.1f"),
        },
    )


def _chosen(view: View) -> dict[str, Any] | None:
    """The source's own validation, or one that is handed over."""
    if view.data.validation is not None:
        return view.data.validation
    st.info(f"Nobody has measured settings on {view.data.profile.meta.machine} yet. This does, and writes a file:")
    st.code("foreload validate MODEL --profile profile.json --trace trace.parquet --out validation.json", language="sh")
    file = st.file_uploader("What it wrote", type="json")
    if file is None:
        return None
    try:
        found = json.loads(file.getvalue())
        if not found["rows"] or not all(row.keys() >= NEEDED for row in found["rows"]) or "summary" not in found:
            raise KeyError("rows")
    except (ValueError, KeyError, TypeError, AttributeError):
        st.error(f"{file.name}: not a file that `foreload validate --out` writes")
        return None
    return dict(found)
