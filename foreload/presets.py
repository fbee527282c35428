"""Presets: how other systems keep and move experts, as settings (design: section 3).

A preset fixes what the system is known for and leaves the rest at its default. Where a system places experts by layer,
the slot counts follow from the room there is; elsewhere the cache is as large as it is asked to be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foreload.errors import SettingsError
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape

FATE_WHOLE_LAYERS = 4
Fields = Callable[[ModelShape, int], dict[str, Any]]
"""Fields of a model's settings, with so many threads for CPU experts."""


@dataclass(frozen=True)
class Preset:
    """One system: what it does, where that is described, its fields, and slots per layer if it places by layer."""

    summary: str
    source: str
    fields: Fields
    placed: Callable[[ModelShape, int], tuple[int, ...]] | None = None  # of (shape, persistent slots)
    warm: bool = False  # decides by counts of a recording (--warm-start)


def _fixed(**fields: Any) -> Fields:
    return lambda shape, threads: dict(fields)


def _on_cpu(**fields: Any) -> Fields:
    return lambda shape, threads: {**fields, "cpu_threads": threads}


def _nothing(shape: ModelShape, slots: int) -> tuple[int, ...]:
    return (0,) * shape.n_moe_layers


def _last_layers_whole(shape: ModelShape, slots: int) -> tuple[int, ...]:
    """The first N MoE layers hold nothing, the others everything, N as small as the slots allow."""
    whole = min(shape.n_moe_layers, slots // shape.experts)
    return (0,) * (shape.n_moe_layers - whole) + (shape.experts,) * whole


def _first_layers_whole(shape: ModelShape, slots: int) -> tuple[int, ...]:
    """The first layers hold everything, as far as the slots allow; the others share what is left."""
    layers = shape.n_moe_layers
    whole = min(FATE_WHOLE_LAYERS, layers, slots // shape.experts)
    rest = min(shape.experts, (slots - whole * shape.experts) // max(1, layers - whole))
    return (shape.experts,) * whole + (rest,) * (layers - whole)


def _speculating(predictor: str) -> Fields:
    """Speculating Experts: predicted experts are copied a layer ahead and executed, all but the first MoE layer's."""
    return _fixed(predictor=predictor, prefetch_depth=1, miss_action="fetch", speculate_layers="all")


def _moe_spac(**utility: Any) -> Fields:
    return _on_cpu(
        pool="shared",
        eviction="utility",
        predictor="utility",
        miss_action="split",
        split_rule="tau",
        utility={"reset_done": True, **utility},
        draft={"kind": "model", "gamma": 8},
    )


PRESETS: Mapping[str, Preset] = {
    "on_demand": Preset(
        "no cache: every demanded expert is copied", "the baseline of arXiv 2603.19289", _fixed(), _nothing
    ),
    "mixtral_offloading": Preset(
        "least recently used; the next layer's gate prefetches two experts",
        "arXiv 2312.17238",
        _fixed(eviction="lru", miss_action="fetch", predictor="gate", prefetch_depth=1, prefetch_width=2),
    ),
    "fiddler": Preset(
        "the most popular experts stay; an absent one goes to the CPU if that is quicker than its copy",
        "arXiv 2402.07033",
        _on_cpu(eviction="static", admission="none", miss_action="split", split_rule="per_expert"),
        warm=True,
    ),
    "llama_cpp": Preset(
        "the first MoE layers wholly on the CPU, the others wholly resident",
        "llama.cpp, --n-cpu-moe",
        _on_cpu(admission="none", miss_action="cpu"),
        _last_layers_whole,
    ),
    "llama_cpp_lru": Preset(
        "least recently used; absent experts on the CPU, two per layer-step uploaded behind them",
        "llama.cpp pull request 27861",
        _on_cpu(eviction="lru", miss_action="cpu", admission="background", admit_per_step=2),
    ),
    "freetoken": Preset(
        "least recently used; absent experts shared between link and CPU by their rates",
        "FreeToken",
        _on_cpu(eviction="lru", miss_action="split", split_rule="bandwidth"),
    ),
    "fate": Preset(
        "least frequently used, the first four layers whole; the next layer's gate prefetches twice top-k",
        "arXiv 2502.12224",
        lambda shape, threads: {
            "eviction": "lfu",
            "miss_action": "fetch",
            "predictor": "gate",
            "prefetch_depth": 1,
            "prefetch_width": min(shape.experts, 2 * shape.top_k),
        },
        _first_layers_whole,
    ),
    "router_pf": Preset(
        "no cache; the next layer's own router, on an estimate of its input, says what is copied and executed",
        "arXiv 2603.19289, Router-PF",
        _speculating("quasi_hidden"),
        _nothing,
    ),
    "est_pf": Preset(
        "no cache; one small network for all layers says what is copied and executed",
        "arXiv 2603.19289, Est-PF",
        _speculating("estimator"),
        _nothing,
    ),
    "hybrid_pf": Preset(
        "no cache; per layer the better of both says what is copied and executed",
        "arXiv 2603.19289, Hybrid-PF",
        _speculating("hybrid"),
        _nothing,
    ),
    "moe_spac": Preset(
        "one pool, kept, split and prefetched by utilities that the windows of a draft model feed",
        "arXiv 2603.09983",
        _moe_spac(k=4, rate=0.1, adapt="floored"),
    ),
    "moe_spac_code": Preset(
        "the same as its released code does it: utilities follow demand itself, boundaries and threshold fixed",
        "arXiv 2603.09983, its code",
        _moe_spac(k=5, signal="level", adapt="off", theta_up=5.0, theta_down=1.0, tau=1),
    ),
}


def find(name: str) -> Preset:
    """The preset; SettingsError lists the known ones."""
    if name not in PRESETS:
        raise SettingsError(f"preset {name!r} is unknown: there are {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_settings(
    name: str, shape: ModelShape, threads: int, slots: int | None = None, cache_ratio: float | None = None
) -> Settings:
    """The settings of a preset for a model, with `threads` for CPU experts.

    The cache holds the share `cache_ratio` of all experts; else what fits into `slots`, persistent and staging (None:
    not known yet). Raises SettingsError for an unknown name, or if it places experts by layer and there is neither.
    """
    preset = find(name)
    settings = Settings.parse(preset.fields(shape, threads), f"preset {name}")
    if preset.placed is None:
        return settings if cache_ratio is None else settings.changed(cache_ratio=cache_ratio)
    if cache_ratio is not None:
        persistent = int(cache_ratio * shape.experts * shape.n_moe_layers + 1e-9)
    elif slots is not None:
        persistent = max(0, slots - staging_slots(settings, shape))
    else:
        raise SettingsError(f"preset {name} places experts by the room there is: give --vram or --cache-ratio")
    return settings.changed(slots_per_layer=preset.placed(shape, persistent))
