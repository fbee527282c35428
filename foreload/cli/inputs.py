"""What `simulate` and `tune` read: a profile, a recording, settings and a memory budget that belong together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreload.errors import MismatchError, UsageError
from foreload.units import parse_bytes, parse_rate

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from foreload.cli.output import Output
    from foreload.profiler.schema import HardwareProfile
    from foreload.settings import Settings
    from foreload.shape import ModelShape
    from foreload.traces.schema import Trace

ProfileIn = Annotated[Path, typer.Option("--profile", metavar="FILE", help="Machine profile (foreload profile).")]
TraceIn = Annotated[Path, typer.Option("--trace", metavar="FILE", help="Recording (foreload record).")]
WarmIn = Annotated[
    Path | None,
    typer.Option("--warm-start", metavar="TRACE", help="Load what this recording uses most before the first request."),
]
VramIn = Annotated[str | None, typer.Option("--vram", metavar="SIZE", help="Device memory there is, like 8GiB.")]
ContextIn = Annotated[
    int | None,
    typer.Option(
        "--context", metavar="TOKENS", min=1, help="Positions to keep room for. Default: the longest recorded."
    ),
]
LinkIn = Annotated[
    str | None, typer.Option("--link", metavar="RATE", help="What if: copy experts at this rate, like 25GB/s.")
]
CpuScaleIn = Annotated[
    float | None, typer.Option("--cpu-scale", metavar="FACTOR", help="What if: CPU experts this much faster.")
]
PinnedIn = Annotated[
    str | None,
    typer.Option("--pinned", metavar="SIZE", help="Host memory that may be pinned: experts that are more are not."),
]
MachineIn = Annotated[
    str | None,
    typer.Option("--machine", metavar="NAME", help="What if: pcie3x4 to pcie5x16, rtx-3090, 4090, 5090, a6000."),
]


@dataclass(frozen=True)
class Inputs:
    """A profile and a recording of the same model; `vram`: device memory of the machine that was asked about."""

    profile: HardwareProfile
    trace: Trace
    shape: ModelShape
    vram: str | None = None
    assumed: bool = False  # whether the profile is one that no machine gave

    @property
    def dtype(self) -> str:
        """The weights' type, as profiled."""
        return self.profile.meta.dtype

    def say_cut(self, settings: Settings, output: Output) -> None:
        """Say so where settings draft fewer tokens than the recording's verify windows hold."""
        from foreload.simulator.workload import recorded_draft

        drafted, recorded = settings.draft.gamma, recorded_draft(self.trace)
        if recorded is not None and 0 < drafted < recorded[1]:
            output.note(f"verify windows of {drafted} drafts are cut from the recorded ones of {recorded[1]}")

    def warm_counts(self, path: Path | None) -> NDArray[np.int64] | None:
        """Uses of each expert in the recording a warm start goes by; MismatchError if it is of another model."""
        from foreload.traces.histogram import warm_counts

        return None if path is None else warm_counts(path, self.shape)

    def preset(self, name: str, slots: int | None, cache_ratio: float | None = None) -> Settings:
        """The settings of a preset, for so many slots or that cache ratio."""
        from foreload.presets import preset_settings
        from foreload.simulator.costs import CostModel

        threads = CostModel(self.profile, self.shape).cpu_threads
        return preset_settings(name, self.shape, threads[-1] if threads else 1, slots, cache_ratio)

    def slot_budget(self, vram: str, context: int | None, settings: Settings) -> int:
        """Expert slots that fit in `vram`; BudgetError if not even staging does."""
        from foreload.budget import slot_budget

        tokens, name = self.context_tokens(context), settings.draft.model_name
        draft = 0 if name is None else self.draft_bytes(name, context)
        return slot_budget(self.shape, self.dtype, parse_bytes(vram, "--vram"), tokens, settings, draft)

    def context_tokens(self, context: int | None) -> int:
        """Positions to keep room for."""
        return context or int(self.trace.position.max(initial=0)) + 1

    def draft_bytes(self, name: str, context: int | None) -> int:
        """Device bytes of a draft model, by its configuration."""
        from foreload.backend.models.checkpoint import Checkpoint
        from foreload.backend.speculate.model import draft_bytes

        return draft_bytes(Checkpoint.open_dense(name), self.dtype, self.context_tokens(context))

    def capacity(self, settings: Settings, vram: str | None, context: int | None) -> tuple[int, ...]:
        """Persistent slots per layer under `settings`; BudgetError if they do not fit in `vram`."""
        from foreload.formats import layer_formats, slot_bytes
        from foreload.settings import check_slots, slot_counts

        if vram is not None:
            budget = self.slot_budget(vram, context, settings)
            size = slot_bytes(layer_formats(settings.expert_format, self.shape, self.dtype), self.shape)
            return check_slots(settings, self.shape, budget, size)
        if settings.slots_per_layer is None and settings.cache_ratio is None:
            raise UsageError("how many experts may stay on the device? give --vram, --cache-ratio or settings that say")
        return slot_counts(settings, self.shape)


