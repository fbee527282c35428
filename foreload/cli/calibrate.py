"""`foreload calibrate`: default vectors, estimator and recall of one model, from text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.engine_options import DeviceFlag, DtypeFlag, ModelArg, VramFlag, engine_options, open_engine
from foreload.cli.output import JsonFlag, Output, facts, table, writable_folder

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.backend.predict.calibration import Calibration

SOURCE = "source: measured on the report split, mean over the layers that can be predicted"


def calibrate(
    model: ModelArg,
    text: Annotated[
        list[Path], typer.Option("--text", metavar="FILE", help="JSON lines with text, or plain text; repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", callback=writable_folder, help="Folder to write.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Most tokens to learn from.", min=1)] = 400_000,
    select_tokens: Annotated[
        int, typer.Option("--select-tokens", help="Tokens to choose per layer by.", min=1)
    ] = 16_384,
    report_tokens: Annotated[int, typer.Option("--report-tokens", help="Tokens to report recall on.", min=1)] = 16_384,
    window: Annotated[int, typer.Option("--window", help="Tokens of each piece of text.", min=2)] = 256,
    depth: Annotated[int, typer.Option("--depth", help="Layers ahead to look at.", min=1, max=4)] = 4,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the order of texts and of the network.")] = 0,
    device: DeviceFlag = "auto",
    dtype: DtypeFlag = None,
    vram: VramFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Learn to predict a model's experts from text.

    Finds each expert's default vector, trains one small network, and chooses the best predictor per layer; the recall
    of all is measured on text that taught and chose nothing.
    """
    from foreload.backend.calibrate import Plan
    from foreload.backend.calibrate import calibrate as run
    from foreload.backend.texts import read_texts
    from foreload.settings import Settings

    output = Output(as_json)
    texts = read_texts(text)
    options = engine_options(device, dtype, vram, None, window)
    plan = Plan(
        train=tokens, vectors=min(tokens, 200_000), selection=select_tokens, report=report_tokens, window=window,
        depth=depth, seed=seed,
    )  # fmt: skip
    with open_engine(model, options, Settings(), None, output) as engine, output.progress() as progress:
        task = progress.add_task("calibrating", total=None)
        found = run(
            engine,
            texts,
            plan,
            lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )
    saved = found.save(out)
    values = {"folder": str(out), "source": "measured", **saved.meta.model_dump(mode="json")}
    output.finish(values, lambda console: _show(console, saved, out))


def _show(console: Console, found: Calibration, out: Path) -> None:
    meta = found.meta
    splits = ", ".join(f"{count} {name}" for name, count in meta.tokens.items())
    chosen = [f"{row[layer]} {layer}" for row in meta.hybrid[:1] for layer in range(1, meta.moe_layers)]
    console.print(
        facts(
            f"{meta.model}: calibrated",
            {
                "written to": str(out),
                "tokens": splits,
                "experts never routed to": str(meta.unseen_experts),
                "estimator": "{parameters:.0f} weights, {steps:.0f} steps, KL {last_kl_nats:.3f} nats".format(
                    **meta.estimator
                ),
                "hybrid, one layer ahead": ", ".join(chosen),
            },
        )
    )
    columns = ("predictor", "form", "depth", "recall at k", "of router weight", "recall at 2k", "cosine")
    console.print(table("Recall", columns, recall_rows(meta.recall), SOURCE))


def recall_rows(recall: dict[str, Any]) -> list[tuple[str, ...]]:
    """Rows of means: predictor, form, depth and the four metrics; rolled forms from depth 2 on."""
    rows = []
    for name, forms in recall.items():
        for form, depths in forms.items():
            for depth, entry in depths.items():
                if form == "rolled" and depth == "depth_1":
                    continue
                mean = [f"{value:.3f}" for value in entry["mean"].values()]
                rows.append((name, form, depth.removeprefix("depth_"), *mean))
    return rows
