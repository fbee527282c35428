"""`foreload simulate`: what settings would do on a machine, by its profile and a recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foreload.cli.inputs import (
    ContextIn,
    CpuScaleIn,
    Inputs,
    LinkIn,
    MachineIn,
    PinnedIn,
    ProfileIn,
    TraceIn,
    VramIn,
    WarmIn,
    load_inputs,
    what_if,
    with_pinned,
)
from foreload.cli.output import JsonFlag, Output, facts, table, writable
from foreload.cli.presets import PresetFlag
from foreload.errors import ForeloadError, UsageError
from foreload.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.settings import Settings
    from foreload.simulator.result import SimResult

ORACLE = "belady, an oracle that knows the future: a bound, no engine can run it"
RequestsIn = Annotated[
    list[int] | None, typer.Option("--request", metavar="N", help="Only this request; repeatable. Default: all.")
]


def simulate(
    profile: ProfileIn,
    trace: TraceIn,
    settings: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="JSON or TOML. Default: the defaults.")
    ] = None,
    preset: PresetFlag = None,
    oracle: Annotated[
        Literal["belady"] | None,
        typer.Option("--eviction-oracle", help="Evict by what is demanded next: a bound that no engine can run."),
    ] = None,
    warm: WarmIn = None,
    vram: VramIn = None,
    cache_ratio: Annotated[
        float | None, typer.Option("--cache-ratio", help="Share of experts that may stay, 0 to 1, instead.")
    ] = None,
    context: ContextIn = None,
    link: LinkIn = None,
    cpu_scale: CpuScaleIn = None,
    machine: MachineIn = None,
    pinned: PinnedIn = None,
    request: RequestsIn = None,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE", callback=writable, help="Write a timeline for ui.perfetto.dev."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict what settings would do, by a profile and a recording."""
    from foreload.simulator import compiled, engine_model

    output = Output(as_json)
    inputs = with_pinned(what_if(load_inputs(profile, trace, output), link, cpu_scale, machine), pinned)
    if vram is None and cache_ratio is None and settings is None:
        vram = inputs.vram
    chosen = _settings(inputs, settings, preset, cache_ratio, vram, context)
    counts = inputs.warm_counts(warm)
    capacity = inputs.capacity(chosen, vram, context)
    with output.progress() as progress:
        progress.add_task("simulating", total=None)
        run = (inputs.trace, inputs.profile, inputs.shape, chosen, capacity, request)
        if timeline is None and oracle is None:
            result = compiled.simulate(*run, warm=counts)
        else:
            drawn = timeline is not None
            result = engine_model.simulate(*run, timeline=drawn, warm=counts, oracle=oracle is not None)
        values = {
            **_provenance(inputs, chosen, capacity),
            "eviction_oracle": oracle,
            **result.as_dict(),
            "bounds": _bounds(inputs, result, request),
            "perfect_prediction": _perfect(inputs, chosen, capacity, request, counts),
        }
    inputs.say_cut(chosen, output)
    if timeline is not None:
        _write_timeline(timeline, result, inputs)
        output.note(f"{timeline}: timeline written")
    output.finish(values, lambda console: show(console, values))


def _settings(
    inputs: Inputs,
    path: Path | None,
    preset: str | None,
    cache_ratio: float | None,
    vram: str | None,
    context: int | None,
) -> Settings:
    from foreload.settings import Settings

    if vram is not None and cache_ratio is not None:
        raise UsageError("--vram and --cache-ratio exclude each other: give one of them")
    if preset is not None:
        if path is not None:
            raise UsageError("--settings and --preset exclude each other: give one of them")
        slots = None if vram is None else inputs.slot_budget(vram, context, Settings())
        return inputs.preset(preset, slots, cache_ratio)
    chosen = Settings() if path is None else Settings.load(path)
    return chosen if cache_ratio is None else chosen.changed(slots_per_layer=None, cache_ratio=cache_ratio)


def _provenance(inputs: Inputs, settings: Settings, capacity: tuple[int, ...]) -> dict[str, Any]:
    meta = inputs.profile.meta
    return {
        "source": "simulated",
        "model": inputs.trace.meta.model,
        "shape_hash": inputs.shape.hash,
        "machine": meta.machine,
        "device": meta.device,
        "emulated_link_bytes_per_s": meta.emulated_link_bytes_per_s,
        "settings": settings.model_dump(mode="json", exclude_none=True),
        "slots_per_layer": list(capacity),
    }


def _bounds(inputs: Inputs, result: SimResult, request: list[int] | None) -> dict[str, Any]:
    from foreload.settings import staging_slots
    from foreload.simulator.bounds import bounds
    from foreload.simulator.costs import CostModel
    from foreload.simulator.workload import load_requests

    slots = sum(result.capacity) + staging_slots(result.settings, inputs.shape)
    requests = load_requests(inputs.trace, inputs.shape, result.settings, request)
    costs = CostModel(inputs.profile, inputs.shape).for_settings(result.settings)
    return bounds(requests, costs, slots, warm=result.warm_experts).as_dict()


