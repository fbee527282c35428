"""`foreload validate`: a grid of settings, simulated from the profile and measured on the live engine."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.engine_options import (
    DeviceFlag,
    ModelArg,
    VramFlag,
    engine_options,
    open_engine,
)
from foreload.cli.inputs import Inputs, ProfileIn, TraceIn, load_inputs
from foreload.cli.output import JsonFlag, Output, facts, table
from foreload.cli.simulate import link_text
from foreload.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.backend.engine import Engine
    from foreload.settings import Settings
    from foreload.simulator.validation import Comparison

RATIOS = (0.0, 0.25, 0.5, 1.0)


def validate(
    model: ModelArg,
    profile: ProfileIn,
    trace: TraceIn,
    settings: Annotated[
        list[Path] | None,
        typer.Option("--settings", metavar="FILE", help="Check these; repeatable. Default: a grid."),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Recorded requests to run, the last ones.")] = 4,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Turns per setting.")] = 3,
    vram: VramFlag = None,
    device: DeviceFlag = "auto",
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the rows as JSON.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """How far predictions are off on this machine: simulated beside measured, setting by setting."""
    from foreload.files import write_json
    from foreload.settings import Settings
    from foreload.simulator.validation import compare, summarise

    output = Output(as_json)
    inputs = load_inputs(profile, trace, output)
    if (inputs.trace.token_id < 0).any():
        raise UsageError(f"{trace}: its token ids are not recorded, and validate runs them: record it with foreload")
    meta = inputs.profile.meta
    longest = int(inputs.trace.position.max(initial=0)) + 2
    link = None if meta.emulated_link_bytes_per_s is None else str(meta.emulated_link_bytes_per_s)
    options = engine_options(device, meta.dtype, vram, link, longest, eager=True)  # as profiles are measured
    with open_engine(model, options, Settings(cache_ratio=0.0), profile, output) as engine:
        chosen = [Settings.load(path) for path in settings] if settings else grid(inputs, engine)
        comparisons = run(engine, inputs, chosen, requests, repeats, output)
    rows = compare(comparisons)
    values: dict[str, Any] = {
        "model": inputs.trace.meta.model,
        "machine": meta.machine,
        "device": meta.device_name,
        "emulated_link_bytes_per_s": meta.emulated_link_bytes_per_s,
        "profile_date": meta.date,
        "repeats": repeats,
        "summary": summarise(rows).as_dict(),
        "rows": rows.to_dict(orient="records"),
    }
    if out is not None:
        write_json(out, values)
    output.finish(values, lambda console: _show(console, values))


def grid(inputs: Inputs, engine: Engine) -> list[Settings]:
    """Settings over cache ratio, miss action, prefetch depth and draft that profile, recording and memory allow."""
    from foreload.settings import Settings, slot_counts, staging_slots
    from foreload.simulator.costs import CostModel
    from foreload.simulator.workload import recorded_draft

    threads = CostModel(inputs.profile, inputs.shape).cpu_threads
    actions: list[dict[str, Any]] = [{"miss_action": "fetch"}]
    if threads:
        actions += [{"miss_action": action, "cpu_threads": threads[-1]} for action in ("cpu", "split")]
    recorded = max((p.depth for p in inputs.trace.meta.predictions if p.predictor == "gate"), default=0)
    windows = recorded_draft(inputs.trace)
    drafts: list[dict[str, Any]] = [{}]
    if windows is not None:
        drafts.append({"draft": {"kind": windows[0], "gamma": windows[1]}})
    found = []
    for ratio, action, depth, draft in product(RATIOS, actions, range(min(1, recorded) + 1), drafts):
        prefetch = {"predictor": "gate", "prefetch_depth": depth} if depth else {}
        one = Settings.parse({"cache_ratio": ratio, **action, **prefetch, **draft})
        fits = sum(slot_counts(one, inputs.shape)) + staging_slots(one, inputs.shape) <= engine.slot_limit
        if fits and (ratio < 1 or (depth == 0 and action["miss_action"] == "fetch")):
            found.append(one)
    return found


def run(
    engine: Engine, inputs: Inputs, settings: list[Settings], requests: int, repeats: int, output: Output
) -> list[Comparison]:
    """Simulate, then measure by turns, the last `requests` of the recording under every setting."""
    from foreload.backend.measure import measure
    from foreload.simulator.compiled import simulate
    from foreload.simulator.validation import Comparison

    numbers = inputs.trace.requests()[-requests:]
    with output.progress() as progress:
        task = progress.add_task("measuring", total=len(settings) * repeats)
        measured = measure(
            engine, inputs.trace, numbers, settings, repeats, lambda done, _: progress.update(task, completed=done)
        )
    return [
        Comparison(
            m.settings,
            simulate(inputs.trace, inputs.profile, inputs.shape, m.settings, m.capacity, numbers),
            m.tpot_ns,
            m.hit_rate,
        )
        for m in measured
    ]


def _show(console: Console, values: dict[str, Any]) -> None:
    rows = [
        (
            row["settings"],
            f"{row['predicted_ms']:.3f}",
            f"{row['measured_ms']:.3f}",
            f"{row['spread_pct']:.1f} %",
            f"{row['error_pct']:+.1f} %",
            f"{row['measured_hit_rate']:.1%}",
        )
        for row in values["rows"]
    ]
    machine = values["machine"] + link_text(values["emulated_link_bytes_per_s"])
    columns = ("settings", "predicted ms", "measured ms", "spread", "error", "hits")
    note = f"predicted: simulated from the profile alone; measured: median of {values['repeats']} turns, on {machine}"
    console.print(table(f"{values['model']}: time per token", columns, rows, note))
    summary = values["summary"]
    agreement = summary["rank_agreement"]
    console.print(
        facts(
            "",
            {
                "error": f"mean {summary['mean_error_pct']:+.1f} %, median {summary['p50_error_pct']:.1f} %, "
                f"90th percentile {summary['p90_error_pct']:.1f} %, worst {summary['worst_error_pct']:+.1f} %",
                "rank agreement": "-" if agreement is None else f"{agreement:.2f} (Kendall)",
                "regret": f"{summary['regret_pct']:.1f} % slower than the best, had the prediction chosen",
            },
        )
    )
