"""`foreload tune`: the best settings for a machine, recordings and a memory budget."""

from __future__ import annotations

import shutil
from dataclasses import replace
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
    VramIn,
    WarmIn,
    check_recorded,
    load_inputs,
    what_if,
    with_pinned,
)
from foreload.cli.output import JsonFlag, Output, writable, writable_folder
from foreload.cli.presets import PresetFlag
from foreload.cli.tune_show import show_forecast, show_result
from foreload.errors import FileError, UsageError
from foreload.machine import machine_name
from foreload.quality import QualityReport
from foreload.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foreload.settings import Settings
    from foreload.simulator.tune import TuneOptions, TuneResult
    from foreload.traces.schema import Trace


def tune(
    profile: ProfileIn,
    trace: Annotated[
        list[Path], typer.Option("--trace", metavar="FILE", help="Recording (foreload record); may be repeated.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", callback=writable, help="Settings file to write, .json or .toml."),
    ] = None,
    vram: VramIn = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", metavar="N", min=1, help="Instead of --vram: expert slots, staging included."),
    ] = None,
    ram: Annotated[
        str | None, typer.Option("--ram", metavar="SIZE", help="Host memory for experts: larger formats stay out.")
    ] = None,
    link_time: Annotated[
        float | None,
        typer.Option("--link-time", metavar="MS", help="Time per token that copies may keep the link busy."),
    ] = None,
    context: ContextIn = None,
    link: LinkIn = None,
    cpu_scale: CpuScaleIn = None,
    machine: MachineIn = None,
    pinned: PinnedIn = None,
    settings: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="The default to beat. Default: the defaults.")
    ] = None,
    preset: PresetFlag = None,
    assume_profile: Annotated[
        bool, typer.Option("--assume-profile", help="Take a profile that another version measured.")
    ] = False,
    warm: WarmIn = None,
    robust: Annotated[
        Literal["mean", "worst"],
        typer.Option("--robust", help="Several recordings: their mean over all tokens, or the slowest one."),
    ] = "mean",
    quality: Annotated[
        Path | None, typer.Option("--quality", metavar="FILE", help="Measured losses, from foreload quality --out.")
    ] = None,
    format_loss: Annotated[
        list[str] | None,
        typer.Option("--format-loss", metavar="FORMAT=PERCENT", help="What an expert format loses, as given."),
    ] = None,
    max_quality_loss: Annotated[
        float | None,
        typer.Option("--max-quality-loss", metavar="PERCENT", help="With either: rise in perplexity to accept."),
    ] = None,
    repack: Annotated[
        bool,
        typer.Option(
            "--repack/--no-repack",
            help="Experts may be held in fewer bytes that lose nothing (bf12); a running engine must load them anew.",
        ),
    ] = True,
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="Draw which requests plan, choose and report. Default: in their order."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", min=1, help="Processes of this machine.")] = 1,
    backend: Annotated[
        Literal["local", "dask"], typer.Option("--backend", help="Who simulates: this machine, or a Dask cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option("--address", metavar="URL", help="With --backend dask: tcp://HOST:PORT.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="FILE", callback=writable, help="Keep what is finished here, and go on from it."
        ),
    ] = None,
    study: Annotated[
        bool, typer.Option("--study/--no-study", help="Also: single changes, more memory, a faster link or CPU.")
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be simulated and how long.")] = False,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="DIR", callback=writable_folder, help="Also write a run folder for `foreload report`."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the best settings for a machine and recordings.

    Integer programs propose, the simulator decides; the default stays unless something clearly beats it. Settings that
    change the text never compete without --max-quality-loss.
    """
    output = Output(as_json)
    if out is None and not dry_run:
        raise UsageError("Missing option '--out': the settings file to write, or --dry-run")
    loaded = load_inputs(profile, trace[0], output)
    if not assume_profile:
        loaded.profile.check_version()
    inputs = with_pinned(what_if(loaded, link, cpu_scale, machine), pinned)
    traces = [inputs.trace, *_more_traces(inputs, trace[1:])]
    longest = context or max(int(one.position.max(initial=0)) for one in traces) + 1
    vram = inputs.vram if vram is None and slots is None else vram
    if (vram is None) == (slots is None):
        raise UsageError("give the memory budget with --vram or --slots, one of them")
    _check_run(run, inputs, profile, trace)
    losses = _losses(format_loss)
    if (quality is None and not losses) != (max_quality_loss is None):
        raise UsageError("--quality (or --format-loss) and --max-quality-loss go together: give both or none")
    base = _base(inputs, settings, preset, vram, slots, longest)
    asked: TuneOptions = {
        "vram_bytes": None if vram is None else parse_bytes(vram, "--vram"),
        "context_tokens": longest, "slots": slots, "base": base,
        "ram_bytes": None if ram is None else parse_bytes(ram, "--ram"),
        "link_ns": _link_ns(link_time),
        "quality": None if quality is None else QualityReport.load(quality),
        "format_loss_pct": losses, "max_quality_loss_pct": max_quality_loss, "repack": repack,
        "warm": inputs.warm_counts(warm), "draft_bytes": _draft_bytes(inputs, base, longest),
        "robust": robust, "seed": seed, "jobs": jobs, "backend": backend, "address": address, "resume": resume,
    }  # fmt: skip
    if dry_run:
        _forecast(inputs, traces, asked, output)
        return
    assert out is not None
    result = _tune(inputs, traces, asked, study, output)
    result.best.settings.save(out)
    inputs.say_cut(result.best.settings, output)
    if vram is not None:
        fits = f"{vram} holds {longest} positions beside these slots"
        output.note(f"{fits}: run with --context {longest}, or tune with yours")
    if run is not None:
        write_run(run, result, inputs, profile, trace[0])
    values = {"file": str(out), **_provenance(inputs), **result.as_dict()}
    output.finish(values, lambda console: show_result(console, values, result))


def _link_ns(milliseconds: float | None) -> int | None:
    """Of --link-time."""
    if milliseconds is not None and not 0 <= milliseconds < float("inf"):
        raise UsageError(f"--link-time {milliseconds:g}: milliseconds from 0 on are needed")
    return None if milliseconds is None else round(milliseconds * 1e6)


def _provenance(inputs: Inputs) -> dict[str, Any]:
    meta = inputs.profile.meta
    return {
        "source": "simulated",
        "model": inputs.trace.meta.model,
        "machine": meta.machine,
        "this_machine": meta.machine == machine_name(),
        "device": meta.device,
        "emulated_link_bytes_per_s": meta.emulated_link_bytes_per_s,
    }


def _more_traces(inputs: Inputs, paths: Sequence[Path]) -> list[Trace]:
    """Further recordings of the same model shape; MismatchError names both shapes."""
    from foreload.traces.io import read_trace

    found = [read_trace(path) for path in paths]
    for path, trace in zip(paths, found, strict=True):
        check_recorded(path, trace.meta.model_shape(), inputs.shape, "the first recording's")
    return found


def _losses(given: list[str] | None) -> dict[str, float]:
    """Of --format-loss, by format."""
    from typing import get_args

    from foreload.formats import ExpertFormat

    found: dict[str, float] = {}
    for text in given or ():
        name, _, value = text.partition("=")
        known = get_args(ExpertFormat)
        try:
            if name not in known:
                raise ValueError
            found[name] = float(value)
        except ValueError as error:
            raise UsageError(
                f"--format-loss {text!r}: a format ({', '.join(known)}) and per cent, like fp8=0.4"
            ) from error
    return found


def _check_run(run: Path | None, inputs: Inputs, profile: Path, traces: Sequence[Path]) -> None:
    if run is None:
        return
    if len(traces) > 1:
        raise UsageError(f"--run {run}: a run folder holds one recording, {len(traces)} were given")
    if inputs.assumed and profile.resolve() == (run / "profile.json").resolve():
        raise UsageError(f"--run {run}: holds the measured profile, which an assumed one would replace: give another")


def _base(
    inputs: Inputs, path: Path | None, preset: str | None, vram: str | None, slots: int | None, context: int
) -> Settings:
    """The default to beat."""
    from foreload.settings import Settings

    if preset is None:
        return Settings() if path is None else Settings.load(path)
    if path is not None:
        raise UsageError("--settings and --preset exclude each other: give one of them")
    return inputs.preset(preset, inputs.slot_budget(vram, context, Settings()) if vram is not None else slots)


def _draft_bytes(inputs: Inputs, base: Settings, context: int) -> int | None:
    """Device bytes of the draft model that is on the device anyway, or else of the one that drafted the recording."""
    drafted = inputs.profile.meta.draft_model if inputs.trace.meta.sampling.get("draft") == "model" else None
    name = base.draft.model_name or drafted
    return None if name is None else inputs.draft_bytes(name, context)


def _tune(inputs: Inputs, traces: Sequence[Trace], asked: TuneOptions, study: bool, output: Output) -> TuneResult:
    from foreload.simulator.tune import prepare

    with output.progress() as progress:
        task = progress.add_task("tuning", total=None)

        def told(done: int, total: int, what: str) -> None:
            progress.update(task, description=what, completed=done, total=total)

        shown: TuneOptions = {**asked, "progress": told}
        with prepare(traces, inputs.profile, inputs.shape, inputs.dtype, **shown) as tuning:
            result = tuning.run(study)
            if tuning.pool.reused:
                output.note(f"{asked['resume']}: {tuning.pool.reused} results of an earlier run were used")
            return result


def _forecast(inputs: Inputs, traces: Sequence[Trace], asked: TuneOptions, output: Output) -> None:
    from foreload.simulator.tune import prepare
    from foreload.simulator.tuner.forecast import forecast

    workers = {"resume": None, "jobs": 1, "backend": "local", "address": None}
    alone: TuneOptions = {**asked, **workers}  # type: ignore[typeddict-item]
    with prepare(traces, inputs.profile, inputs.shape, inputs.dtype, **alone) as tuning:
        found = replace(forecast(tuning), jobs=asked["jobs"])
    values = {**_provenance(inputs), **found.as_dict()}
    output.finish(values, lambda console: show_forecast(console, values, found))


def write_run(folder: Path, result: TuneResult, inputs: Inputs, profile: Path, trace: Path) -> None:
    """A run folder (see `foreload.dashboard.result`) without measurements; FileError if it cannot be written."""
    from foreload.dashboard.collect import run_meta, run_result
    from foreload.files import write_text

    collected = run_result(result, run_meta(inputs.profile, inputs.trace))
    write_text(folder / "result.json", collected.model_dump_json(indent=1) + "\n")
    result.best.settings.save(folder / "settings.json")
    if inputs.assumed:
        inputs.profile.save(folder / "profile.json")
    else:
        _copy(profile, folder / "profile.json")
    if trace.is_dir():
        raise FileError(f"{trace}: an unfinished recording has no place in a run: foreload trace recover")
    _copy(trace, folder / "trace.parquet")


def _copy(source: Path, target: Path) -> None:
    from foreload.files import atomic_path

    if not (target.exists() and target.samefile(source)):
        with atomic_path(target) as partial:
            shutil.copyfile(source, partial)
