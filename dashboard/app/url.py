"""Controls in the address: a link shows what its sender saw. `seed` before a control is drawn, `publish` at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import streamlit as st

T = TypeVar("T", str, int, float, bool)
_SHOWN = "controls shown"


def begin() -> None:
    """A run of the script begins: nothing is shown yet."""
    st.session_state[_SHOWN] = {}


def seed(key: str, default: T, options: Sequence[T] | None = None, low: T | None = None, high: T | None = None) -> str:
    """Give the control `key` its first value, from the address or else `default`; returns the key.

    A value that is no option (any more) becomes the default, one out of range the nearest end.
    """
    state = st.session_state
    value = state[key] if key in state else _parsed(st.query_params.get(key), default)
    if options is not None and value not in options:
        value = default
    if low is not None and high is not None:
        value = min(high, max(low, value))
    state[key] = value
    state[_SHOWN][key] = default
    return key


def _parsed(text: str | None, default: T) -> T:
    """The address's text as the type of `default`; the default if it is none."""
    if text is None:
        return default
    if isinstance(default, bool):
        return text == "True"
    try:
        return type(default)(text)
    except ValueError:
        return default


def publish() -> None:
    """Write every control that is shown and not at its default into the address."""
    state = st.session_state
    wanted = {key: str(state[key]) for key, default in state[_SHOWN].items() if key in state and state[key] != default}
    if wanted != st.query_params.to_dict():
        st.query_params.from_dict(wanted)
