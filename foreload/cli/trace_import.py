"""`foreload trace import`: recordings of other programs as trace files."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.output import JsonFlag, Output, facts, writable
from foreload.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.shape import ModelShape


def import_trace(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="What the other program wrote.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="Trace file to write (Parquet).")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="vllm, sglang, sglang-recorder, megatron, policylang, jsonl, csv, hf-logits, imatrix. "
            "Default: by the file, if only one fits.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model's folder, or mini. Else give its sizes:")
    ] = None,
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="Layers of the model, dense ones too.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", min=1, help="Experts per MoE layer.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Experts per token.")] = None,
    moe_layers: Annotated[
        str | None,
        typer.Option("--moe-layers", metavar="LIST", help="Which are MoE, like 1-47 or 0,2,4. Default: all."),
    ] = None,
    scoring: Annotated[
        str | None, typer.Option("--scoring", metavar="NAME", help="How the router scores, for logits: softmax_topk.")
    ] = None,
    subject: Annotated[
        list[str] | None, typer.Option("--subject", help="What the text is about: one for all requests, or one each.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a recording of another program as a trace.

    Counts without order become a histogram, which trace info and trace export read and simulate refuses.
    """
    from foreload.traces.importers import import_file

    output = Output(as_json)
    name, shape = _model(model, layers, experts, top_k, moe_layers, scoring)
    with output.progress() as progress:
        task = progress.add_task("importing rows", total=None)
        chosen, done = import_file(
            path,
            out,
            shape,
            form,
            model=name,
            subjects=tuple(subject or ()),
            progress=lambda rows: progress.update(task, completed=rows),
        )
    values: dict[str, Any] = {
        "file": str(out),
        "format": chosen,
        "order": done.order,
        "model": name,
        "shape_hash": shape.hash,
        "requests": done.requests,
        "steps": done.steps,
        "rows": done.rows,
        "notes": list(done.notes),
    }
    output.finish(values, lambda console: _show(console, values))


def _model(
    model: str | None,
    layers: int | None,
    experts: int | None,
    top_k: int | None,
    moe_layers: str | None,
    scoring: str | None,
) -> tuple[str, ModelShape]:
    """Name and shape, from a model's configuration or from sizes; UsageError if it is neither, or both."""
    sizes = {"--layers": layers, "--experts": experts, "--top-k": top_k}
    if model is not None:
        given = [n for n, v in {**sizes, "--moe-layers": moe_layers, "--scoring": scoring}.items() if v is not None]
        if given:
            raise UsageError(f"--model and {given[0]} exclude each other: the model's configuration has it")
        from foreload.backend.models.checkpoint import Checkpoint

        checkpoint = Checkpoint.open(model)
        return checkpoint.name, checkpoint.shape
    if layers is None or experts is None or top_k is None:
        missing = next(n for n, v in sizes.items() if v is None)
        raise UsageError(f"which model? give --model, or --layers, --experts and --top-k ({missing} is missing)")
    if top_k > experts:
        raise UsageError(f"--top-k {top_k}: a layer has {experts} experts")
    return "unknown", _sized(layers, experts, top_k, _numbers(moe_layers, layers), scoring)


def _sized(layers: int, experts: int, top_k: int, moe_layers: tuple[int, ...], scoring: str | None) -> ModelShape:
    """A shape of which only the routing is known: other sizes are 0, names `unknown`."""
    from foreload.shape import ModelShape

    empty: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False}
    needed = [field for field in fields(ModelShape) if field.default is MISSING and field.default_factory is MISSING]
    values = {field.name: empty.get(str(field.type), "unknown") for field in needed}
    known = {"layers": layers, "experts": experts, "top_k": top_k, "moe_layers": moe_layers}
    return ModelShape(**{**values, **known, "scoring": scoring or "unknown"})


def _numbers(text: str | None, layers: int) -> tuple[int, ...]:
    """`1-3,5` as (1, 2, 3, 5); UsageError if it is no ascending list of the model's layers."""
    if text is None:
        return tuple(range(layers))
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"--moe-layers {text!r}: a list like 1-47 or 0,2,4 is needed")
        found += range(int(first), int(last or first) + 1)
    if not found or found != sorted(set(found)) or found[-1] >= layers:
        raise UsageError(f"--moe-layers {text!r}: ascending numbers from 0 to {layers - 1} are needed")
    return tuple(found)


def _show(console: Console, values: dict[str, Any]) -> None:
    shown = {"format": values["format"], "model": f"{values['model']} (shape {values['shape_hash']})"}
    if values["order"] == "unknown":
        shown["holds"] = "a histogram of expert use, without order: it cannot be replayed"
    else:
        shown["holds"] = "{requests} requests, {steps} steps, {rows} rows".format(**values)
    shown.update({f"note {number}": note for number, note in enumerate(values["notes"], 1)})
    console.print(facts(values["file"], shown, "source: recorded by another program"))
