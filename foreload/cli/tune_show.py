"""What `foreload tune` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foreload.cli.output import facts, table
from foreload.cli.simulate import link_text
from foreload.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.simulator.tune import TuneResult
    from foreload.simulator.tuner.forecast import Forecast
    from foreload.simulator.tuner.study import Study

SINGLES = 12
"""Single changes to show: the dearest, one of each kind."""


def show_result(console: Console, values: dict[str, Any], result: TuneResult) -> None:
    """Verdict, default beside best, families, presets, the program's bounds and what lies around the answer."""
    verdict = "nothing clearly beats the default: it stays"
    if not result.kept_default:
        verdict = f"{result.speedup:.2f} times as fast as the default, simulated"
    several = {"recordings": f"{result.recordings}, judged by the {result.robust}"} if result.recordings > 1 else {}
    console.print(
        facts(
            f"{values['model']} on {values['device']}: {verdict}",
            {
                "machine": values["machine"] + link_text(values["emulated_link_bytes_per_s"]),
                **({} if values["this_machine"] else {"settings for": "that machine, which is not this one"}),
                "budget": f"{result.slots} expert slots, staging included",
                **several,
                "best": result.best.settings.describe(),
                **_text(result),
                "written to": values["file"],
            },
        )
    )
    bound, resident = values["bounds"]["floor_ms"], values["bounds"]["resident_ms"]
    held = "requests held out" if result.held_out else "the requests that chose"
    note = f"source: simulated, on {held}; bound {bound:.3f} ms, every expert resident {resident:.3f} ms"
    rows = [_row("default", values["default"]), _row("best", values["best"])]
    console.print(table("", ("", "ms per token", "hits", "copied per token", "stall, ms"), rows, note))
    _show_tried(console, result)
    if values["program"] is not None:
        console.print(_program_line(values["program"]))
    if len(result.quality_front()) > 1:
        rows = [(f"{loss:+.2f} %", f"{c.tpot_ns / 1e6:.3f}", c.family) for loss, c in result.quality_front()]
        console.print(table("Quality against speed", ("loss", "ms per token", "family"), rows, "source: simulated"))
    if result.study is not None:
        _show_study(console, result.study)


def _show_tried(console: Console, result: TuneResult) -> None:
    families = [(c.family, f"{c.tpot_ns / 1e6:.3f}", "all") for c in result.families()]
    families += [(name, f"{ms:.3f}", "a part") for name, ms in (result.passed_over or {}).items()]
    columns = ("family", "ms per token", "simulated on")
    console.print(table("Best of each family", columns, families, "source: simulated, to choose by"))
    presets = [(c.name.removeprefix("preset "), f"{c.tpot_ns / 1e6:.3f}") for c in result.presets()]
    if presets:
        console.print(table("Presets", ("preset", "ms per token"), presets, "source: simulated, to choose by"))


def _program_line(program: dict[str, Any]) -> str:
    def ms(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.3f} ms"

    gap = "unknown" if program["gap"] is None else f"{program['gap']:.2%}"
    return (
        f"cheapest program: {ms(program['planned_ms'])} planned, {program['outcome']} by {program['solver']}: "
        f"bound {ms(program['bound_ms'])}, gap {gap}, linear program {ms(program['relaxed_ms'])}\n"
    )


def _show_study(console: Console, study: Study) -> None:
    singles = [
        (single.change, f"{100 * single.loss:+.1f} %", "all" if single.whole else "a part")
        for single in study.singles[:SINGLES]
    ]
    if singles:
        titles = ("one change of the best", "time", "simulated on")
        console.print(table("What each setting is worth", titles, singles, "source: simulated"))

    def ms(ns: float | None) -> str:
        return "-" if ns is None else f"{ns / 1e6:.3f}"

    note = "source: simulated, on a part of the requests; another machine is assumed"
    helps = [(p.name, ms(p.tpot_ns), ms(p.same_ns), ms(p.default_ns)) for p in study.what_if]
    console.print(table("What would help", ("", "tuned anew, ms", "same settings, ms", "default, ms"), helps, note))
    front = [
        (f"{format_bytes(p.slot_bytes)}, {p.slots} slots", ms(p.tpot_ns), ms(p.default_ns), p.settings.miss_action)
        for p in study.front
    ]
    columns = ("memory for experts", "tuned, ms", "default, ms", "missing experts")
    console.print(table("Memory against speed", columns, front, "source: simulated, on a part of the requests"))


def show_forecast(console: Console, values: dict[str, Any], found: Forecast) -> None:
    """What a tune would do."""
    console.print(
        facts(
            f"{values['model']} on {values['device']}: nothing was tuned",
            {
                "candidates": f"{len(found.candidates)} fixed, {found.options} options for the program",
                "replays": f"{found.replays}, of {found.plan_steps} decode steps",
                "simulations": f"about {found.simulations}, of {found.select_steps} decode steps or a part of them",
                "processor time": f"about {found.seconds:.0f} s, over {found.jobs} processes",
            },
        )
    )
    rows = [(name,) for name in found.candidates]
    console.print(table("Candidates that always compete", ("name",), rows, "time: extrapolated from a few steps"))


def _text(result: TuneResult) -> dict[str, str]:
    """What the best settings do to the text and to how experts are held, if anything."""
    if not result.changes_text:
        chosen = result.best.settings.expert_format
        if chosen == result.default.settings.expert_format:
            return {}
        return {"experts": f"in {chosen}, which holds the same numbers; a running engine has to load the model again"}
    source = "measured, or as given"
    if result.loss_assumed:
        source = "assumed: each layer loses its share of what its format loses; foreload quality measures it"
    loss = f"changes: perplexity {result.quality_loss_pct:+.2f} % ({source})"
    if result.best.settings.speculate_layers:
        loss += "; simulated on routing that may drift (assumed): record again under these settings"
    return {"text": loss}


def _row(name: str, shown: dict[str, Any]) -> tuple[str, ...]:
    predicted = shown["predicted"]
    return (
        name,
        f"{predicted['tpot_ms']:.3f}",
        f"{predicted['hit_rate']:.1%}",
        format_bytes(predicted["bytes_per_token"]),
        f"{sum(predicted['stall_per_token_ms'].values()):.3f}",
    )
