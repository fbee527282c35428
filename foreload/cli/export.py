"""`foreload export`: settings for the engines people already run, and their commands explained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.inputs import check_recorded
from foreload.cli.output import JsonFlag, Output, facts, table, writable_folder
from foreload.errors import UsageError
from foreload.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.backend.export import Explanation, Exported, Target
    from foreload.shape import ModelShape
    from foreload.traces.histogram import Histogram


def export(
    settings: Annotated[
        Path | None, typer.Argument(metavar="SETTINGS", help="Settings file, JSON or TOML. Not with --check.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="ENGINE", help="foreload, llama.cpp, ik_llama, sglang-kt, vllm, device-map, freetoken."
        ),
    ] = None,
    check: Annotated[
        str | None, typer.Option("--check", metavar="COMMAND", help="Explain this command line instead.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Default: the model of the recording beside the settings."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Recording or histogram: how often experts are used.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", metavar="SIZE", help="Free memory of a GPU, like 16GB; once per GPU. Checks that it fits."
        ),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", metavar="TOKENS", min=1, help="Positions to keep room for.")
    ] = 8192,
    bits: Annotated[
        float, typer.Option("--bits", metavar="N", min=1, max=32, help="Bits per weight of the file that is served.")
    ] = 16.0,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="PATH", help="The weights, as the command names them.")
    ] = None,
    device_prefix: Annotated[
        str, typer.Option("--devices", metavar="NAME", help="Backend of the devices: CUDA, ROCm, Vulkan.")
    ] = "CUDA",
    engine_help: Annotated[
        Path | None,
        typer.Option("--engine-help", metavar="FILE", help="What the installed engine's --help prints, to check by."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", callback=writable_folder, help="Write the export's files here."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write settings as another engine takes them, or explain the flags that someone already uses."""
    from foreload.backend.export import Target, check_help, explain
    from foreload.backend.export import export as make
    from foreload.files import read_bytes
    from foreload.settings import Settings

    output = Output(as_json)
    if (settings is None) == (check is None):
        raise UsageError("give a settings file to export, or --check with a command line: one of them")
    shape, name, histogram = _model(model, trace, settings)
    name = name.removeprefix("shape:")
    target = Target(
        shape=shape,
        settings=Settings() if settings is None else Settings.load(settings),
        weights=weights or (f"{name}.gguf" if to in ("llama.cpp", "ik_llama") else name),
        gpus=tuple(parse_bytes(size, "--gpu") for size in gpu or ()),
        context=context,
        bits=bits,
        counts=None if histogram is None else histogram.counts,
        folder="" if out is None else str(out),
        backend=device_prefix,
    )
    if check is not None:
        found = explain(check, target, to)
        values = explained(found, target)
        output.finish(values, lambda console: _show_explained(console, found, target))
        return
    made = make(to or "foreload", target)
    if engine_help is not None:
        made = check_help(made, read_bytes(engine_help, "help text").decode(errors="replace"), str(engine_help))
    written = _write(out, made)
    values = {**made.as_dict(), "model": name, "written": written, **_contents(made, written)}
    output.finish(values, lambda console: _show(console, made, written))


def _model(model: str | None, trace: Path | None, settings: Path | None) -> tuple[ModelShape, str, Histogram | None]:
    """The shape, the model's name, and how often its experts are used; MismatchError if a recording is of another."""
    from foreload.backend.models.checkpoint import Checkpoint
    from foreload.traces.histogram import read_histogram

    beside = None if settings is None or trace is not None else settings.parent / "trace.parquet"
    recording = trace or (beside if beside is not None and beside.exists() else None)
    if model is None and recording is None:
        raise UsageError("which model? give --model, or --trace with a recording of it")
    if model is None:
        assert recording is not None
        histogram = read_histogram(recording)
        return histogram.meta.model_shape(), histogram.meta.model, histogram
    checkpoint = Checkpoint.open(model)
    if trace is None:
        return checkpoint.shape, checkpoint.name, None
    histogram = read_histogram(trace)
    check_recorded(trace, histogram.meta.model_shape(), checkpoint.shape, f"model {model!r}")
    return checkpoint.shape, checkpoint.name, histogram


def _write(folder: Path | None, made: Exported) -> list[str]:
    """The files of an export, and its command as a script; the paths written."""
    from foreload.files import atomic_path

    if folder is None:
        if made.command and made.files:
            raise UsageError(f"{made.engine}: the command needs {', '.join(made.files)}: give a folder with --out")
        return []
    files = dict(made.files)
    if made.command:
        notes = "".join(f"# {note}\n" for note in (f"checked against: {made.checked}", *made.notes))
        files[f"{made.engine}.sh"] = f"#!/bin/sh\n{notes}exec {made.shell}\n".encode()
    for name, content in files.items():
        with atomic_path(folder / name) as partial:
            partial.write_bytes(content)
    return [str(folder / name) for name in files]


def _contents(made: Exported, written: list[str]) -> dict[str, Any]:
    """The files' text, where nothing was written."""
    return {} if written else {"contents": {name: content.decode() for name, content in made.files.items()}}


def _show(console: Console, made: Exported, written: list[str]) -> None:
    if made.command:
        console.print(made.shell, soft_wrap=True, markup=False)
    elif not written:
        for content in made.files.values():
            console.print(content.decode().rstrip(), soft_wrap=True, markup=False)
    for path in written:
        console.print(f"{path}: written", markup=False)
    notes = {f"{at}.": note for at, note in enumerate(made.notes, 1)}
    console.print(facts(f"\n{made.engine}", {"": f"checked against {made.checked}", **notes}))


def explained(found: Explanation, target: Target) -> dict[str, Any]:
    """An explanation as JSON values; sizes are assumed from the model's shape and the bits per weight."""
    return {
        "engine": found.engine,
        "source": f"assumed: {target.bits:g} bits per weight, by the model's shape",
        "warnings": list(found.warnings),
        "not_read": list(found.not_read),
        "bytes": found.bytes_by_device(),
        "caches_and_buffers": dict(found.extra),
        "tensors": [
            {"name": t.name, "layer": t.layer, "device": t.device, "bytes": t.bytes, "because": t.because}
            for t in found.tensors
        ],
    }


def _show_explained(console: Console, found: Explanation, target: Target) -> None:
    groups: dict[tuple[str, str, str], list[Any]] = {}
    for tensor in found.tensors:
        groups.setdefault((tensor.role, tensor.device, tensor.because), []).append(tensor)
    rows = [
        (
            role,
            device,
            because,
            _layers([t.layer for t in held]),
            str(len(held)),
            format_bytes(sum(t.bytes for t in held)),
        )
        for (role, device, because), held in groups.items()
    ]
    rows += [
        ("keys, values, caches, buffers", device, "", "", "", format_bytes(size))
        for device, size in found.extra.items()
    ]
    note = f"sizes: assumed, {target.bits:g} bits per weight, by the model's shape"
    columns = ("tensors", "device", "because of", "layers", "number", "bytes")
    console.print(table(f"What this {found.engine} command does", columns, rows, note))
    console.print(facts("Per device", {name: format_bytes(size) for name, size in found.bytes_by_device().items()}))
    if found.not_read:
        flags = ", ".join(found.not_read)
        console.print(f"not understood, and taken as if not there: {flags}", markup=False)
    for warning in found.warnings:
        console.print(f"warning: {warning}", markup=False)


def _layers(numbers: list[int]) -> str:
    """Layer numbers as ranges: 0 to 2, 5."""
    chosen = sorted({number for number in numbers if number >= 0})
    runs: list[list[int]] = []
    for number in chosen:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in runs)
