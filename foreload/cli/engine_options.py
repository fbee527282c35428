"""Flags that several commands share: which model on which device, and the engine they describe."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from foreload.errors import MismatchError, UsageError
from foreload.settings import DraftKind, Settings, staging_slots
from foreload.shape import ModelShape
from foreload.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    from foreload.backend.engine import CostsFor, Engine, EngineOptions
    from foreload.cli.output import Output

DeviceName = Literal["auto", "cpu", "cuda"]
SettingsFor = Callable[[ModelShape], Settings]
DEFAULT_GAMMA = 4

ModelArg = Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face folder, `mini`, or `shape:NAME`.")]
DeviceFlag = Annotated[DeviceName, typer.Option("--device", help="auto: cuda if a GPU is visible.")]
DtypeFlag = Annotated[
    Literal["float32", "bfloat16"] | None, typer.Option("--dtype", help="Default: float32 on cpu, bfloat16 on cuda.")
]
VramFlag = Annotated[
    str | None, typer.Option("--vram", metavar="SIZE", help="Device memory to use, like 8GiB. Default: what is free.")
]
LinkFlag = Annotated[
    str | None,
    typer.Option("--link", metavar="RATE", help="Emulate a link of this rate, like 100MB/s, at most the real one's."),
]
ContextFlag = Annotated[
    int, typer.Option("--context", metavar="TOKENS", min=1, help="Longest prompt and answer together.")
]
EagerFlag = Annotated[
    bool, typer.Option("--eager", help="On cuda: launch every operator of a decode step, instead of CUDA graphs.")
]
ProfileFlag = Annotated[
    Path | None, typer.Option("--profile", metavar="FILE", help="Machine profile; miss_action `split` decides by it.")
]
AssumeProfileFlag = Annotated[
    bool, typer.Option("--assume-profile", help="Decide by --profile even if it is of another machine or version.")
]
CalibrationFlag = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="DIR", help="From foreload calibrate. Default: MODEL/calibration, if there."),
]
ShadowFlag = Annotated[
    bool, typer.Option("--shadow", help="Also run the gates of speculated layers, to count true recall.")
]
SettingsFlag = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="JSON or TOML. Default: the largest uniform cache.")
]
WarmFlag = Annotated[
    Path | None,
    typer.Option("--warm-start", metavar="TRACE", help="Load what this recording uses most before the first prompt."),
]
DraftFlag = Annotated[
    DraftKind | None, typer.Option("--draft", help="What proposes tokens to verify; instead of the settings'.")
]
GammaFlag = Annotated[
    int | None, typer.Option("--gamma", metavar="N", min=1, help="Most tokens to propose per step. Default: 4.")
]
DraftModelFlag = Annotated[
    str | None,
    typer.Option("--draft-model", metavar="DIR", help="Dense model to draft with. Default for --draft model: `draft`."),
]


def engine_options(
    device: DeviceName,
    dtype: str | None,
    vram: str | None,
    link: str | None,
    context: int,
    calibration: Path | None = None,
    shadow: bool = False,
    eager: bool = False,
) -> EngineOptions:
    """The options in force; UsageError for a flag that is wrong."""
    from foreload.backend.engine import EngineOptions

    return EngineOptions(
        device=resolve_device(device),
        dtype=dtype,
        context_tokens=context,
        vram_bytes=None if vram is None else parse_bytes(vram, "--vram"),
        link_bytes_per_s=None if link is None else parse_rate(link, "--link"),
        calibration=calibration,
        shadow=shadow,
        eager=eager,
    )


def resolve_device(device: DeviceName) -> Literal["cpu", "cuda"]:
    """`auto` as the device it means here."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_settings(path: Path | None) -> Settings:
    """The settings of a file, or the default."""
    return Settings() if path is None else Settings.load(path)


