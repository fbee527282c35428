"""The settings as other engines take them, to copy; and somebody's command explained."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from foreload.backend.export import ENGINES, Exported, Target, explain, export
from foreload.dashboard.app import labels
from foreload.dashboard.app.url import seed
from foreload.dashboard.app.view import View
from foreload.errors import ForeloadError
from foreload.units import format_bytes


def page(view: View) -> None:
    """Draw it."""
    st.header("Export", anchor=False)
    left, right = st.columns([2, 1])
    names = list(ENGINES)
    with left:
        engine = st.selectbox("Engine", names, key=seed("engine", "llama.cpp", names))
    with right:
        key = seed("bits", 16.0, low=1.0, high=32.0)
        bits = st.number_input("Bits per weight of the file served", 1.0, 32.0, step=0.5, key=key)
    model = view.data.trace.meta.model
    weights = f"{model}.gguf" if engine in ("llama.cpp", "ik_llama") else model
    target = Target(
        view.data.shape, view.plan, weights, context=view.context, bits=float(bits), counts=view.data.use, folder="."
    )
    try:
        _show(export(engine, target))
    except ForeloadError as error:
        st.error(str(error))
    st.subheader("Explain a command", anchor=False)
    command = st.text_area("A command line somebody uses", key="command", placeholder="llama-server -m model.gguf ...")
    if command.strip():
        _explain(command, target)


def _show(made: Exported) -> None:
    if made.command:
        st.code(made.shell, language="sh", wrap_lines=True)
    for name, content in made.files.items():
        text = not name.endswith(".pt")
        if text:
            st.code(content.decode(), language="json", height=320)
        st.download_button(name, content, name, icon=":material/download:")
    st.caption(f"checked against {made.checked}")
    if made.notes:
        st.markdown("\n".join(f"- {note}" for note in made.notes))


def _explain(command: str, target: Target) -> None:
    try:
        found = explain(command, target)
    except ForeloadError as error:
        st.error(str(error))
        return
    for warning in found.warnings:
        st.warning(warning)
    tiles = st.columns(max(3, len(found.bytes_by_device())))
    for tile, (device, size) in zip(tiles, found.bytes_by_device().items(), strict=False):
        with tile:
            st.metric(device, format_bytes(size), border=True, height="stretch")
    rows = [{"tensor": t.name, "device": t.device, "bytes": t.bytes, "because of": t.because} for t in found.tensors]
    column = st.column_config.NumberColumn(format="bytes")
    st.dataframe(pd.DataFrame(rows), hide_index=True, column_config={"bytes": column}, height=320)
    st.caption(f"{target.bits:g} bits per weight, by the model's shape {labels.badge('assumed')}")
