"""The controls in the sidebar, kept in the address so that a link shows the same; together they are a `View`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

import streamlit as st

from foreload.budget import fixed_bytes, slot_budget
from foreload.dashboard.app import data
from foreload.dashboard.app.data import Dataset
from foreload.dashboard.app.url import seed
from foreload.dashboard.app.view import View
from foreload.errors import ForeloadError, SettingsError
from foreload.formats import ExpertFormat
from foreload.settings import (
    MAX_GAMMA,
    MAX_HALF_LIFE,
    MAX_PREFETCH_DEPTH,
    NEXT_STEP,
    Draft,
    Settings,
    Utility,
    check_slots,
    staging_slots,
)
from foreload.simulator.whatif import Machine
from foreload.units import format_bytes

MIB = 2**20
CACHES = FILLS, SHARE, BY_LAYER = "fills the memory", "share of experts", "slots by layer"
CONTROLS = {
    "eviction": "eviction",
    "half_life": "half_life",
    "admission": "admission",
    "miss_action": "miss",
    "split_rule": "split",
    "cpu_threads": "threads",
    "predictor": "predictor",
    "prefetch_depth": "depth",
    "prefetch_width": "width",
}
"""Field of the settings -> its control."""
PROFILED = "as the weights"
FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def sidebar() -> View | None:
    """Draw the controls; None, with the reason on the page, if they describe nothing that can be simulated."""
    with st.sidebar:
        name = _choice("Machine and recording", data.names(), "source")
    try:
        found = data.load(name)
        with st.sidebar:
            memory, context = _memory(found)
            fields = {**_cache(found), **_decisions(found), **_more()}
            machine = _machine()
        settings = Settings.parse(fields)
        budget = slot_budget(found.shape, found.dtype, memory, context, settings)
        capacity = check_slots(settings, found.shape, budget, found.expert_bytes(settings))
        return View(name, found, machine, memory, context, budget, settings, capacity)
    except ForeloadError as error:
        st.error(str(error))
        return None


def _memory(found: Dataset) -> tuple[int, int]:
    """Device memory in bytes and positions to keep room for."""
    shape, size = found.shape, found.profile.meta.expert_bytes
    contexts = [tokens for tokens in CONTEXTS if found.longest <= tokens <= shape.max_positions] or [found.longest]
    least = fixed_bytes(shape, found.dtype, found.longest) + staging_slots(Settings(), shape) * size
    total = least + shape.n_moe_layers * shape.experts * size
    low, high = -(-least // MIB), -(-total // MIB) + 1
    memory = st.slider(
        "Device memory, MiB",
        low,
        high,
        key=seed("memory", low + (high - low) // 3, low=low, high=high),
        help=f"{format_bytes(least)} are needed for dense weights, staging and {found.longest} positions; "
        f"{format_bytes(total)} hold every expert.",
    )
    context = st.select_slider(
        "Context, tokens",
        contexts,
        key=seed("context", contexts[0], contexts),
        help="Keys and values take memory too.",
    )
    return int(memory) * MIB, int(context)


def _cache(found: Dataset) -> dict[str, Any]:
    shape = found.shape
    mode = _choice("Cache", CACHES, "cache")
    if mode == SHARE:
        percent = st.slider("Share of experts kept, %", 0, 100, key=seed("share", 25, low=0, high=100))
        return {"cache_ratio": percent / 100}
    if mode == BY_LAYER:
        even = ",".join([str(shape.experts // 4)] * shape.n_moe_layers)
        text = st.text_input("Slots of each MoE layer", key=seed("slots", even))
        try:
            return {"slots_per_layer": [int(part) for part in text.split(",")]}
        except ValueError as error:
            raise SettingsError(f"slots per layer {text!r}: numbers with commas between them are needed") from error
    return {}


def _choice(label: str, options: Sequence[Any], key: str, default: Any = None, **more: Any) -> Any:
    """A list to choose from; the first entry is the default if none is named."""
    return st.selectbox(label, options, key=seed(key, options[0] if default is None else default, options), **more)


def _buttons(label: str, options: Sequence[Any], key: str) -> Any:
    """A few options side by side."""
    return st.segmented_control(label, options, key=seed(key, options[0], options), required=True)


def _options(field: str) -> list[str]:
    return list(get_args(Settings.model_fields[field].annotation))


def _decisions(found: Dataset) -> dict[str, Any]:
    """Eviction, misses and prediction."""
    fields: dict[str, Any] = {name: _choice(name.title(), _options(name), name) for name in ("eviction", "admission")}
    if fields["eviction"] == "aged":
        key = seed("half_life", Settings().half_life, low=1, high=MAX_HALF_LIFE)
        fields["half_life"] = st.number_input("Half-life of a use, steps", 1, MAX_HALF_LIFE, key=key)
    miss = _buttons("An expert that is missing", _options("miss_action"), "miss")
    fields["miss_action"] = miss
    if miss == "split":
        fields["split_rule"] = _choice("Split by", _options("split_rule"), "split")
        if fields["split_rule"] == "tau":
            levels = ("auto", *map(str, range(1, Utility().k + 2)))
            tau = _choice("Threshold τ", levels, "tau", help="Absent experts whose utility is at least τ are fetched.")
            fields["utility"] = {"tau": tau if tau == "auto" else int(tau)}
    threads = data.costs(found.source.name, Machine()).cpu_threads
    if miss != "fetch" and threads:
        fields["cpu_threads"] = _choice("CPU threads", threads, "threads", threads[-1])
    predictor = _choice("Predictor", _options("predictor"), "predictor")
    if predictor in NEXT_STEP:
        fields["predictor"] = predictor
    elif predictor != "none":
        recorded = found.trace.meta.predictions
        deepest = min(MAX_PREFETCH_DEPTH, max((one.depth for one in recorded), default=1))
        widths = range(1, max([found.shape.top_k, *(one.width for one in recorded)]) + 1)
        fields["predictor"] = predictor
        fields["prefetch_depth"] = _buttons("Layers ahead", range(1, deepest + 1), "depth")
        fields["prefetch_width"] = st.select_slider(
            "Experts prefetched per layer", widths, key=seed("width", found.shape.top_k, widths)
        )
    return {**fields, **_format(), **_draft()}


def _format() -> dict[str, Any]:
    """How experts are stored."""
    chosen = _choice("Expert format", (PROFILED, *get_args(ExpertFormat)), "format")
    return {} if chosen == PROFILED else {"expert_format": chosen}


def _draft() -> dict[str, Any]:
    """What proposes tokens."""
    kind = _choice("Draft", get_args(Draft.model_fields["kind"].annotation), "draft")
    if kind == "none":
        return {}
    gamma = st.slider("Tokens proposed per step", 1, MAX_GAMMA, key=seed("gamma", 4, low=1, high=MAX_GAMMA))
    return {"draft": {"kind": kind, "gamma": gamma}}


def _more() -> dict[str, Any]:
    """The other choices there are, and any other field as JSON."""
    fields = {}
    with st.expander("More settings"):
        for name, field in Settings.model_fields.items():
            if get_origin(field.annotation) is Literal and name not in CONTROLS:
                fields[name] = _choice(name.replace("_", " ").capitalize(), _options(name), name, field.default)
        text = st.text_area("Other fields as JSON", key=seed("more", ""), placeholder='{"admit_per_step": 4}')
    return {**fields, **_parsed(text)}


def _parsed(text: str) -> dict[str, Any]:
    """Fields in JSON; SettingsError if it is no object."""
    if not text.strip():
        return {}
    try:
        values = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"other fields: not valid JSON: {error}") from error
    if not isinstance(values, Mapping):
        raise SettingsError('other fields: an object like {"admit_per_step": 4} is needed')
    return dict(values)


def _machine() -> Machine:
    with st.expander("Another machine"):
        st.caption("Factors on the profiled rates. What they change is :orange-badge[assumed].")
        link, cpu = (
            st.select_slider(label, FACTORS, key=seed(key, 1.0, FACTORS), format_func="x {:g}".format)
            for label, key in (("Link", "link"), ("CPU experts", "cpu"))
        )
    return Machine(float(link), float(cpu))


def look_at(settings: Settings) -> None:
    """Put `settings` into the controls; to be called before they are drawn (from a callback)."""
    values: dict[str, Any] = {name: getattr(settings, field) for field, name in CONTROLS.items()}
    if settings.slots_per_layer is not None:
        values.update(cache=BY_LAYER, slots=",".join(map(str, settings.slots_per_layer)))
    elif settings.cache_ratio is not None:
        values.update(cache=SHARE, share=round(settings.cache_ratio * 100))
    else:
        values.update(cache=FILLS)
    values.update(draft=settings.draft.kind, gamma=settings.draft.gamma, tau=str(settings.utility.tau))
    rest = settings.model_dump(mode="json", exclude_defaults=True)
    if settings.utility == Utility(tau=settings.utility.tau) and settings.split_rule == "tau":
        rest.pop("utility", None)
    if isinstance(settings.expert_format, str):
        values["format"] = rest.pop("expert_format")
    rest = {k: v for k, v in rest.items() if k not in (*CONTROLS, "slots_per_layer", "cache_ratio", "draft")}
    values["more"] = json.dumps(rest) if rest else ""
    for name, value in values.items():
        if value not in (None, 0):
            st.session_state[name] = value
