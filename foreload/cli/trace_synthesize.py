"""`foreload trace synthesize`: recordings with chosen statistics, for any shape."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from foreload.cli.output import JsonFlag, Output, facts, writable
from foreload.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.traces.synthetic import Synthetic


def synthesize(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="Recording to write.")],
    layers: Annotated[int | None, typer.Option("--layers", min=1, help="MoE layers. Default: 48.")] = None,
    experts: Annotated[int | None, typer.Option("--experts", min=1, help="Experts per layer. Default: 128.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="Experts per token. Default: 8.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens per request.")] = 2000,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests, each with a subject of its own.")] = 1,
    skew: Annotated[float | None, typer.Option("--skew", help="Spread of the experts' log popularity.")] = None,
    recency: Annotated[float | None, typer.Option("--recency", help="Spread of what changes slowly.")] = None,
    persistence: Annotated[float | None, typer.Option("--persistence", help="Tokens after which it has.")] = None,
    predictability: Annotated[
        str | None, typer.Option("--predictability", metavar="R,R..", help="Recall of predictions, per depth 1, 2, ..")
    ] = None,
    subject_every: Annotated[
        int | None, typer.Option("--subject-every", min=0, help="Change the subject after so many tokens.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    like: Annotated[
        Path | None, typer.Option("--like", metavar="TRACE", help="Take shape and statistics of this recording.")
    ] = None,
    preset: Annotated[
        Literal["qwen3", "hard"] | None, typer.Option("--preset", help="Published statistics of a model.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a recording of made-up routing with chosen skew, recency, predictability and subjects."""
    from foreload.traces.synthetic import write_synthetic

    output = Output(as_json)
    with output.progress() as progress:
        progress.add_task("synthesizing", total=None)
        spec = _start(like, preset, (layers, experts, top_k))
        given = {"skew": skew, "recency": recency, "persistence": persistence, "subject_every": subject_every}
        chosen = {name: value for name, value in given.items() if value is not None}
        spec = _with_recall(spec, predictability, tokens=tokens, requests=requests, seed=seed, **chosen)
        rows = write_synthetic(out, spec)
    values = {"file": str(out), "rows": rows, **_values(spec)}
    output.finish(values, lambda console: _show(console, values))


def _start(like: Path | None, preset: str | None, sizes: tuple[int | None, int | None, int | None]) -> Synthetic:
    """What the other flags then change."""
    from foreload.traces.fitting import fit
    from foreload.traces.io import TraceReader
    from foreload.traces.synthetic import PRESETS, Synthetic, shape_of

    if like is not None and preset is not None:
        raise UsageError("--like and --preset exclude each other")
    if (like is not None or preset is not None) and any(size is not None for size in sizes):
        raise UsageError("--layers, --experts and --top-k are those of --like or --preset")
    if like is not None:
        with TraceReader(like) as reader:
            return fit(reader)
    if preset is not None:
        return PRESETS[preset]()
    layers, experts, top_k = (size or usual for size, usual in zip(sizes, (48, 128, 8), strict=True))
    return Synthetic(shape_of(layers, experts, top_k))


def _with_recall(spec: Synthetic, predictability: str | None, **fields: Any) -> Synthetic:
    from dataclasses import replace

    from foreload.traces.synthetic import even_recall

    if predictability is not None:
        try:
            recall = tuple(float(part) for part in predictability.split(",") if part.strip())
        except ValueError as error:
            raise UsageError(f"--predictability is {predictability!r}: numbers like .9,.8,.7 are needed") from error
        fields["recall"] = even_recall(recall, spec.shape.n_moe_layers)
    return replace(spec, **fields)


def _values(spec: Synthetic) -> dict[str, Any]:
    shape = spec.shape
    return {
        "model": spec.name,
        "moe_layers": shape.n_moe_layers,
        "experts": shape.experts,
        "top_k": shape.top_k,
        "requests": spec.requests,
        "skew": spec.skew,
        "recency": spec.recency,
        "persistence_tokens": spec.persistence,
        "recall": [sum(row[depth:]) / max(1, len(row) - depth) for depth, row in enumerate(spec.recall, 1)],
        "subject_every": spec.subject_every,
        "seed": spec.seed,
    }


def _show(console: Console, values: dict[str, Any]) -> None:
    recall = ", ".join(f"{value:.2f}" for value in values["recall"])
    shown = {
        "model": str(values["model"]),
        "routing": f"{values['moe_layers']} MoE layers, {values['experts']} experts, top {values['top_k']}",
        "rows": f"{values['rows']} in {values['requests']} requests, seed {values['seed']}",
        "skew, recency": f"{values['skew']:.3g}, {values['recency']:.3g} for {values['persistence_tokens']:.3g} tokens",
        "recall by depth": recall or "no predictions",
    }
    console.print(facts(str(values["file"]), shown, "source: synthetic"))
