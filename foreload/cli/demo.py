"""`foreload demo`: the whole loop on the bundled model: profile, record, simulate, tune, apply, check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreload.cli.engine_options import DeviceFlag, resolve_device
from foreload.cli.output import JsonFlag, Output, facts, table, writable_folder
from foreload.units import format_bytes, parse_rate

if TYPE_CHECKING:
    from rich.console import Console

    from foreload.backend.engine import CostsFor, Engine, EngineOptions
    from foreload.backend.measure import Measured
    from foreload.dashboard.result import RunResult
    from foreload.profiler.schema import HardwareProfile
    from foreload.settings import Settings
    from foreload.simulator.tune import TuneResult
    from foreload.traces.schema import Trace

MODEL = "mini"
CACHED_SHARE = 0.25
"""The demo's device budget holds this share of the experts, beside staging for depth 2."""
REQUESTS, PROMPT_TOKENS, TOKENS, REPEATS = 12, 96, 64, 3
CONTEXT = 512
SEED = 0


def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            callback=writable_folder,
            help="Folder for profile, recording, settings and report.",
        ),
    ] = Path("out/demo"),
    link: Annotated[
        str | None, typer.Option("--link", metavar="RATE", help="On cpu: emulated link. Default: 100MB/s.")
    ] = None,
    device: DeviceFlag = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Run the whole loop on the bundled model, in about a minute.

    Measure the machine, record routing, simulate, tune, apply to the running engine, and check the prediction.
    """
    output = Output(as_json)
    options = _options(resolve_device(device), link)
    with output.progress() as progress:
        task = progress.add_task("starting", total=None)

        def step(what: str, done: int = 0, total: int | None = None) -> None:
            progress.update(task, description=what, completed=done, total=total)

        run = Loop(options, out, step).run()
    output.finish(run.values(), lambda console: _show(console, run, out))


def _options(device: Any, link: str | None) -> EngineOptions:
    from foreload.backend.engine import EngineOptions
    from foreload.backend.models.checkpoint import Checkpoint
    from foreload.budget import fixed_bytes
    from foreload.settings import Settings, staging_slots

    shape = Checkpoint.open(MODEL).shape
    rate = parse_rate(link or "100MB/s", "--link") if device == "cpu" or link is not None else None
    plain = EngineOptions(device=device, context_tokens=CONTEXT, link_bytes_per_s=rate)
    deep = Settings(predictor="gate", prefetch_depth=2, prefetch_width=2 * shape.top_k)
    slots = int(CACHED_SHARE * shape.n_moe_layers * shape.experts) + staging_slots(deep, shape)
    vram = fixed_bytes(shape, plain.resolved_dtype, CONTEXT) + slots * shape.expert_bytes(plain.resolved_dtype)
    return replace(plain, vram_bytes=vram)


@dataclass(frozen=True)
class DemoRun:
    """What one run of the loop found."""

    result: RunResult
    tuned: TuneResult
    measured: tuple[Measured, Measured]
    options: EngineOptions

    @property
    def kept_default(self) -> bool:
        """Whether nothing beats the default: in simulation, or as measured."""
        default, best = self.measured
        return self.tuned.kept_default or best.tpot_ms >= default.tpot_ms

    def values(self) -> dict[str, Any]:
        """The contract of `foreload demo --json`."""
        fields = ("predicted_tpot_ms", "measured_tpot_ms", "hit_rate", "bytes_per_token")
        sides = {"default": self.result.default, "tuned": self.result.tuned}
        return {
            **{name: {field: getattr(side, field) for field in fields} for name, side in sides.items()},
            "speedup": self.result.speedup,
            "error_pct": self.result.error_pct.model_dump(),
            "bounds": self.result.bounds,
            "kept_default": self.kept_default,
            "diverged_requests": sum(m.diverged for m in self.measured),
        }


class Loop:
    """One run of measure, record, simulate, solve, apply, check; files go to `out` as they come."""

    def __init__(self, options: EngineOptions, out: Path, step: Callable[..., None]) -> None:
        self.options, self.out, self._step = options, out, step
        self.profile: HardwareProfile | None = None

    def run(self) -> DemoRun:
        """All of it, on one engine."""
        from foreload.backend.engine import Engine
        from foreload.backend.models.checkpoint import Checkpoint

        self._step("loading the model")
        with Engine(Checkpoint.open(MODEL), self.options, costs=self._costs()) as engine:
            self.profile = self._measure_machine(engine)
            trace = self._record(engine)
            tuned = self._tune(engine, trace, self.profile)
            found = self._collect(trace, tuned, self._check(engine, trace, tuned))
            chosen = tuned.default if found.kept_default else tuned.best
            engine.apply(chosen.settings)
            self._timeline(engine, trace, tuned, chosen.settings)
        self._write(found, chosen.settings)
        return found

    def _costs(self) -> CostsFor:
        from foreload.backend.models.checkpoint import Checkpoint
        from foreload.simulator.contended import split_costs

        shape = Checkpoint.open(MODEL).shape

        def costs(settings: Settings) -> Any:
            assert self.profile is not None, "the profile comes first"
            return split_costs(self.profile, shape, settings)

        return costs

    def _measure_machine(self, engine: Engine) -> HardwareProfile:
        from foreload.profiler.run import profile

        found = profile(engine, "quick", lambda name, done, total: self._step(f"profile: {name}", done, total))
        found.save(self.out / "profile.json")
        return found

    def _record(self, engine: Engine) -> Trace:
        from foreload.backend.recorder import read_prompts, record
        from foreload.traces.io import read_trace

        prompts = read_prompts()
        spread = prompts[:: max(1, len(prompts) // REQUESTS)][:REQUESTS]
        path = self.out / "trace.parquet"
        record(
            engine,
            spread,
            path,
            prompt_tokens=PROMPT_TOKENS,
            max_tokens=TOKENS,
            stop=False,
            progress=lambda done, total: self._step("record", done, total),
        )
        return read_trace(path)

    def _tune(self, engine: Engine, trace: Trace, profile: HardwareProfile) -> TuneResult:
        from foreload.simulator.tune import tune

        return tune(
            trace,
            profile,
            engine.shape,
            engine.dtype_name,
            slots=engine.slot_limit,
            progress=lambda done, total, what: self._step(f"tune: {what}", done, total),
        )

    def _check(self, engine: Engine, trace: Trace, tuned: TuneResult) -> tuple[Measured, Measured]:
        """Default and tuned by turns on the live engine, on the held-out requests that the tuner predicted."""
        from foreload.backend.measure import measure

        pair = [tuned.default.settings, tuned.best.settings]
        numbers = tuned.held_out or tuned.select
        default, best = measure(
            engine, trace, numbers, pair, REPEATS, lambda done, total: self._step("measure", done, total)
        )
        return default, best

    def _timeline(self, engine: Engine, trace: Trace, tuned: TuneResult, settings: Settings) -> None:
        from foreload.backend.measure import recorded_requests
        from foreload.backend.timeline import measured_spans
        from foreload.simulator.engine_model import simulate
        from foreload.traces.perfetto import write_perfetto
        from foreload.traces.timings import spans_of

        assert self.profile is not None
        numbers = (tuned.held_out or tuned.select)[:1]
        request = recorded_requests(trace, engine, numbers)[0]
        engine.reset_cache()
        measured = measured_spans(engine, request.prompt_ids, min(16, len(request.followed)))
        drawn = simulate(trace, self.profile, engine.shape, settings, engine.capacity, numbers, timeline=True)
        runs = {"measured": measured, "simulated": spans_of(drawn.timeline)}
        meta = {
            "model": trace.meta.model,
            "machine": self.profile.meta.machine,
            "settings": settings.describe(),
        }
        write_perfetto(self.out / "timeline.json", runs, meta)

    def _collect(self, trace: Trace, tuned: TuneResult, measured: tuple[Measured, Measured]) -> DemoRun:
        from foreload.dashboard.collect import Measured as Shown
        from foreload.dashboard.collect import run_meta, run_result

        assert self.profile is not None
        size = self.profile.meta.expert_bytes
        shown = [Shown(m.tpot_ms, m.hit_rate, m.bytes_per_token((size,) * len(m.capacity))) for m in measured]
        meta = run_meta(self.profile, trace, SEED)
        result = run_result(tuned, meta, {"default": shown[0], "tuned": shown[1]})
        return DemoRun(result, tuned, measured, self.options)

    def _write(self, found: DemoRun, settings: Settings) -> None:
        from foreload.dashboard.report import render_report
        from foreload.files import write_text

        write_text(self.out / "result.json", found.result.model_dump_json(indent=1) + "\n")
        settings.save(self.out / "settings.json")
        render_report(self.out, self.out / "report.html")


def _show(console: Console, run: DemoRun, out: Path) -> None:
    result, meta = run.result, run.result.meta
    console.print(
        facts(
            _verdict(run),
            {
                "machine": f"{meta.machine}, {run.options.device}, link {meta.link}",
                "model": f"{meta.model}, {run.tuned.slots} expert slots, {meta.context}",
                "tuned settings": run.tuned.best.settings.describe(),
            },
        )
    )
    rows = [
        _row("default", result.default, result.error_pct.default),
        _row("tuned", result.tuned, result.error_pct.tuned),
    ]
    floor, resident = result.bounds.get("floor_ms", 0.0), result.bounds.get("resident_ms", 0.0)
    note = (
        f"measured: median of {REPEATS} turns on requests the tuner did not see; simulated bound {floor:.2f} ms, "
        f"every expert resident {resident:.2f} ms"
    )
    columns = ("", "predicted ms/token", "measured ms/token", "error", "hits", "copied per token")
    console.print(table("", columns, rows, note))
    console.print(f"report: {out / 'report.html'}   timeline (ui.perfetto.dev): {out / 'timeline.json'}")


def _verdict(run: DemoRun) -> str:
    if run.kept_default:
        return "nothing beats the default on this machine: it stays"
    return f"tuned is {run.result.speedup:.2f} times as fast as the default, measured"


def _row(name: str, outcome: Any, error: float | None) -> tuple[str, ...]:
    return (
        name,
        f"{outcome.predicted_tpot_ms:.3f}",
        f"{outcome.measured_tpot_ms:.3f}",
        "-" if error is None else f"{error:+.1f} %",
        f"{outcome.hit_rate:.1%}",
        format_bytes(outcome.bytes_per_token),
    )
