"""`foreload doctor`: this machine on one page that can be pasted: links, memory, CPU experts, and what is wrong."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.output import JsonFlag, Output, facts, table
from foreload.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.profiler.doctor import Examined, Problem
    from foreload.profiler.fits import Fit
    from foreload.profiler.schema import HardwareProfile


def doctor(
    profile: Annotated[
        Path | None, typer.Option("--profile", metavar="FILE", help="Also say what this profile holds.")
    ] = None,
    storage: Annotated[
        Path | None, typer.Option("--storage", metavar="FILE", help="Read this file. Default: a temporary one.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Look at this machine: device, link under load, memory and its limits, CPU experts, and what is wrong.

    Needs no GPU and no model, and takes some seconds.
    """
    from foreload.profiler.doctor import examine, problems
    from foreload.profiler.fits import fits_of
    from foreload.profiler.schema import HardwareProfile

    output = Output(as_json)
    measured = None if profile is None else HardwareProfile.load(profile)
    with output.progress() as progress:
        task = progress.add_task("looking", total=None)
        found = examine(lambda what: progress.update(task, description=what), storage)
    wrong = problems(found, measured)
    values: dict[str, Any] = {
        **{name: value for name, value in asdict(found).items() if name != "measurements"},
        "measurements": [m.model_dump(mode="json") for m in found.measurements],
        "fits": [asdict(fit) for fit in found.fits],
        "problems": [asdict(problem) for problem in wrong],
    }
    if measured is not None:
        values["profile"] = {
            "meta": measured.meta.model_dump(mode="json"),
            "fits": [asdict(fit) for fit in fits_of(measured)],
        }
    output.finish(values, lambda console: _show(console, found, wrong, measured))


def _show(console: Console, found: Examined, wrong: list[Problem], measured: HardwareProfile | None) -> None:
    from foreload.profiler.fits import fits_of

    console.print(facts("machine", _machine(found)))
    console.print(facts("GPU", _gpu(found)))
    rows = [
        (
            m.probe,
            format_bytes(m.at["bytes"]),
            {1: "pinned", 0: "pageable"}.get(m.at.get("pinned", -1), ""),
            f"{m.p50_us:,.1f}",
            f"{m.p95_us:,.1f}",
            f"{m.at['bytes'] / m.p50_us / 1e3:.2f}",
        )
        for m in found.measurements
        if "bytes" in m.at
    ]
    columns = ("what", "size", "memory", "p50 us", "p95 us", "GB/s")
    read = f"not measured: {found.not_read}" if found.not_read else "what was not in memory"
    console.print(table("bytes moved", columns, rows, f"source: measured now; storage: {read}"))
    console.print(
        table(
            "experts on the CPU", ("threads", "ms for 8", "GB/s"), _cpu(found), f"source: measured, {found.cpu_experts}"
        )
    )
    if measured is not None:
        meta = measured.meta
        console.print(
            fit_table(
                f"profile of {meta.device_name}, {meta.date}: model shape {meta.shape_hash}, path {meta.path}",
                fits_of(measured),
                f"source: measured on {meta.machine}, noise {meta.noise_pct:.0f} %",
            )
        )
    if not wrong:
        console.print("nothing is wrong")
    for problem in wrong:
        console.print(f"! {problem.what}: {problem.advice}", markup=False)


def _machine(found: Examined) -> dict[str, str]:
    of = found.system
    shown = {
        "processor": f"{of.cpu}, {of.cores} of {of.cores_all} cores",
        "memory": f"{format_bytes(of.available_bytes)} available of {format_bytes(of.ram_bytes)}",
        "locked": "no limit" if of.memlock_bytes is None else f"up to {format_bytes(of.memlock_bytes)}",
        "NUMA nodes": "; ".join(of.numa_nodes) or "unknown",
        "system": of.kernel + (" (WSL)" if of.wsl else ""),
        "software": ", ".join(f"{name} {version}" for name, version in of.software.items()),
    }
    if of.memory_limit_bytes is not None:
        shown["container"] = f"up to {format_bytes(of.memory_limit_bytes)}"
    return shown


def _gpu(found: Examined) -> dict[str, str]:
    if not found.gpu_name:
        return {"GPU": "none is visible"}
    gpu, pinned = found.gpu, found.pinned_bytes or 0
    tried = "all that was tried" if found.not_pinned_bytes is None else f"not {format_bytes(found.not_pinned_bytes)}"
    shown = {"GPU": found.gpu_name, "decode steps": found.graphs or "as graphs"}
    if gpu is None:
        return {**shown, "link": "unknown: nvidia-smi is not there", "pinned": f"{format_bytes(pinned)}, {tried}"}
    lanes = _of(gpu.link_width, gpu.link_width_max)
    return {
        **shown,
        "driver": f"{gpu.driver}, {gpu.uuid}",
        "memory": f"{_bytes(gpu.free_bytes)} free of {_bytes(gpu.memory_bytes)}",
        "link under load": f"PCIe {_of(gpu.link_gen, gpu.link_gen_max)}, lanes {lanes}",
        "pinned": f"{format_bytes(pinned)}, {tried}",
    }


def _bytes(size: int | None) -> str:
    return "unknown" if size is None else format_bytes(size)


def _of(now: int | None, most: int | None) -> str:
    return "unknown" if now is None else f"{now} of {'unknown' if most is None else most}"


def _cpu(found: Examined) -> list[tuple[str, str, str]]:
    from foreload.backend.models.checkpoint import Checkpoint
    from foreload.profiler.doctor import SHAPE

    size = Checkpoint.open(SHAPE).shape.expert_bytes("bfloat16")
    return [
        (str(m.at["threads"]), f"{m.p50_us / 1e3:.2f}", f"{m.at['experts'] * size / m.p50_us / 1e3:.1f}")
        for m in found.measurements
        if m.probe == "experts_cpu"
    ]


def fit_table(title: str, fitted: list[Fit], note: str) -> Any:
    """Lines through measurements, with how far they are off."""
    rows = [
        (
            fit.what,
            f"{fit.fixed_us:,.1f}",
            f"{fit.bytes_per_s / 1e9:.2f} GB/s" if fit.bytes_per_s else f"{fit.each_us:.4g} us per {fit.unit}",
            f"{fit.median_error_pct:.1f} %",
            f"{fit.worst_error_pct:.1f} %",
        )
        for fit in fitted
    ]
    return table(title, ("line through", "fixed us", "rate", "median error", "worst"), rows, note)
