"""The typer app: the list of commands, and errors as one line with an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from foreload.cli import (
    calibrate,
    dashboard,
    demo,
    doctor,
    export,
    live,
    plan,
    profile,
    quality,
    record,
    report,
    run_model,
    serve,
    simulate,
    trace,
    trace_analyze,
    trace_synthesize,
    tune,
    validate,
)
from foreload.errors import BudgetError, ForeloadError

COMMANDS: Mapping[str, Callable[..., None]] = {
    "demo": demo.demo,
    "doctor": doctor.doctor,
    "plan": plan.plan,
    "profile": profile.profile,
    "calibrate": calibrate.calibrate,
    "run": run_model.run,
    "serve": serve.serve,
    "apply": live.apply,
    "watch": live.watch,
    "record": record.record,
    "quality": quality.quality,
    "simulate": simulate.simulate,
    "tune": tune.tune,
    "validate": validate.validate,
    "export": export.export,
    "dashboard": dashboard.dashboard,
    "report": report.report,
}
GROUPS: Mapping[str, typer.Typer] = {"trace": trace.app}
DEBUG = "FORELOAD_DEBUG"
INTERRUPTED = 130

app = typer.Typer(
    name="foreload",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        from foreload import __version__

        print(f"foreload {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Decode Mixture-of-Experts models that do not fit on the GPU: measure, record, simulate, solve, apply, check."""


for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
for _command in (trace_analyze.analyze, trace_synthesize.synthesize):
    trace.app.command()(_command)
for _name, _group in GROUPS.items():
    app.add_typer(_group, name=_name)


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code and never raises."""
    given = list(sys.argv[1:] if args is None else args)
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        return _run(given)


def _run(given: list[str]) -> int:
    try:
        code = typer.main.get_command(app).main(given, prog_name="foreload", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _report("interrupted", INTERRUPTED, given)
    except ForeloadError as error:
        return _report(str(error), error.exit_code, given, _details(error))
    except Exception as error:  # the boundary: whatever else goes wrong becomes one line
        return _unexpected(error, given)
    if code == INTERRUPTED:
        return _report("interrupted", INTERRUPTED, given)
    return code if isinstance(code, int) else 0


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line on stderr, without the place in the code that raised it."""
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _details(error: ForeloadError) -> dict[str, Any]:
    if isinstance(error, BudgetError):
        return {"budget": error.budget, "shortfall_bytes": error.shortfall_bytes}
    return {}


def _unexpected(error: Exception, given: list[str]) -> int:
    usage = getattr(error, "format_message", None)
    if usage is not None:  # a wrong flag or argument
        if usage().startswith("Usage:"):  # no argument at all: the help text
            print(usage(), file=sys.stderr)
            return 2
        return _report(usage(), int(getattr(error, "exit_code", 2)), given)
    if os.environ.get(DEBUG):
        traceback.print_exception(error)
    message = f"{type(error).__name__}: {error}"
    return _report(f"{message} (a bug; set {DEBUG}=1 to see where)", 1, given)


def _report(message: str, code: int, given: list[str], details: Mapping[str, Any] | None = None) -> int:
    """Print an error, as one line on stderr or, with --json, as an object on stdout; returns `code`."""
    line = " ".join(message.split())
    if "--json" in given:
        print(json.dumps({"error": line, "exit_code": code, **(details or {})}))
    else:
        print(f"error: {line}", file=sys.stderr)
    return code
