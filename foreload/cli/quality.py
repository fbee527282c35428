"""`foreload quality`: what settings that change the text cost, beside the exact model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreload.cli.engine_options import (
    CalibrationFlag,
    DeviceFlag,
    DtypeFlag,
    ModelArg,
    SettingsFlag,
    VramFlag,
    engine_options,
    load_settings,
    open_engine,
)
from foreload.cli.output import JsonFlag, Output, table, writable
from foreload.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.backend.quality import Trial
    from foreload.quality import QualityReport
    from foreload.settings import Settings
    from foreload.shape import ModelShape


def quality(
    model: ModelArg,
    text: Annotated[
        list[Path],
        typer.Option("--text", metavar="FILE", help="JSON lines with text and subject, or plain text; repeatable."),
    ],
    settings: SettingsFlag = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also every predictor on all layers but the first.")
    ] = False,
    in_prompts: Annotated[
        bool, typer.Option("--in-prompts", help="Also what speculating on prompts, which no setting does, would cost.")
    ] = False,
    window: Annotated[int, typer.Option("--window", help="Tokens of each piece of text.", min=2)] = 256,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Of those, the prompt.", min=1)] = 64,
    windows: Annotated[int, typer.Option("--windows", help="Most pieces per subject.", min=1)] = 32,
    greedy_tokens: Annotated[int, typer.Option("--greedy-tokens", help="Of each greedy text; 0: none.", min=0)] = 64,
    greedy_prompts: Annotated[int, typer.Option("--greedy-prompts", help="Greedy texts per subject.", min=1)] = 4,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", callback=writable, help="Also write a report that `tune` reads."),
    ] = None,
    calibration: CalibrationFlag = None,
    device: DeviceFlag = "auto",
    dtype: DtypeFlag = None,
    vram: VramFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure what executing predictions costs.

    Perplexity, KL and agreement beside the exact model, by subject, and how far greedy texts stay the same.
    """
    from foreload.backend.models.checkpoint import Checkpoint
    from foreload.backend.quality import Sizes
    from foreload.backend.quality import quality as measure
    from foreload.backend.texts import read_texts
    from foreload.settings import Settings

    output = Output(as_json)
    chosen = load_settings(settings)
    trials = _trials(chosen, Checkpoint.open(model).shape, compare, in_prompts)
    texts = read_texts(text)
    sizes = Sizes(window, prompt_tokens, windows, greedy_prompts, greedy_tokens)
    longest = max(window, prompt_tokens + greedy_tokens)
    options = engine_options(device, dtype, vram, None, longest, calibration)
    with ExitStack() as stack:
        engine = stack.enter_context(open_engine(model, options, _base(chosen), None, output))
        exact = None
        if chosen.expert_format is not None:
            exact = stack.enter_context(open_engine(model, options, Settings(), None, output))
        progress = stack.enter_context(output.progress())
        task = progress.add_task("measuring", total=None)
        report = measure(
            engine, trials, texts, sizes, lambda done, total: progress.update(task, completed=done, total=total), exact
        )
    if out is not None:
        report.save(out)
        output.note(f"{out}: written")
    values = {"source": "measured", **report.model_dump(mode="json")}
    values["loss_pct"] = {variant.name: report.loss_pct(variant) for variant in report.variants}
    output.finish(values, lambda console: _show(console, report))


def _base(settings: Settings) -> Settings:
    """The settings as far as they are the engine's for good: what is predicted is each variant's own affair."""
    return type(settings)(expert_format=settings.expert_format, headroom_bytes=settings.headroom_bytes)


def _trials(settings: Settings, shape: ModelShape, compare: bool, in_prompts: bool) -> list[Trial]:
    """What to measure, without repetition; UsageError if nothing changes the text."""
    from foreload.backend.quality import Trial, presets

    layers = settings.speculated(shape)
    changed = layers or settings.expert_format is not None
    found = [Trial("settings", settings.predictor if layers else "none", layers)] if changed else []
    if in_prompts and layers:
        found.append(Trial("settings, in prompts too", settings.predictor, layers, in_prompts=True))
    if compare:
        found += [trial for trial in presets(shape.n_moe_layers) if in_prompts or not trial.in_prompts]
    if not found:
        raise UsageError("the settings change no text: nothing to measure; --compare measures every predictor")
    return found


def _show(console: Console, report: QualityReport) -> None:
    from foreload.quality import ALL

    subjects = [name for name in report.variants[0].figures if name != ALL]
    for subject in (ALL, *(subjects if len(subjects) > 1 else ())):
        rows = []
        for variant in report.variants:
            figures, loss = variant.figures[subject], report.loss_pct(variant, subject)
            rows.append(
                (variant.name, f"{figures.perplexity:.3f}", f"{loss:+.2f} %", f"{figures.kl:.4f}",
                 f"{figures.top1_agreement:.1%}")
            )  # fmt: skip
        title = f"{report.model}: {'all texts' if subject == ALL else subject}"
        tokens = report.variants[0].figures[subject].tokens
        note = f"source: measured, teacher-forced, {tokens} tokens after prompts of {report.prompt_tokens}"
        columns = ("", "perplexity", "loss", "KL, nats", "same first choice")
        console.print(table(title, columns, rows, note))
    greedy = [(v.name, v.greedy) for v in report.variants if v.greedy is not None]
    if greedy:
        texts = [(name, f"{g.identical:.1%}", f"{g.agreement:.1%}", f"{g.first_divergence:.1f}") for name, g in greedy]
        first = greedy[0][1]
        note = f"source: measured, {first.prompts} greedy texts of {first.tokens} tokens by the engine"
        console.print(table("Greedy text", ("", "identical", "same tokens", "first other token"), texts, note))
