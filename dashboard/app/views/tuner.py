"""The tuner, with progress, and what more or less memory would do."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from foreload.dashboard.app import data, figures, labels
from foreload.dashboard.app.controls import look_at
from foreload.dashboard.app.view import View
from foreload.dashboard.collect import predicted_of
from foreload.simulator.tune import TuneResult, tune
from foreload.simulator.whatif import Machine
from foreload.units import format_bytes

TUNED = "tuned"
MIB = 2**20


def page(view: View) -> None:
    """Draw it."""
    st.header("Tune", anchor=False)
    st.caption(
        f"The best settings in {format_bytes(view.memory_bytes)} ({view.budget} expert slots, staging included): "
        "integer programs propose, the simulator decides, and the default stays unless something clearly beats it."
    )
    if st.button("Run the tuner", type="primary"):
        st.session_state[TUNED] = (_key(view), _tune(view))
    held = st.session_state.get(TUNED)
    if held is not None:
        if held[0] != _key(view):
            st.warning("The result below is of another source, machine or memory: run the tuner again.")
        _show(view, held[1])
    st.subheader("Memory against speed", anchor=False)
    if st.button("Simulate from no cache to every expert"):
        st.session_state["front"] = (_key(view), _front(view))
    front = st.session_state.get("front")
    if front is not None and front[0][:2] == _key(view)[:2]:
        here = view.memory_bytes / MIB, view.predicted().tpot_ns / 1e6
        best = data.pareto(point[:2] for points in front[1].values() for point in points)
        st.plotly_chart(figures.front(front[1], best, here), config=figures.CONFIG, key="front-figure")
        st.caption(
            "lru, uniform slots; lower and further left is better "
            + labels.of_simulation(view.predicted(), view.machine)
        )


def tuned(view: View) -> TuneResult | None:
    """The last result of the tuner, if it is of this view's source, machine and memory."""
    held = st.session_state.get(TUNED)
    return held[1] if held is not None and held[0] == _key(view) else None


def _key(view: View) -> tuple[str, Machine, int]:
    return view.name, view.machine, view.budget


def _tune(view: View) -> TuneResult:
    bar = st.progress(0.0, "planning")

    def progress(done: int, total: int, what: str) -> None:
        bar.progress(min(1.0, done / max(1, total)), f"{what}: {done} of {total}")

    profile = data.costs(view.name, view.machine).profile
    found = tune(view.data.trace, profile, view.data.shape, view.data.dtype, slots=view.budget, progress=progress)
    bar.empty()
    return found


def _show(view: View, found: TuneResult) -> None:
    best, default = predicted_of(found.best), predicted_of(found.default)
    left, middle, right = st.columns(3)
    with left:
        st.metric("Default", labels.milliseconds(default.tpot_ns / 1e6), border=True, height="stretch")
    with middle:
        gain = f"{found.speedup:.2f} times as fast" if not found.kept_default else "nothing clearly beats the default"
        st.metric(
            "Best", labels.milliseconds(best.tpot_ns / 1e6), gain, delta_arrow="off", border=True, height="stretch"
        )
    with right:
        st.metric("Bound", labels.milliseconds(found.bounds.floor_ns / 1e6), border=True, height="stretch")
    where = "requests that chose nothing" if found.held_out else "the requests that chose"
    st.caption(f"on {where} {labels.of_simulation(best, view.machine)} {labels.stated_error(view.data, view.machine)}")
    st.code(found.best.settings.model_dump_json(exclude_defaults=True), language="json", wrap_lines=True)
    st.button("Look at these settings", on_click=look_at, args=(found.best.settings,))
    rows = [
        {
            "settings": candidate.family,
            "ms per token": candidate.tpot_ns / 1e6,
            "found": predicted_of(candidate).hit_rate,
            "copied per token": format_bytes(predicted_of(candidate).bytes_per_token()),
        }
        for candidate in found.families()
    ]
    st.dataframe(
        pd.DataFrame(rows),
        hide_index=True,
        column_config={
            "ms per token": st.column_config.NumberColumn(format="%.3f"),
            "found": st.column_config.NumberColumn(format="percent"),
        },
    )
    st.caption(f"the best of each kind, on the requests that chose {labels.of_simulation(best, view.machine)}")


def _front(view: View) -> dict[str, list[tuple[float, float, str]]]:
    bar = st.progress(0.0, "simulating")
    kinds, found = data.kinds(view.name, view.settings), {}
    for at, (name, settings) in enumerate(kinds.items()):
        bar.progress(at / len(kinds), name)
        found[name] = [
            (size / MIB, result.tpot_ns / 1e6, f"{result.capacity[0]} slots per layer, {result.hit_rate:.0%} found")
            for size, result in data.sweep(view.name, view.machine, settings, view.context)
        ]
    bar.empty()
    return found
