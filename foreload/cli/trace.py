"""`foreload trace`: look at recordings, import, export and recover them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foreload.cli.output import JsonFlag, Output, facts, table, writable
from foreload.cli.trace_import import import_trace

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.traces.histogram import Histogram
    from foreload.traces.schema import Trace, TraceMeta

app = typer.Typer(help="Look at recordings of routing, import, export and recover them.", no_args_is_help=True)
app.command("import")(import_trace)

TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="Recording (Parquet), or its .partial folder.")]


@app.command()
def info(path: TraceFile, as_json: JsonFlag = False) -> None:
    """What a recording holds: model, requests, steps, and how evenly it uses the experts."""
    from foreload.traces.histogram import read_histogram
    from foreload.traces.io import read_provenance, read_trace

    output = Output(as_json)
    if read_provenance(path).order == "unknown":
        counted = {"file": str(path), **histogram_summary(read_histogram(path))}
        output.finish(counted, lambda console: _show_histogram(console, counted))
        return
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
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="File to write.")],
    form: Annotated[
        Literal["csv", "perfetto", "sglang-kt"] | None,
        typer.Option(
            "--format",
            help="csv: one line per row, layer and rank; perfetto: timings as a timeline; "
            "sglang-kt: how often each expert was used, for --init-expert-location.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a recording as CSV, its experts' use for sglang-kt, or timings as a timeline for https://ui.perfetto.dev.

    The default form goes by the suffix: .json a timeline, .pt for sglang-kt, else CSV.
    """
    output = Output(as_json)
    chosen = form or {".json": "perfetto", ".pt": "sglang-kt"}.get(out.suffix, "csv")
    exporters = {"csv": _export_csv, "perfetto": _export_perfetto, "sglang-kt": _export_sglang_kt}
    with output.progress() as progress:
        progress.add_task("exporting", total=None)
        count = exporters[chosen](path, out)
    what = {"csv": "lines", "perfetto": "spans", "sglang-kt": "layers"}[chosen]
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


def _export_sglang_kt(path: Path, out: Path) -> int:
    from foreload.traces.export import write_sglang_kt
    from foreload.traces.histogram import read_histogram

    return write_sglang_kt(out, read_histogram(path))


def histogram_summary(histogram: Histogram) -> dict[str, Any]:
    """What a histogram says, as plain values."""
    meta = histogram.meta
    totals = histogram.counts.sum(axis=1)
    shares = histogram.counts.max(axis=1) / totals.clip(1)
    return {
        "model": meta.model,
        "shape_hash": meta.shape_hash,
        "order": meta.order,
        "moe_layers": meta.moe_layers,
        "experts": meta.experts,
        "top_k": meta.top_k,
        "source": meta.source,
        "expert_load": [
            {"layer": layer, "unused": int((counts == 0).sum()), "top_share": float(share), "uses": int(total)}
            for layer, counts, share, total in zip(meta.layer_numbers, histogram.counts, shares, totals, strict=True)
        ],
    }


def _show_histogram(console: Console, values: dict[str, Any]) -> None:
    shown = {
        "model": f"{values['model']} (shape {values['shape_hash']})",
        "routing": f"{values['moe_layers']} MoE layers, {values['experts']} experts, top {values['top_k']}",
        "recorded by": values["source"],
        "order": "unknown: a histogram, which cannot be replayed; it can say which experts to keep resident",
    }
    console.print(facts(str(values["file"]), shown))
    rows = [
        (str(load["layer"]), f"{load['unused']}", f"{load['top_share']:.1%}", f"{load['uses']}")
        for load in values["expert_load"]
    ]
    head = ("MoE layer", "experts never used", "share of the busiest", "uses counted")
    console.print(table("Routing per layer", head, rows, f"source: counted by {values['source']}"))


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
        "draft": recorded_draft(meta),
        "weights": meta.has_weights,
        "predictions": [p.model_dump() for p in meta.predictions],
        "expert_load": expert_load(trace),
        "reuse_previous_step": reuse(trace),
    }


def recorded_draft(meta: TraceMeta) -> dict[str, Any] | None:
    """Kind and gamma of the drafts whose verify windows a recording holds."""
    if "draft" not in meta.sampling:
        return None
    return {"kind": meta.sampling["draft"], "gamma": meta.sampling.get("gamma")}


def _show(console: Console, values: dict[str, Any]) -> None:
    predictions = ", ".join(f"{p['predictor']} depth {p['depth']} width {p['width']}" for p in values["predictions"])
    shown = {
        "model": f"{values['model']} (shape {values['shape_hash']})",
        "routing": f"{values['moe_layers']} MoE layers, {values['experts']} experts, top {values['top_k']}",
        "recorded by": f"{values['source']} on {values['machine']}, "
        f"seed {'unknown' if values['seed'] < 0 else values['seed']}",
        "requests": f"{values['requests']}",
        "steps": f"{values['steps']} ({values['decode_rows']} decoded tokens, {values['rows']} rows)",
        "drafts": "none" if values["draft"] is None else "{kind}, gamma {gamma}".format(**values["draft"]),
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
    note = "source: measured, counted in the recording: use over all rows, prompts' too; again over decoded tokens"
    console.print(table("Routing per layer", head, rows, note))