def _perfect(
    inputs: Inputs, chosen: Settings, capacity: tuple[int, ...], request: list[int] | None, warm: Any
) -> dict[str, Any] | None:
    """The same settings with predictions that are always right; None where profile or recording cannot say."""
    from foreload.simulator.costs import CostModel
    from foreload.simulator.perfect import perfect

    try:
        found = perfect(inputs.trace, CostModel(inputs.profile, inputs.shape), chosen, capacity, request, warm)
    except ForeloadError:
        return None
    return {
        "tpot_ms": found.tpot_ns / 1e6,
        "hit_rate": found.hit_rate,
        "bytes_per_token": found.bytes_per_token(),
        "prefetch_depth": found.settings.prefetch_depth,
    }


def _write_timeline(path: Path, result: SimResult, inputs: Inputs) -> None:
    from foreload.traces.perfetto import write_perfetto
    from foreload.traces.timings import spans_of

    meta = {"source": "simulated", "model": inputs.trace.meta.model, "machine": inputs.profile.meta.machine}
    write_perfetto(path, {"simulated": spans_of(result.timeline)}, meta)


def show(console: Console, values: Mapping[str, Any]) -> None:
    """Print what a simulation says, for people."""
    slots = values["slots_per_layer"]
    spread = f"{slots[0]} in every layer" if len(set(slots)) == 1 else ", ".join(map(str, slots))
    console.print(
        facts(
            f"{values['model']} on {values['device']}: simulated",
            {
                "machine": values["machine"] + link_text(values["emulated_link_bytes_per_s"]),
                "settings": settings_text(values["settings"]),
                "slots": spread,
                "tokens": f"{values['tokens']} decoded, {values['tokens_per_step']:.2f} per step",
                **({"eviction": ORACLE} if values["eviction_oracle"] else {}),
            },
        )
    )
    console.print(table("", ("", "simulated"), _rows(values), f"costs: {sources_text(values['sources'])}"))


def _rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts = values["tpot_parts_ms"]
    rows = [("time per token", f"{values['tpot_ms']:.3f} ms")]
    for name, text in (("cold", "cold start"), ("after_prefill", "just after a prompt"), ("steady", "steady")):
        if parts[name] is not None:
            rows.append((f"  {text}", f"{parts[name]:.3f} ms"))
    for kind, ms in values["stall_per_token_ms"].items():
        if ms:
            rows.append((f"  of it {kind.replace('_', ' ')} (stall)", f"{ms:.3f} ms"))
    rows += [
        *_warm_row(values["warm_start"]),
        ("bound, no setting with these slots is faster", f"{values['bounds']['floor_ms']:.3f} ms"),
        ("every expert resident", f"{values['bounds']['resident_ms']:.3f} ms"),
        *_perfect_row(values["perfect_prediction"]),
        ("copied at least, whatever the cache", format_bytes(values["bounds"]["bytes_per_token"])),
        ("experts resident when demanded", f"{values['hit_rate']:.1%}"),
        ("copied per token", format_bytes(values["bytes_per_token"])),
        ("  of it prefetched in vain", format_bytes(values["bytes_wasted_per_token"])),
    ]
    return rows


def _perfect_row(perfect: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The run with perfect predictions, if there is one."""
    if perfect is None:
        return []
    return [(f"if predictions were always right, depth {perfect['prefetch_depth']}", f"{perfect['tpot_ms']:.3f} ms")]


def _warm_row(warm: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was loaded before the first request, if anything."""
    loaded = f"{format_bytes(warm['bytes'])} in {warm['ms']:.1f} ms"
    return [("loaded before the first request", loaded)] if warm["bytes"] else []


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings other than the default, on one line."""
    from foreload.settings import Settings

    return Settings.parse(dict(settings)).describe()


def link_text(emulated_bytes_per_s: int | None) -> str:
    """How the link is labelled wherever it is emulated."""
    return "" if emulated_bytes_per_s is None else f", emulated link {emulated_bytes_per_s / 1e9:.3g} GB/s"


def sources_text(sources: Mapping[str, str]) -> str:
    """Where the profile's figures come from: `measured; interpolated: attention`."""
    by_source: dict[str, list[str]] = {}
    for probe, source in sources.items():
        by_source.setdefault(source, []).append(probe.replace("_", " "))
    order = ("measured", "interpolated", "extrapolated", "assumed")
    found = [source for source in order if source in by_source]
    return "; ".join("measured" if s == "measured" else f"{s}: {', '.join(by_source[s])}" for s in found)
