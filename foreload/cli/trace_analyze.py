"""`foreload trace analyze`: how a model routes, and what any cache could make of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.output import JsonFlag, Output, facts, table, writable

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from foreload.simulator.curves import Curves
    from foreload.traces.statistics import Statistics

SOURCE = "source: counted in the recording over decoded tokens, prompts left out"


def analyze(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="Recording (Parquet), or its .partial folder.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", callback=writable, help="Also write one self-contained HTML page."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Load, reuse, drift and recall per layer, and hit rate against slots for every policy and the best possible."""
    output = Output(as_json)
    found, curves = _gather(path, output)
    values = {"file": str(path), **as_values(found, curves)}
    if out is not None:
        from foreload.dashboard.analysis import render_analysis

        render_analysis(path, found, curves, out)
        output.note(f"{out}: written")
    output.finish(values, lambda console: _show(console, path, found, curves))


def _gather(path: Path, output: Output) -> tuple[Statistics, Curves]:
    """Both from one reading, piece by piece. UsageError for a recording without decode steps."""
    from foreload.errors import UsageError
    from foreload.simulator.curves import StepKeeper, curves
    from foreload.traces.io import TraceReader
    from foreload.traces.statistics import Gatherer

    with TraceReader(path) as reader, output.progress() as progress:
        task = progress.add_task("reading", total=reader.rows)
        gathered, keeper = Gatherer(reader.meta, reader.rows), StepKeeper(reader.meta)
        for group in reader.groups():
            gathered.add(group)
            keeper.add(group)
            progress.advance(task, group.rows)
        found, steps = gathered.statistics(), keeper.steps()
        if not found.tokens:
            raise UsageError(f"{path}: holds no decoded token: there is nothing to analyse")
        progress.add_task("replaying", total=None)
        return found, curves(steps)


def as_values(found: Statistics, curves: Curves) -> dict[str, Any]:
    """JSON values; what is not known is null. Tables are lists of objects with the columns of `Statistics`."""
    from foreload.simulator.curves import slot_points

    meta = found.meta
    points = slot_points(meta.experts)
    return {
        "model": meta.model,
        "source": meta.source,
        "moe_layers": meta.moe_layers,
        "experts": meta.experts,
        "top_k": meta.top_k,
        "rows": found.rows,
        "tokens": found.tokens,
        "requests": found.requests,
        "window_tokens": found.window_tokens,
        "overall": _known(found.overall),
        "layers": _records(found.layers),
        "recall": _records(found.recall()),
        "predictions": _records(found.predictions),
        "subjects": _records(found.subjects),
        "windows": _records(found.windows),
        "hit_rate": {
            "steps": curves.steps,
            "whole_recording": curves.whole,
            "demanded": int(curves.demanded.sum()),
            "slots": list(range(meta.experts + 1)),
            "overall": {policy: curves.rate(policy).tolist() for policy in curves.hits},
            "layer_slots": points,
            "per_layer": {policy: curves.layer_rates(policy)[:, points].tolist() for policy in curves.hits},
        },
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [_known({str(name): value for name, value in row.items()}) for row in frame.to_dict("records")]


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in values.items()}


def _show(console: Console, path: Path, found: Statistics, curves: Curves) -> None:
    from foreload.dashboard.analysis import LAYER_COLUMNS, cells, shown
    from foreload.simulator.curves import slot_points

    meta = found.meta
    overall = {LAYER_COLUMNS[name]: shown(name, found.overall[name]) for name in LAYER_COLUMNS if name != "layer"}
    head = {
        "model": f"{meta.model}, source: {meta.source}",
        "routing": f"{meta.moe_layers} MoE layers, {meta.experts} experts, top {meta.top_k}",
        "tokens": f"{found.tokens} in {found.requests} requests",
    }
    console.print(facts(str(path), head | overall, f"{SOURCE}, mean over layers; reuse in tokens"))
    names = [name for name in LAYER_COLUMNS if name != "effective_experts" and not name.endswith("cosine")]
    console.print(table("Per layer", [LAYER_COLUMNS[n] for n in names], cells(found.layers[names]), SOURCE))
    if len(found.predictions):
        columns = ("predictor", "depth", "recall at k", "of router weight", "recall at 2k")
        console.print(table("Recall of predictions", columns, cells(found.recall()), f"{SOURCE}, mean over layers"))
    if len(found.subjects):
        subjects = cells(found.subjects)
        console.print(table("Load of two subjects", ("subject", "and", "cosine"), subjects, SOURCE))
    policies = ("slots per layer", "of all", *curves.hits)
    part = "" if curves.whole else f" of the first {curves.steps} steps"
    note = f"source: computed from the routing{part}, from an empty cache; belady: the best possible"
    console.print(table("Hit rate against slots", policies, cells(curves.table(slot_points(meta.experts))), note))
