"""A running engine: its statistics beside the prediction, and the settings of the controls pushed into it."""

from __future__ import annotations

from collections import deque
from typing import Any

import pandas as pd
import streamlit as st

from foreload.client import EngineClient
from foreload.dashboard.app import figures, labels
from foreload.dashboard.app.url import seed
from foreload.dashboard.app.view import View
from foreload.errors import BudgetError, ForeloadError
from foreload.settings import Settings
from foreload.units import format_bytes

ADDRESS = "http://127.0.0.1:8000"
LOOKS = 300


def page(view: View) -> None:
    """Draw it."""
    st.header("Live engine", anchor=False)
    left, middle, right = st.columns([4, 3, 2], vertical_alignment="bottom")
    with left:
        address = st.text_input("Address of `foreload serve`", key=seed("url", ADDRESS))
    with middle:
        key = st.text_input("Admin key, if it needs one", type="password", key="admin-key")
    with right:
        watching = st.toggle("Watch", key="watch", help="Look every second.")
    client = EngineClient(address, key or None)
    if st.button("Push the settings of the controls", type="primary"):
        _push(client, view)
    every = 1.0 if watching else None
    st.fragment(_look, run_every=every)(client, address, view)


def _push(client: EngineClient, view: View) -> None:
    try:
        answer = client.apply(view.plan)
    except BudgetError as error:
        st.error(f"{error} (the old settings stay in force; {format_bytes(error.shortfall_bytes)} short)")
        return
    except ForeloadError as error:
        st.error(f"{error} (the old settings stay in force)")
        return
    changed, cost = answer["changed"], answer["cost"]
    st.session_state["pushed"] = view.plan
    st.success(
        (f"In force, changed: {', '.join(changed)}. " if changed else "In force already. ")
        + f"{cost['paused_ms']:.2f} ms without a token, {cost['slots_before']} → {cost['slots_after']} slots."
    )


def _look(client: EngineClient, address: str, view: View) -> None:
    try:
        stats = client.stats()
    except ForeloadError as error:
        st.info(f"No engine there: {error}")
        st.code("foreload serve mini --link 100MB/s", language="sh")
        return
    if stats["model"] != view.data.trace.meta.model:
        st.warning(f"The engine runs {stats['model']}, the recording is of {view.data.trace.meta.model}.")
    _tiles(stats, view)
    _history(stats, address)
    _layers(stats, view)


def _tiles(stats: dict[str, Any], view: View) -> None:
    predicted, recent = view.predicted(), stats["recent"]
    ours = _same(stats["settings"], view.plan)
    tiles = st.columns(4)
    tpot, rate, copied = stats["tpot"]["mean_ms"], recent["hit_rate"], recent["bytes_per_token"]
    with tiles[0]:
        _metric("Time per token", tpot, labels.milliseconds, labels.milliseconds(predicted.tpot_ns / 1e6))
    with tiles[1]:
        _metric("Found on the device", rate, "{:.1%}".format, f"{predicted.hit_rate:.1%}")
    with tiles[2]:
        _metric("Copied per token", copied, format_bytes, format_bytes(predicted.bytes_per_token()))
    with tiles[3]:
        waits = sum(recent["stall_ms_per_token"].values()) if recent["tokens"] else None
        ours_ms = sum(predicted.stall_ns.values()) / max(1, predicted.tokens) / 1e6
        _metric("Waiting per token", waits, labels.milliseconds, labels.milliseconds(ours_ms))
    known = "" if ours else " The engine runs other settings than the controls show: push them to compare."
    st.caption(
        f"large: {labels.badge('measured')} over the last {recent['tokens']} tokens; small: "
        f"{labels.of_simulation(predicted, view.machine)} for the settings of the controls and the recorded "
        f"requests, on {view.data.profile.meta.machine}.{known}"
    )
    requests = ", ".join(f"{count} {state}" for state, count in stats["requests"].items() if count)
    st.caption(f"{stats['model']} on {stats['device']}, {stats['settings']}; requests: {requests or 'none yet'}")


def _metric(name: str, value: float | None, shown: Any, predicted: str) -> None:
    text = "no tokens yet" if value is None else shown(value)
    st.metric(name, text, f"predicted {predicted}", delta_color="off", delta_arrow="off", border=True, height="stretch")


def _same(described: str, plan: Settings) -> bool:
    return described == plan.describe()


def _history(stats: dict[str, Any], address: str) -> None:
    looks: dict[str, deque[tuple[float, float]]] = st.session_state.setdefault("looks", {})
    seen = looks.setdefault(address, deque(maxlen=LOOKS))
    if stats["tpot"]["mean_ms"] is not None:
        seen.append((stats["uptime_s"], stats["tpot"]["mean_ms"]))
    if len(seen) > 1:
        st.plotly_chart(figures.history(list(seen)), config=figures.CONFIG, key="history")
        st.caption(f"mean time per token over the latest tokens, at every look {labels.badge('measured')}")


def _layers(stats: dict[str, Any], view: View) -> None:
    rows = [
        {
            "layer": layer["layer"],
            "slots": layer["slots"],
            "in use": layer["resident"],
            "found": layer["hit_rate"],
            "late": layer["late"],
            "missing": layer["misses"],
            "copied": format_bytes(layer["bytes_copied"]),
        }
        for layer in stats["layers"]
    ]
    with st.expander("Layer by layer"):
        percent = st.column_config.ProgressColumn(format="percent", min_value=0, max_value=1)
        st.dataframe(pd.DataFrame(rows), hide_index=True, column_config={"found": percent})
        st.caption(f"since the engine started {labels.badge('measured')}")
