"""`foreload profile`: measure this machine for one model's shapes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foreload.cli.doctor import fit_table
from foreload.cli.engine_options import (
    CalibrationFlag,
    ContextFlag,
    DeviceFlag,
    DraftModelFlag,
    DtypeFlag,
    EagerFlag,
    LinkFlag,
    ModelArg,
    VramFlag,
    engine_options,
    open_engine,
)
from foreload.cli.output import JsonFlag, Output, table, writable

if TYPE_CHECKING:
    from foreload.profiler.fits import Fit


def profile(
    model: ModelArg,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="JSON file to write.")],
    mode: Annotated[Literal["quick", "full"], typer.Option("--mode", help="full: more points and repeats.")] = "quick",
    device: DeviceFlag = "auto",
    dtype: DtypeFlag = None,
    vram: VramFlag = None,
    link: LinkFlag = None,
    draft_model: DraftModelFlag = None,
    context: ContextFlag = 2048,
    calibration: CalibrationFlag = None,
    eager: EagerFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Measure this machine for one model's shapes.

    Copies, experts on GPU and CPU, attention and planning, alone and together.
    """
    from foreload.backend.models.checkpoint import Checkpoint
    from foreload.profiler.fits import fits_of
    from foreload.profiler.run import bench_settings
    from foreload.profiler.run import profile as measure

    output = Output(as_json)
    options = engine_options(device, dtype, vram, link, context, calibration, eager=eager)
    settings = bench_settings(Checkpoint.open(model).shape, draft_model)
    with open_engine(model, options, settings, None, output) as engine, output.progress() as progress:
        task = progress.add_task("profiling", total=None)
        found = measure(
            engine,
            mode,
            lambda name, done, total: progress.update(task, description=name, completed=done, total=total),
        )
    found.save(out)
    fitted = fits_of(found)
    values: dict[str, Any] = {
        "file": str(out),
        **found.model_dump(mode="json"),
        "fits": [asdict(fit) for fit in fitted],
    }
    output.finish(values, lambda console: _show(console, values, fitted))


def _show(console: Any, values: dict[str, Any], fitted: list[Fit]) -> None:
    from foreload.profiler.schema import coordinate

    meta = values["meta"]
    emulated = meta["emulated_link_bytes_per_s"]
    link = f", emulated link {emulated / 1e6:.0f} MB/s" if emulated else ""
    rows = [
        (
            m["probe"],
            ", ".join(f"{name} {coordinate(name, value)}" for name, value in m["at"].items()),
            f"{m['p50_us']:.1f}",
            f"{m['p95_us']:.1f}",
            f"{m['gpu_us']:.1f}" if meta["device"] == "cuda" else "-",
            str(m["repeats"]),
        )
        for m in values["measurements"]
    ]
    note = f"source: measured on {meta['device_name']}{link}, {meta['dtype']}, noise {meta['noise_pct']:.0f} %"
    note += f"; CPU experts: {meta['cpu_experts']}"
    note += f"; decode steps: {meta['path']}"
    columns = ("probe", "at", "p50 us", "p95 us", "gpu us", "repeats")
    console.print(table(f"{values['file']}: model shape {meta['shape_hash']}", columns, rows, note))
    console.print(fit_table("at a glance", fitted, "least squares; predictions look measurements up instead"))
