"""`foreload run`: generate from a prompt and say what it cost."""

from __future__ import annotations

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
from foreload.cli.output import JsonFlag, Output, facts
from foreload.cli.presets import PresetFlag
from foreload.errors import UsageError
from foreload.files import read_bytes
from foreload.units import format_bytes

if TYPE_CHECKING:
    from foreload.backend.engine import Engine
    from foreload.backend.generation import Generation


def run(
    model: ModelArg,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option("--prompt-file", help="File with the text to continue.")] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Draw from the likeliest tokens of this probability.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the draws.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Talk: each line of standard input is a turn.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="With --chat: the system message.")] = None,
    settings: SettingsFlag = None,
    preset: PresetFlag = None,
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
    replay: Annotated[
        Path | None,
        typer.Option("--replay", metavar="TRACE", help="Run this recording's routing, not a prompt."),
    ] = None,
    request: Annotated[int, typer.Option("--request", metavar="N", help="With --replay: the recorded request.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Generate text, and say what a token cost.

    Time per token, hit rate and bytes moved. With --chat, a conversation in the model's own chat template. With
    --replay, at most --tokens recorded decode steps, for models of random weights (shape:NAME).
    """
    from foreload.backend.sampling import Sampling
    from foreload.cli.chat import chat as talk

    text = _text(prompt, prompt_file, chat or replay is not None)
    if replay is not None and (chat or text is not None):
        raise UsageError("--replay takes the place of a prompt: give one of them")
    if system is not None and not chat:
        raise UsageError("--system goes with --chat")
    output = Output(as_json)
    options = engine_options(device, dtype, vram, link, context, calibration, shadow, eager)
    chosen = chosen_settings(settings, preset, options, draft, gamma, draft_model)
    sampling = Sampling(temperature, top_p, seed)
    with open_engine(model, options, chosen, profile, output, warm, assume_profile) as engine:
        if replay is not None:
            values = _replayed(engine, replay, request, tokens)
            return output.finish(values, lambda console: _show(console, "", values))
        if chat or text is None:
            values = talk(engine, system, text, tokens, sampling, output)
            return output.finish(values, lambda console: _show_turns(console, values["turns"]))
        with output.progress() as progress:
            task = progress.add_task("generating", total=tokens)
            generation = engine.generate(
                engine.tokenizer.encode(text), tokens, sampling, on_token=lambda _: progress.advance(task)
            )
        values = {"text": engine.tokenizer.decode(generation.token_ids), **summary(engine, generation)}
    output.finish(values, lambda console: _show(console, text, values))


def _text(prompt: str | None, prompt_file: Path | None, chat: bool) -> str | None:
    """The text to continue; None for a chat that starts with standard input."""
    given = (prompt is not None) + (prompt_file is not None)
    if given == 2 or (given == 0 and not chat):
        raise UsageError("give the text to continue with --prompt or --prompt-file, one of them")
    return prompt if prompt_file is None else read_bytes(prompt_file, "prompt").decode("utf-8", "replace")


def _replayed(engine: Engine, path: Path, request: int, steps: int) -> dict[str, Any]:
    """What the decode steps of a recorded request cost on this engine."""
    from foreload.backend.replay import Replay
    from foreload.traces.io import read_trace

    recording = Replay(read_trace(path), engine.shape, engine.device)
    return {"text": "", "replay": str(path), **summary(engine, engine.replay(recording, request, steps))}


def warm_facts(warm: dict[str, Any]) -> dict[str, str]:
    """What was loaded before the first prompt, if anything."""
    return {"loaded before": f"{format_bytes(warm['bytes'])} in {warm['ms']:.1f} ms"} if warm["bytes"] else {}


def summary(engine: Engine, generation: Generation) -> dict[str, Any]:
    """What one generation cost, as measured."""
    from foreload.backend.policy import Counter
    from foreload.backend.policy.copied import copied_bytes
    from foreload.backend.policy.state import DECODE

    totals = generation.counters[DECODE].sum(axis=0)
    demand = int(totals[Counter.HITS] + totals[Counter.LATE] + totals[Counter.MISSES])
    copied = copied_bytes(generation.counters[DECODE], engine.layer_bytes)
    steps, tokens = len(generation.steps), generation.decode_tokens
    return {
        "source": "measured",
        "settings": engine.settings.describe(),
        "prompt_tokens": generation.prompt_tokens,
        "tokens": len(generation.token_ids),
        "decode_steps": steps,
        "tokens_per_step": generation.tokens_per_step if steps else None,
        "acceptance": generation.acceptance,
        "experts_per_layer_step": generation.experts_per_layer_step if steps else None,
        "ttft_ms": generation.ttft_ns / 1e6,
        "tpot_ms": generation.tpot_ms if steps else None,
        "hit_rate": int(totals[Counter.HITS]) / demand if demand else None,
        "late_rate": int(totals[Counter.LATE]) / demand if demand else None,
        "cpu_rate": int(totals[Counter.ON_CPU]) / demand if demand else None,
        "bytes_per_token": copied / tokens if steps else None,
        "true_recall": engine.true_recall,
        "warm_start": {"bytes": engine.warm_start.bytes, "ms": engine.warm_start.ns / 1e6},
        "memory": engine.describe_memory(),
    }


def _show(console: Any, prompt: str, values: dict[str, Any]) -> None:
    console.print(f"[dim]{_escape(prompt)}[/dim]{_escape(values['text'])}\n")
    if values["tpot_ms"] is None:
        console.print(f"first token after {values['ttft_ms']:.1f} ms (measured)")
        return
    steps = f"{values['decode_steps']} of {values['tokens_per_step']:.2f} tokens"
    if values["acceptance"]:
        shares = ", ".join(f"{share:.0%}" for share in values["acceptance"])
        steps += f"; drafts kept by place in the window: {shares}"
    rates = f"{values['hit_rate']:.1%} hits, {values['late_rate']:.1%} late, {values['cpu_rate']:.1%} on the CPU"
    console.print(
        facts(
            "measured",
            {
                "settings": values["settings"],
                "time per token": f"{values['tpot_ms']:.2f} ms over {values['tokens'] - 1} tokens",
                "first token": f"{values['ttft_ms']:.1f} ms after {values['prompt_tokens']} prompt tokens",
                "decode steps": steps,
                "experts": f"{values['experts_per_layer_step']:.1f} per layer and step: {rates}",
                "copied": f"{format_bytes(values['bytes_per_token'])} per token",
                **shadow_facts(values["true_recall"]),
                **warm_facts(values["warm_start"]),
                "memory": values["memory"],
            },
        )
    )


def _show_turns(console: Any, turns: list[dict[str, Any]]) -> None:
    for number, turn in enumerate(turns, 1):
        speed = "" if turn["tpot_ms"] is None else f", {turn['tpot_ms']:.2f} ms per token, {turn['hit_rate']:.1%} hits"
        size = f"{turn['tokens']} tokens after {turn['prompt_tokens']} prompt tokens"
        console.print(f"turn {number}: {size}, first after {turn['ttft_ms']:.1f} ms{speed} (measured)")


def shadow_facts(true_recall: dict[int, float]) -> dict[str, str]:
    """True recall of speculated layers, if it was measured."""
    if not true_recall:
        return {}
    shown = ", ".join(f"{layer}: {share:.1%}" for layer, share in true_recall.items())
    return {"true experts among the executed, by MoE layer": shown}


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)