def what_if(inputs: Inputs, link: str | None, cpu_scale: float | None, machine: str | None) -> Inputs:
    """The same on another machine, as far as flags ask for one; the profile's `meta.machine` says what is assumed."""
    if (link, cpu_scale, machine) == (None, None, None):
        return inputs
    from foreload.simulator.machines import assume

    assumed = assume(inputs.profile, None if link is None else parse_rate(link, "--link"), cpu_scale, machine)
    vram = None if assumed.vram_bytes is None else f"{assumed.vram_bytes}B"
    return replace(inputs, profile=assumed.profile, vram=vram, assumed=True)


def with_pinned(inputs: Inputs, size: str | None) -> Inputs:
    """The same where so much host memory may be pinned; FileError if copies of other memory were not measured."""
    if size is None:
        return inputs
    inputs.profile.points("copy", pinned=0)
    update = {"pinned_bytes": parse_bytes(size, "--pinned")}
    meta = inputs.profile.meta.model_copy(update=update)
    return replace(inputs, profile=inputs.profile.model_copy(update={"meta": meta}), assumed=True)


def check_recorded(path: Path, recorded: ModelShape, wanted: ModelShape, whose: str) -> None:
    """MismatchError, naming the recording and both shapes, if `path` is of another model than `whose`."""
    if recorded.hash != wanted.hash:
        raise MismatchError(f"{path}: recorded from model shape {recorded.named}, {whose} is {wanted.named}")


def _measured(machine: HardwareProfile) -> str:
    """The shape of a profile as errors name it; its hash alone if the fields are of another version."""
    from foreload.shape import ModelShape

    try:
        shape = ModelShape.from_fields(machine.meta.shape)
    except ValueError:
        return machine.meta.shape_hash
    return shape.named if shape.hash == machine.meta.shape_hash else machine.meta.shape_hash


def load_inputs(profile: Path, trace: Path, output: Output, model: str | None = None) -> Inputs:
    """Both files, checked against `model`, if one is given, and each other; FileError or MismatchError otherwise."""
    from foreload.profiler.schema import HardwareProfile
    from foreload.traces.io import read_trace

    machine = HardwareProfile.load(profile)
    with output.progress() as progress:
        progress.add_task("reading the recording", total=None)
        recording = read_trace(trace)
    shape = recording.meta.model_shape()
    if model is not None:
        from foreload.backend.models.checkpoint import Checkpoint

        check_recorded(trace, shape, Checkpoint.open(model).shape, f"model {model!r}")
    if machine.meta.shape_hash != shape.hash:
        raise MismatchError(
            f"{profile}: measured for model shape {_measured(machine)}, but {trace} is recorded from {shape.named}"
        )
    return Inputs(machine, recording, shape)
