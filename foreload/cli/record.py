"""`foreload record`: run prompts through the engine and keep how every token was routed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.engine_options import (
    AssumeProfileFlag,
    CalibrationFlag,
    ContextFlag,
    DeviceFlag,
    DraftFlag,
    DraftModelFlag,
    DtypeFlag,
    EagerFlag,
    GammaFlag,
    LinkFlag,
    ModelArg,
    ProfileFlag,
    SettingsFlag,
    ShadowFlag,
    VramFlag,
    WarmFlag,
    chosen_settings,
    engine_options,
    open_engine,
)
from foreload.cli.output import JsonFlag, Output, facts, writable
from foreload.cli.run_model import shadow_facts, warm_facts

if TYPE_CHECKING:
    from rich.console import Console


def record(
    model: ModelArg,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", callback=writable, help="Parquet file to write.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSON lines with text and subject, or one prompt a line.")
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Tokens to generate per prompt.")] = 64,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens of each prompt that are fed.")] = 128,
    requests: Annotated[int | None, typer.Option("--requests", help="Use the first so many prompts.", min=1)] = None,
    depth: Annotated[int, typer.Option("--depth", help="Layers ahead to record predictions.", min=0, max=4)] = 2,
    predictor: Annotated[
        list[str] | None,
        typer.Option("--predictor", help="Whose to record; repeatable. Default: all there can be."),
    ] = None,
    rolled: Annotated[bool, typer.Option("--rolled", help="Record the rolled form of predictions too.")] = False,
    width: Annotated[int | None, typer.Option("--width", help="Experts per prediction. Default: 2 k.", min=1)] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Record router weights too.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this probability.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draws.")] = 0,
    timings: Annotated[
        Path | None,
        typer.Option("--timings", metavar="FILE", callback=writable, help="Also write what ran when, as Parquet."),
    ] = None,
    settings: SettingsFlag = None,
    warm: WarmFlag = None,
    draft: DraftFlag = None,
    gamma: GammaFlag = None,
    draft_model: DraftModelFlag = None,
    profile: ProfileFlag = None,
    assume_profile: AssumeProfileFlag = False,
    device: DeviceFlag = "auto",
    dtype: DtypeFlag = None,
    vram: VramFlag = None,
    link: LinkFlag = None,
    context: ContextFlag = 2048,
    calibration: CalibrationFlag = None,
    shadow: ShadowFlag = False,
    eager: EagerFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Record how the model routes the tokens of prompts.

    Generates from the prompts; keeps routing, predictions and, if asked, router weights.
    """
    from foreload.backend.recorder import read_prompts
    from foreload.backend.recorder import record as run
    from foreload.backend.sampling import Sampling
    from foreload.backend.timeline import timed
    from foreload.machine import machine_name
    from foreload.traces.timings import Timings, write_timings

    output = Output(as_json)
    texts = read_prompts(prompts)[:requests]
    options = engine_options(device, dtype, vram, link, context, calibration, shadow, eager)
    chosen = chosen_settings(settings, None, options, draft, gamma, draft_model)
    sampling = Sampling(temperature, top_p, seed)
    with (
        open_engine(model, options, chosen, profile, output, warm, assume_profile) as engine,
        output.progress() as progress,
        ExitStack() as stack,
    ):
        spans = stack.enter_context(timed(engine)) if timings is not None else []
        task = progress.add_task("recording", total=len(texts))
        generations = run(
            engine,
            texts,
            out,
            prompt_tokens=prompt_tokens,
            max_tokens=tokens,
            sampling=sampling,
            depth=depth,
            width=width,
            predictors=predictor,
            rolled=rolled,
            weights=weights,
            progress=lambda done, _: progress.update(task, completed=done),
        )
        true_recall = engine.true_recall
        warm_started = {"bytes": engine.warm_start.bytes, "ms": engine.warm_start.ns / 1e6}
    if timings is not None:
        meta = {"source": "measured", "model": model, "machine": machine_name(), "recording": out.name}
        write_timings(timings, Timings(tuple(spans), meta))
        output.note(f"{timings}: {len(spans)} spans written")
    values: dict[str, Any] = {
        "file": str(out),
        "requests": len(generations),
        "prompt_tokens": sum(g.prompt_tokens for g in generations),
        "decode_tokens": sum(g.decode_tokens for g in generations),
        "bytes": out.stat().st_size,
        "true_recall": true_recall,
        "warm_start": warm_started,
    }
    line = "{file}: {requests} requests, {prompt_tokens} prompt and {decode_tokens} decode tokens, {bytes} bytes"

    def show(console: Console) -> None:
        console.print(line.format(**values))
        if loaded := warm_facts(warm_started):
            console.print(facts("measured", loaded))
        if true_recall:
            console.print(facts("measured", shadow_facts(true_recall)))

    output.finish(values, show)
