"""Two settings side by side: what differs, and what that does."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import streamlit as st

from foreload.dashboard.app import data, figures, labels
from foreload.dashboard.app.view import View
from foreload.dashboard.app.views.tuner import tuned
from foreload.dashboard.collect import breakdown
from foreload.errors import ForeloadError, SettingsError
from foreload.settings import Settings, check_slots
from foreload.simulator.result import SimResult
from foreload.units import format_bytes

DEFAULT, BEST, KEPT, FILE = "the default", "the tuned settings", "the settings kept", "a settings file"


def page(view: View) -> None:
    """Draw it."""
    st.header("Compare", anchor=False)
    left, right = st.columns([3, 1], vertical_alignment="bottom")
    with right:
        if st.button("Keep these settings", help="to compare with after changing the controls", width="stretch"):
            st.session_state["kept"] = view.plan
    offers = [DEFAULT, *([BEST] if tuned(view) else []), *([KEPT] if "kept" in st.session_state else []), FILE]
    with left:
        choice = st.selectbox("Compare these settings with", offers, key="other")
    try:
        other = _other(view, choice)
        if other is None:
            return
        capacity = check_slots(other, view.data.shape, view.budget, view.data.expert_bytes(other))
        _show(view, choice, other, data.predict(view.name, view.machine, other, capacity))
    except ForeloadError as error:
        st.error(str(error))


def _other(view: View, choice: str) -> Settings | None:
    if choice == BEST:
        found = tuned(view)
        return None if found is None else found.best.settings
    if choice == KEPT:
        kept: Settings = st.session_state["kept"]
        return kept
    if choice == DEFAULT:
        return view.base.changed(slots_per_layer=view.base_capacity)
    file = st.file_uploader("Settings as JSON", type="json")
    if file is None:
        return None
    try:
        return Settings.parse(json.loads(file.getvalue()), file.name)
    except ValueError as error:
        raise SettingsError(f"{file.name}: not valid JSON: {error}") from error


def _show(view: View, name: str, other: Settings, result: SimResult) -> None:
    mine = view.predicted()
    parts = {name: breakdown(result), "these settings": breakdown(mine)}
    stalls = sorted({kind for part in parts.values() for kind in part.stalls})
    times = {label: part.time_ms for label, part in parts.items()}
    st.plotly_chart(figures.time_bars(times, stalls), config=figures.CONFIG, key="compare")
    st.caption(f"{labels.of_simulation(mine, view.machine)} {labels.stated_error(view.data, view.machine)}")
    rows = [
        ("ms per token", f"{result.tpot_ns / 1e6:.3f}", f"{mine.tpot_ns / 1e6:.3f}"),
        ("found on the device", f"{result.hit_rate:.1%}", f"{mine.hit_rate:.1%}"),
        ("copied per token", format_bytes(result.bytes_per_token()), format_bytes(mine.bytes_per_token())),
        ("experts kept", str(sum(result.capacity)), str(sum(mine.capacity))),
    ]
    st.dataframe(_table(name, rows), hide_index=True)
    differing = labels.settings_rows(other.model_dump(mode="json"), view.plan.model_dump(mode="json"))
    st.subheader("Settings that differ", anchor=False)
    if differing:
        st.dataframe(_table(name, differing), hide_index=True)
    else:
        st.caption("None: both are the same.")


def _table(name: str, rows: Any) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["", name, "these settings"])
