"""Some tokens span by span: what host, GPU, link and CPU do at the same time."""

from __future__ import annotations

import streamlit as st

from foreload.dashboard.app import data, figures, labels
from foreload.dashboard.app.url import seed
from foreload.dashboard.app.view import View

MOST_SPANS = 4000
SHOWN = (1, 2, 4)


def page(view: View) -> None:
    """Draw it."""
    st.header("Timeline", anchor=False)
    left, middle, right = st.columns([2, 3, 2])
    with left:
        numbers = view.data.requests
        request = st.selectbox("Request", numbers, key=seed("request", numbers[-1], numbers))
    result = data.timeline(view.name, view.machine, view.settings, view.capacity, request)
    last = result.tokens - 1
    if last < 0:
        st.info("This request holds no decoded token.")
        return
    with middle:
        token = st.slider("Decode token", 0, max(1, last), key=seed("token", min(8, last), low=0, high=last))
    with right:
        number = st.segmented_control("Tokens shown", SHOWN, key=seed("tokens", 1, SHOWN), required=True) or 1
    steps = range(token, min(last, token + number - 1) + 1)
    events = [event for event in result.timeline if event.step in steps][:MOST_SPANS]
    st.plotly_chart(figures.gantt(events), config=figures.CONFIG, key="gantt")
    took = " + ".join(labels.milliseconds(result.token_ns[step] / 1e6) for step in steps)
    st.caption(f"{took}; point at a span for its layer and expert {labels.of_simulation(result, view.machine)}")
    if view.data.profile.meta.device == "cpu":
        st.caption(
            "On a CPU the decoding thread computes what a GPU would; only the link and CPU experts run beside it."
        )
