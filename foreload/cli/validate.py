"""`foreload validate`: a grid of settings, simulated from the profile and measured on the live engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.engine_options import (
    DeviceFlag,
    ModelArg,
    VramFlag,
    WarmFlag,
    engine_options,
    open_engine,
)
from foreload.cli.inputs import Inputs, ProfileIn, TraceIn, load_inputs
from foreload.cli.output import JsonFlag, Output, facts, table, writable
from foreload.cli.simulate import link_text
from foreload.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from foreload.backend.engine import Engine
    from foreload.backend.measure import Measured
    from foreload.settings import Settings
    from foreload.simulator.validation import Comparison


def validate(
    model: ModelArg,
    profile: ProfileIn,
    trace: TraceIn,
    settings: Annotated[
        list[Path] | None,
        typer.Option("--settings", metavar="FILE", help="Check these; repeatable. Default: a grid."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Recorded requests to run, the last ones.")] = 4,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns per setting, in random order.")] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Of that order.")] = 0,
    one_point: Annotated[
        bool, typer.Option("--one-point", help="Also the errors left after scaling by the first setting's.")
    ] = False,
    warm: WarmFlag = None,
    vram: VramFlag = None,
    device: DeviceFlag = "auto",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="Write the rows as JSON.")
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option("--page", metavar="FILE", callback=writable, help="Write a page: predicted against measured."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """How far predictions are off on this machine: simulated beside measured, setting by setting.

    Everything is simulated from the profile alone before anything is measured.
    """
    output = Output(as_json)
    inputs = load_inputs(profile, trace, output, model)
    if (inputs.trace.token_id < 0).any():
        raise UsageError(f"{trace}: its token ids are not recorded, and validate runs them: record it with foreload")
    with _open(model, inputs, profile, device, vram, output, warm) as engine:
        chosen = _chosen(settings, inputs, engine)
        comparisons = run(engine, inputs, chosen, requests, repeats, seed, output, inputs.warm_counts(warm))
    values = report(comparisons, inputs, repeats, one_point)
    if out is not None:
        from foreload.files import write_json

        write_json(out, values)
    if page is not None:
        from foreload.dashboard.validation import write_page

        write_page(page, values)
        output.note(f"{page}: page written")
    output.finish(values, lambda console: _show(console, values))


def _open(
    model: str, inputs: Inputs, profile: Path, device: Any, vram: str | None, output: Output, warm: Path | None
) -> Engine:
    from foreload.settings import Settings

    meta = inputs.profile.meta
    inputs.profile.check_here()
    longest = int(inputs.trace.position.max(initial=0)) + 2
    link = None if meta.emulated_link_bytes_per_s is None else f"{meta.emulated_link_bytes_per_s}B/s"
    options = engine_options(device, meta.dtype, vram, link, longest, eager=meta.path == "eager")  # as it was profiled
    return open_engine(model, options, Settings(cache_ratio=0.0), profile, output, warm)


def _chosen(paths: list[Path] | None, inputs: Inputs, engine: Engine) -> list[Settings]:
    from foreload.settings import Settings
    from foreload.simulator.costs import CostModel
    from foreload.simulator.grid import grid

    if paths:
        return [Settings.load(path) for path in paths]
    return grid(inputs.trace, CostModel(inputs.profile, inputs.shape), engine.slot_limit)


def run(
    engine: Engine,
    inputs: Inputs,
    settings: list[Settings],
    requests: int,
    repeats: int,
    seed: int,
    output: Output,
    warm: NDArray[np.int64] | None = None,
) -> list[Comparison]:
    """Simulate, then measure by turns, the last `requests` of the recording under every setting.

    `warm` [MoE layers, experts]: what the engine starts from, too.
    """
    from foreload.backend.measure import measure
    from foreload.settings import check_slots
    from foreload.simulator.compiled import simulate
    from foreload.simulator.validation import Comparison, Figures

    numbers = inputs.trace.requests()[-requests:]
    with output.progress() as progress:
        task = progress.add_task("simulating", total=len(settings))
        predicted = []
        for one in settings:
            capacity = check_slots(one, engine.shape, engine.slot_limit, engine.expert_bytes)
            result = simulate(inputs.trace, inputs.profile, inputs.shape, one, capacity, numbers, warm)
            predicted.append(Figures.of(result))
            progress.advance(task)
        progress.update(task, description="measuring", total=len(settings) * repeats, completed=0)
        measured = measure(
            engine,
            inputs.trace,
            numbers,
            settings,
            repeats,
            lambda done, _: progress.update(task, completed=done),
            seed,
        )
    return [
        Comparison(m.settings, before, m.tpot_ns, _figures(m, engine))
        for m, before in zip(measured, predicted, strict=True)
    ]


def _figures(measured: Measured, engine: Engine) -> Any:
    from foreload.backend.policy.state import DECODE
    from foreload.simulator.validation import Figures, rates

    hits, late, _ = rates(measured.counters[DECODE])
    moved = measured.bytes_per_token(engine.layer_bytes)
    return Figures(measured.tpot_ms * 1e6, hits, late, moved, measured.ttft_ms * 1e6)


def report(comparisons: list[Comparison], inputs: Inputs, repeats: int, one_point: bool) -> dict[str, Any]:
    """What `--out` and `--json` hold: provenance, summary, a row per setting with its repetitions."""
    from foreload.simulator.validation import compare, summarise

    meta, rows = inputs.profile.meta, compare(comparisons)
    found = [{k: None if v != v else v for k, v in row.items()} for row in rows.to_dict(orient="records")]
    for row, comparison in zip(found, comparisons, strict=True):
        row["profile_hash"] = inputs.profile.digest
        row["repeats_tpot_ms"] = [ns / 1e6 for ns in comparison.measured_tpot_ns]
        row["predicted_time_ns"] = dict(comparison.predicted.time_ns)
    return {
        "model": inputs.trace.meta.model,
        "machine": meta.machine,
        "device": meta.device_name,
        "emulated_link_bytes_per_s": meta.emulated_link_bytes_per_s,
        "profile_date": meta.date,
        "profile_hash": inputs.profile.digest,
        "repeats": repeats,
        "summary": summarise(rows, one_point).as_dict(),
        "rows": found,
    }


def _show(console: Console, values: dict[str, Any]) -> None:
    rows = [
        (
            str(number),
            row["regime"],
            f"{row['predicted_tpot_ms']:.3f}",
            f"{row['measured_tpot_ms']:.3f}",
            f"{row['measured_spread_pct']:.1f} %",
            f"{row['error_pct']:+.1f} %",
            f"{row['predicted_hit_rate'] + row['predicted_late_rate']:.1%}",
            f"{row['measured_hit_rate'] + row['measured_late_rate']:.1%}",
        )
        for number, row in enumerate(values["rows"], 1)
    ]
    machine = values["machine"] + link_text(values["emulated_link_bytes_per_s"])
    columns = ("", "bound by", "predicted ms", "measured ms", "spread", "error", "hits", "measured")
    note = f"predicted: simulated from the profile alone; measured: median of {values['repeats']} turns, on {machine}"
    console.print(table(f"{values['model']}: time per token", columns, rows, note))
    named = {str(number): row["settings"] for number, row in enumerate(values["rows"], 1)}
    console.print(facts("Settings", named))  # below, as figures leave a column too narrow to wrap between words
    _show_errors(console, values)


def _not_counted(values: dict[str, Any]) -> str:
    """The settings whose turns spread too far to count, and why they do not."""
    from foreload.simulator.validation import SPREAD_PCT

    apart, limit = values["summary"]["apart"], f"{SPREAD_PCT:g} %"
    spread = {row["settings"]: row["measured_spread_pct"] for row in values["rows"]}
    if apart:
        named = ", ".join(f"{name} ({spread[name]:.1f} %)" for name in apart)
        return f"as their own turns spread by more than {limit}: {named}"
    if min(spread.values()) > SPREAD_PCT:
        return f"none, though the turns of every setting spread by more than {limit}: figures are that uncertain"
    return f"none: every setting's own turns spread by at most {limit}"


def _show_errors(console: Console, values: dict[str, Any]) -> None:
    from foreload.simulator.validation import METRICS

    rows, summary = [], values["summary"]
    for metric, parts in summary["errors"].items():
        for regime, figures in parts.items():
            shown = (f"{figures[key]:{form}}" for key, form in _FORMS.items())
            label = METRICS[metric] if regime == "all" else f"  bound by {regime}"
            rows.append((label, str(figures["settings"]), *shown))
    note = "error: predicted less measured; percentiles of absolute errors"
    console.print(table("Errors", ("", "settings", "mean", "median", "P90", "P99", "worst"), rows, note))
    agreement = summary["rank_agreement"]
    lines = {
        "rank agreement": "-"
        if agreement is None
        else f"{agreement:.3f} (Kendall, {summary['ranked_pairs']} pairs measured over 2 % apart)",
        "predicted best": summary["pick"],
        "regret": f"{summary['regret_pct']:.1f} % slower than the best, had the prediction chosen",
        "not counted": _not_counted(values),
    }
    every = summary["all_settings"]
    if summary["apart"]:
        lines["with those too"] = f"time per token: median {every['p50']:.1f} %, worst {every['worst']:+.1f} %"
    if summary["calibrated"] is not None:
        left = summary["calibrated"]["others"]
        text = "no other setting" if left is None else f"median {left['p50']:.1f} %, worst {left['worst']:+.1f} %"
        lines["one-point calibrated"] = (
            f"x {summary['calibrated']['factor']:.3f} by {summary['calibrated']['by']}: {text}"
        )
    console.print(facts("", lines))


_FORMS = {"mean": "+.1f", "p50": ".1f", "p90": ".1f", "p99": ".1f", "worst": "+.1f"}
