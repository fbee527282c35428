"""What the settings would do: time per token with its stated error, where it goes, and every layer's share."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import streamlit as st

from foreload.backend.policy import Counter
from foreload.dashboard.app import figures, labels
from foreload.dashboard.app.view import View
from foreload.dashboard.collect import breakdown
from foreload.dashboard.result import Breakdown
from foreload.simulator.result import SimResult
from foreload.units import format_bytes

DECODE = 0
OUTCOMES = {"found": Counter.HITS, "still on its way": Counter.LATE, "missing": Counter.MISSES}


def page(view: View) -> None:
    """Draw it."""
    result, base = view.predicted(), view.predicted_default()
    st.header("What if", anchor=False)
    headline(view, result, base)
    parts = {"default": breakdown(base), "these settings": breakdown(result)}
    st.subheader("Where a token's time goes", anchor=False)
    st.plotly_chart(_times(parts, view.floor().floor_ns / 1e6), config=figures.CONFIG, key="times")
    st.caption(_waits(parts["these settings"], result) + " " + labels.of_simulation(result, view.machine))
    st.subheader("Experts by layer", anchor=False)
    st.plotly_chart(_layers(view, result), config=figures.CONFIG, key="layers")
    st.caption(f"per token; every layer demands {view.data.shape.top_k} " + labels.of_simulation(result, view.machine))
    with st.expander("Where the costs come from"):
        st.caption(view.data.describe())
        st.markdown("\n".join(f"- {labels.badge(name)} {text}" for name, text in labels.MEANINGS.items()))
        rows = [{"cost": figures.words(probe), "source": source} for probe, source in result.sources.items()]
        st.dataframe(pd.DataFrame(rows), hide_index=True)


def headline(view: View, result: SimResult, base: SimResult) -> None:
    """The figures one asks for first, against the default in the same memory."""
    tiles = st.columns(5)
    change = 100 * (result.tpot_ns / base.tpot_ns - 1)
    with tiles[0]:
        st.metric(
            "Time per token",
            labels.milliseconds(result.tpot_ns / 1e6),
            f"{change:+.0f} %" if round(change) else "as the default",
            delta_color="inverse" if round(change) else "off",
            delta_arrow="auto" if round(change) else "off",
            border=True,
            height="stretch",
        )
    with tiles[1]:
        _tile("Tokens per second", f"{1e9 / result.tpot_ns:.3g}", f"bound {_bound(view):.3g}")
    with tiles[2]:
        _tile("Found on the device", f"{result.hit_rate:.1%}", f"default {base.hit_rate:.1%}")
    with tiles[3]:
        moved, before = result.bytes_per_token(), base.bytes_per_token()
        _tile("Copied per token", format_bytes(moved), f"default {format_bytes(before)}")
    with tiles[4]:
        held, every = sum(view.capacity), view.data.shape.n_moe_layers * view.data.shape.experts
        _tile("Experts kept", f"{held / every:.0%}", f"{held} of {every}")
    st.caption(f"{labels.of_simulation(result, view.machine)} {labels.stated_error(view.data, view.machine)}")


def _tile(name: str, value: str, below: str) -> None:
    st.metric(name, value, below, delta_color="off", delta_arrow="off", border=True, height="stretch")


def _bound(view: View) -> float:
    return 1e9 / view.floor().floor_ns


def _times(parts: Mapping[str, Breakdown], bound_ms: float) -> object:
    stalls = sorted({kind for part in parts.values() for kind in part.stalls})
    return figures.time_bars({name: part.time_ms for name, part in parts.items()}, stalls, {"bound": bound_ms})


def _waits(part: Breakdown, result: SimResult) -> str:
    waits = {figures.words(kind): part.time_ms[kind] for kind in part.stalls}
    total = sum(waits.values())
    causes = ", ".join(f"{name} {labels.milliseconds(ms)}" for name, ms in waits.items())
    share = total / (result.tpot_ns / 1e6)
    return f"{labels.milliseconds(total)} of it ({share:.0%}) is waiting" + (f": {causes}." if causes else ".")


def _layers(view: View, result: SimResult) -> object:
    counts = result.counters[DECODE]
    tokens = max(1, result.tokens)
    parts = {name: (counts[:, counter] / tokens).tolist() for name, counter in OUTCOMES.items()}
    numbers = [str(number) for number in view.data.trace.meta.layer_numbers]
    colours = (figures.CHOSEN, "#f59e0b", figures.DEFAULT)
    return figures.columns(numbers, parts, colours, "experts per token")
