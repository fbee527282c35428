"""`foreload tune`: the best settings for a machine, a recording and a memory budget."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.inputs import (
    ContextIn,
    CpuScaleIn,
    Inputs,
    LinkIn,
    MachineIn,
    ProfileIn,
    TraceIn,
    VramIn,
    WarmIn,
    load_inputs,
    what_if,
)
from foreload.cli.output import JsonFlag, Output, facts, table
from foreload.cli.presets import PresetFlag
from foreload.cli.simulate import link_text
from foreload.errors import FileError, UsageError
from foreload.quality import QualityReport
from foreload.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.settings import Settings
    from foreload.simulator.tune import TuneResult


def tune(
    profile: ProfileIn,
    trace: TraceIn,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Settings file to write, .json or .toml.")],
    vram: VramIn = None,
    slots: Annotated[
        int | None,
        typer.Option("--slots", metavar="N", min=1, help="Instead of --vram: expert slots, staging included."),
    ] = None,
    context: ContextIn = None,
    link: LinkIn = None,
    cpu_scale: CpuScaleIn = None,
    machine: MachineIn = None,
    settings: Annotated[
        Path | None, typer.Option("--settings", metavar="FILE", help="The default to beat. Default: the defaults.")
    ] = None,
    preset: PresetFlag = None,
    warm: WarmIn = None,
    quality: Annotated[
        Path | None, typer.Option("--quality", metavar="FILE", help="Measured losses, from foreload quality --out.")
    ] = None,
    max_quality_loss: Annotated[
        float | None,
        typer.Option("--max-quality-loss", metavar="PERCENT", help="With --quality: rise in perplexity to accept."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", metavar="DIR", help="Also write a run folder for `foreload report`.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Find the best settings for a machine and a recording.

    Integer programs propose, the simulator decides; the default stays unless something clearly beats it. Settings that
    change the text never compete without --max-quality-loss.
    """
    output = Output(as_json)
    inputs = what_if(load_inputs(profile, trace, output), link, cpu_scale, machine)
    vram = inputs.vram if vram is None and slots is None else vram
    if (vram is None) == (slots is None):
        raise UsageError("give the memory budget with --vram or --slots, one of them")
    if run is not None and inputs.assumed and profile.resolve() == (run / "profile.json").resolve():
        raise UsageError(f"--run {run}: holds the measured profile, which an assumed one would replace: give another")
    if (quality is None) != (max_quality_loss is None):
        raise UsageError("--quality and --max-quality-loss go together: give both or none")
    report = None if quality is None else QualityReport.load(quality)
    base = _base(inputs, settings, preset, vram, slots, context)
    result = _tune(inputs, base, vram, slots, context, output, report, max_quality_loss, warm)
    result.best.settings.save(out)
    if run is not None:
        write_run(run, result, inputs, profile, trace)
    meta = inputs.profile.meta
    values = {
        "file": str(out),
        "source": "simulated",
        "model": inputs.trace.meta.model,
        "machine": meta.machine,
        "device": meta.device,
        "emulated_link_bytes_per_s": meta.emulated_link_bytes_per_s,
        **result.as_dict(),
    }
    output.finish(values, lambda console: _show(console, values, result))


def _base(
    inputs: Inputs, path: Path | None, preset: str | None, vram: str | None, slots: int | None, context: int | None
) -> Settings:
    """The default to beat."""
    from foreload.settings import Settings

    if preset is None:
        return Settings() if path is None else Settings.load(path)
    if path is not None:
        raise UsageError("--settings and --preset exclude each other: give one of them")
    return inputs.preset(preset, inputs.slot_budget(vram, context, Settings()) if vram is not None else slots)


def _tune(
    inputs: Inputs,
    base: Settings,
    vram: str | None,
    slots: int | None,
    context: int | None,
    output: Output,
    quality: QualityReport | None,
    max_quality_loss_pct: float | None,
    warm: Path | None,
) -> TuneResult:
    from foreload.simulator.tune import tune as search

    budget = inputs.slot_budget(vram, context, base) if vram is not None else slots
    drafted = inputs.profile.meta.draft_model if inputs.trace.meta.sampling.get("draft") == "model" else None
    with output.progress() as progress:
        task = progress.add_task("tuning", total=None)
        return search(
            inputs.trace,
            inputs.profile,
            inputs.shape,
            inputs.dtype,
            slots=budget,
            base=base,
            quality=quality,
            max_quality_loss_pct=max_quality_loss_pct,
            warm=inputs.warm_counts(warm),
            draft_bytes=None if drafted is None else inputs.draft_bytes(drafted, context),
            progress=lambda done, total, what: progress.update(task, description=what, completed=done, total=total),
        )


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


def _show(console: Console, values: dict[str, Any], result: TuneResult) -> None:
    verdict = "nothing clearly beats the default: it stays"
    if not result.kept_default:
        verdict = f"{result.speedup:.2f} times as fast as the default, simulated"
    console.print(
        facts(
            f"{values['model']} on {values['device']}: {verdict}",
            {
                "machine": values["machine"] + link_text(values["emulated_link_bytes_per_s"]),
                "budget": f"{result.slots} expert slots, staging included",
                "best": result.best.settings.describe(),
                **_text(result),
                "written to": values["file"],
            },
        )
    )
    bound, resident = values["bounds"]["floor_ms"], values["bounds"]["resident_ms"]
    held = "requests held out" if result.held_out else "the requests that chose"
    note = f"source: simulated, on {held}; bound {bound:.3f} ms, every expert resident {resident:.3f} ms"
    rows = [_row("default", values["default"]), _row("best", values["best"])]
    console.print(table("", ("", "ms per token", "hits", "copied per token", "stall, ms"), rows, note))
    families = [(c.family, f"{c.tpot_ns / 1e6:.3f}") for c in result.families()]
    console.print(table("Best of each family", ("family", "ms per token"), families, "source: simulated, to choose by"))


def _text(result: TuneResult) -> dict[str, str]:
    """What the best settings do to the text, if anything."""
    if not result.best.settings.speculate_layers:
        return {}
    loss = f"changes: perplexity {result.quality_loss_pct:+.2f} % (measured)"
    return {"text": f"{loss}; simulated on routing that may drift (assumed): record again under these settings"}


def _row(name: str, shown: dict[str, Any]) -> tuple[str, ...]:
    predicted = shown["predicted"]
    return (
        name,
        f"{predicted['tpot_ms']:.3f}",
        f"{predicted['hit_rate']:.1%}",
        format_bytes(predicted["bytes_per_token"]),
        f"{sum(predicted['stall_per_token_ms'].values()):.3f}",
    )
