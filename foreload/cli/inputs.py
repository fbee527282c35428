"""What `simulate` and `tune` read: a profile, a recording, settings and a memory budget that belong together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreload.errors import UsageError
from foreload.units import parse_bytes

if TYPE_CHECKING:
    from foreload.cli.output import Output
    from foreload.profiler.schema import HardwareProfile
    from foreload.settings import Settings
    from foreload.shape import ModelShape
    from foreload.traces.schema import Trace

ProfileIn = Annotated[Path, typer.Option("--profile", metavar="FILE", help="Machine profile (foreload profile).")]
TraceIn = Annotated[Path, typer.Option("--trace", metavar="FILE", help="Recording (foreload record).")]
VramIn = Annotated[str | None, typer.Option("--vram", metavar="SIZE", help="Device memory there is, like 8GiB.")]
ContextIn = Annotated[
    int | None,
    typer.Option(
        "--context", metavar="TOKENS", min=1, help="Positions to keep room for. Default: the longest recorded."
    ),
]


@dataclass(frozen=True)
class Inputs:
    """A profile and a recording of the same model."""

    profile: HardwareProfile
    trace: Trace
    shape: ModelShape

    @property
    def dtype(self) -> str:
        """The weights' type, as profiled."""
        return self.profile.meta.dtype

    def slot_budget(self, vram: str, context: int | None, settings: Settings) -> int:
        """Expert slots that fit in `vram`; BudgetError if not even staging does."""
        from foreload.budget import slot_budget

        tokens = context or int(self.trace.position.max(initial=0)) + 1
        return slot_budget(self.shape, self.dtype, parse_bytes(vram, "--vram"), tokens, settings)

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


def load_inputs(profile: Path, trace: Path, output: Output) -> Inputs:
    """Both files, checked against each other; FileError or MismatchError otherwise."""
    from foreload.profiler.schema import HardwareProfile
    from foreload.traces.io import read_trace

    machine = HardwareProfile.load(profile)
    with output.progress() as progress:
        progress.add_task("reading the recording", total=None)
        recording = read_trace(trace)
    shape = recording.meta.model_shape()
    machine.check_model(shape, machine.meta.dtype)
    return Inputs(machine, recording, shape)