def chosen_settings(
    path: Path | None,
    preset: str | None,
    options: EngineOptions,
    kind: DraftKind | None,
    gamma: int | None,
    draft_model: str | None,
) -> SettingsFor:
    """What flags ask for, once the model's shape is known: a file's settings or a preset, and a draft."""
    if preset is None:
        fixed = with_draft(load_settings(path), kind, gamma, draft_model)
        return lambda shape: fixed
    if path is not None:
        raise UsageError("--settings and --preset exclude each other: give one of them")

    def fitted(shape: ModelShape) -> Settings:
        from foreload.presets import preset_settings

        threads = max(1, len(os.sched_getaffinity(0)) - 1)
        unplaced = preset_settings(preset, shape, threads, cache_ratio=0.0)
        drafted = with_draft(unplaced, kind, gamma, draft_model)
        slots = _preset_slots(shape, options, drafted) - staging_slots(drafted, shape) + staging_slots(unplaced, shape)
        return with_draft(preset_settings(preset, shape, threads, slots), kind, gamma, draft_model)

    return fitted


def _preset_slots(shape: ModelShape, options: EngineOptions, settings: Settings) -> int:
    """Expert slots that fit on the device beside the draft model of `settings`."""
    from foreload.backend.models.checkpoint import Checkpoint
    from foreload.backend.options import available_bytes, working_bytes
    from foreload.backend.speculate.model import draft_bytes
    from foreload.budget import slot_budget

    name, dtype, context = settings.draft.model_name, options.resolved_dtype, options.context_tokens
    beside = 0 if name is None else draft_bytes(Checkpoint.open_dense(name), dtype, context)
    beside += working_bytes(options, shape, settings)
    return slot_budget(shape, dtype, available_bytes(options), context, settings, beside)


def with_draft(settings: Settings, kind: DraftKind | None, gamma: int | None, model: str | None) -> Settings:
    """`settings` with the draft that flags ask for; UsageError for a flag that goes with nothing."""
    draft = settings.draft
    chosen = kind or draft.kind
    if chosen == "none" and gamma is not None:
        raise UsageError(f"--gamma {gamma} goes with a draft: give --draft ngram or --draft model")
    window = 0 if chosen == "none" else gamma or draft.gamma or DEFAULT_GAMMA
    return settings.changed(draft={"kind": chosen, "gamma": window, "model": model or draft.model})


def _costs_by(path: Path, shape: ModelShape, options: EngineOptions, assumed: bool, output: Output) -> CostsFor:
    """What the brain decides by, from a profile of this machine or, if `assumed`, of whichever it is."""
    from foreload.profiler.schema import HardwareProfile
    from foreload.simulator.contended import split_costs

    measured = HardwareProfile.load(path)
    measured.check_model(shape, options.resolved_dtype)
    try:
        measured.check_here(options.device, gpu_name(options.device))
    except MismatchError as error:
        if not assumed:
            raise MismatchError(f"{error} (--assume-profile decides by it all the same)") from error
        output.note(f"{error}: what is decided by it is assumed")
    return lambda wanted: split_costs(measured, shape, wanted)


def gpu_name(device: str) -> str | None:
    """The name of the GPU, if `device` is one."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else None


def open_engine(
    model: str,
    options: EngineOptions,
    settings: Settings | SettingsFor,
    profile: Path | None,
    output: Output,
    warm: Path | None = None,
    assumed: bool = False,
) -> Engine:
    """An engine under `settings`, loaded with a progress display; `warm`: a recording it starts from.

    `assumed`: a profile of another machine or version will do. Raises MismatchError for one otherwise.
    """
    from foreload.backend.engine import Engine
    from foreload.backend.models.checkpoint import Checkpoint
    from foreload.traces.histogram import warm_counts

    checkpoint = Checkpoint.open(model)
    chosen = settings if isinstance(settings, Settings) else settings(checkpoint.shape)
    if options.shadow and not chosen.speculate_layers:
        raise UsageError("--shadow measures speculated layers: the settings speculate none")
    if assumed and profile is None:
        raise UsageError("--assume-profile goes with --profile")
    costs = None if profile is None else _costs_by(profile, checkpoint.shape, options, assumed, output)
    counts = None if warm is None else warm_counts(warm, checkpoint.shape)
    with output.progress() as progress:
        task = progress.add_task("loading experts", total=None)
        return Engine(
            checkpoint,
            options,
            chosen,
            costs,
            lambda done, total: progress.update(task, completed=done, total=total),
            counts,
        )
