"""`foreload trace`: look at recordings, export and recover them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foreload.cli.output import JsonFlag, Output, facts, table

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.traces.schema import Trace

app = typer.Typer(help="Look at recordings of routing, export and recover them.", no_args_is_help=True)

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="Recording (Parquet), or its .partial folder.")]


@app.command()
def info(path: TraceFile, as_json: JsonFlag = False) -> None:
    """What a recording holds: model, requests, steps, and how evenly it uses the experts."""
    from foreload.traces.io import read_trace

    output = Output(as_json)
    with output.progress() as progress:
        progress.add_task("reading", total=None)
        trace = read_trace(path)
    values = {"file": str(path), **summary(trace)}
    output.finish(values, lambda console: _show(console, values))


@app.command()
def recover(path: TraceFile, as_json: JsonFlag = False) -> None:
    """Finish a recording that was killed, from the parts it had flushed."""
    from foreload.traces.io import read_trace
    from foreload.traces.io import recover as finish

    final = finish(path)
    values = {"file": str(final), "rows": read_trace(final).rows}
    Output(as_json).finish(values, lambda console: console.print(f"{final}: {values['rows']} rows recovered"))


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Recording, or timings for the Perfetto form.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File to write.")],
    form: Annotated[
        Literal["csv", "perfetto"] | None,
        typer.Option("--format", help="csv: one line per row, layer and rank; perfetto: timings as a timeline."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a recording as CSV, or timings as a timeline for https://ui.perfetto.dev."""
    output = Output(as_json)
    chosen = form or ("perfetto" if out.suffix == ".json" else "csv")
    with output.progress() as progress:
        progress.add_task("exporting", total=None)
        count = _export_perfetto(path, out) if chosen == "perfetto" else _export_csv(path, out)
    what = "spans" if chosen == "perfetto" else "lines"
    values = {"file": str(out), "format": chosen, what: count}
    output.finish(values, lambda console: console.print(f"{out}: {count} {what}"))


def _export_csv(path: Path, out: Path) -> int:
    from foreload.traces.export import write_csv
    from foreload.traces.io import TraceReader

    with TraceReader(path) as reader:
        return write_csv(out, reader)


def _export_perfetto(path: Path, out: Path) -> int:
    from foreload.traces.perfetto import write_perfetto
    from foreload.traces.timings import read_timings

    timings = read_timings(path)
    write_perfetto(out, {timings.meta.get("source", path.stem): timings.spans}, timings.meta)
    return len(timings.spans)


def summary(trace: Trace) -> dict[str, Any]:
    """Counts of a recording, as plain values."""
    from foreload.traces.analysis import expert_load, reuse

    meta = trace.meta
    return {
        "model": meta.model,
        "shape_hash": meta.shape_hash,
        "moe_layers": meta.moe_layers,
        "experts": meta.experts,
        "top_k": meta.top_k,
        "source": meta.source,
        "machine": meta.machine,
        "seed": meta.seed,
        "requests": len(trace.requests()),
        "rows": trace.rows,
        "steps": len(trace.step_starts()) - 1,
        "decode_rows": trace.decode_rows,
        "weights": meta.has_weights,
        "predictions": [p.model_dump() for p in meta.predictions],
        "expert_load": expert_load(trace),
        "reuse_previous_step": reuse(trace),
    }


def _show(console: Console, values: dict[str, Any]) -> None:
    predictions = ", ".join(f"{p['predictor']} depth {p['depth']} width {p['width']}" for p in values["predictions"])
    shown = {
        "model": f"{values['model']} (shape {values['shape_hash']})",
        "routing": f"{values['moe_layers']} MoE layers, {values['experts']} experts, top {values['top_k']}",
        "recorded by": f"{values['source']} on {values['machine']}, seed {values['seed']}",
        "requests": f"{values['requests']}",
        "steps": f"{values['steps']} ({values['decode_rows']} decoded tokens, {values['rows']} rows)",
        "router weights": "yes" if values["weights"] else "no",
        "predictions": predictions or "none",
    }
    console.print(facts(str(values["file"]), shown))
    rows = [
        (
            str(load["layer"]),
            f"{load['unused']}",
            f"{load['top_share']:.1%}",
            "" if again is None else f"{again:.1%}",
        )
        for load, again in zip(values["expert_load"], values["reuse_previous_step"], strict=True)
    ]
    head = ("MoE layer", "experts never used", "share of the busiest", "used again next step")
    console.print(table("Routing per layer", head, rows, "source: measured, counted in the recording"))
