"""Hit rates against slots with the best possible beside them, and what every layer and expert is used for."""

from __future__ import annotations

import numpy as np
import streamlit as st

from foreload.backend.policy import Counter
from foreload.dashboard.analysis import policy_name
from foreload.dashboard.app import figures, labels
from foreload.dashboard.app.url import seed
from foreload.dashboard.app.view import View

DECODE = 0
MAPS = USE, HITS, CURVE = "use of experts", "found, by layer", "found, by layer and slots"


def page(view: View) -> None:
    """Draw it."""
    found, result = view.data.curves, view.predicted()
    st.header("Cache", anchor=False)
    kept = sum(view.capacity) / len(view.capacity)
    shares = {policy_name(policy): found.rate(policy) for policy in found.hits}
    st.plotly_chart(figures.curves(shares, kept, result.hit_rate), config=figures.CONFIG, key="curve")
    st.caption(
        f"lines: the whole recording, {found.steps} tokens, every layer with as many slots, misses fetched; "
        f"point: these settings on its last requests, prefetches included {labels.of_simulation(result, view.machine)}"
    )
    st.subheader("Layer by layer", anchor=False)
    shown = st.segmented_control("Show", MAPS, key=seed("heat", USE, MAPS), required=True)
    numbers = view.data.trace.meta.layer_numbers
    if shown == USE:
        use = view.data.use / np.maximum(1, view.data.use.sum(axis=1, keepdims=True))
        st.plotly_chart(figures.heat(use, numbers, "expert", "share of tokens %"), config=figures.CONFIG, key="use")
        st.caption(f"share of a layer's demand that goes to each expert, decoded tokens {labels.badge('measured')}")
    elif shown == HITS:
        counts = result.counters[DECODE]
        names = {"found": Counter.HITS, "late": Counter.LATE, "missing": Counter.MISSES, "on the CPU": Counter.ON_CPU}
        table = np.stack([counts[:, counter] for counter in names.values()], axis=1) / max(1, result.tokens)
        figure = figures.heat(table, numbers, "outcome", "experts per token")
        figure.update_xaxes(tickvals=list(range(len(names))), ticktext=list(names))
        st.plotly_chart(figure, config=figures.CONFIG, key="outcomes")
        st.caption(f"experts per token and layer {labels.of_simulation(result, view.machine)}")
    else:
        policy = view.settings.eviction if view.settings.eviction in found.hits else "lru"
        rates = found.layer_rates(policy)
        st.plotly_chart(figures.heat(rates, numbers, "slots", "%", 1.0), config=figures.CONFIG, key="by-layer")
        st.caption(f"hit rate of {policy} at every number of slots {labels.badge('simulated')}")
