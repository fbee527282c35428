"""The command line: help without weight, results as tables or JSON, errors as one line and an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from foreload.cli import main
from foreload.cli.app import COMMANDS, GROUPS, app
from foreload.cli.output import Output, facts, table
from foreload.errors import BudgetError, InternalError, MismatchError
from foreload.traces.io import TraceWriter, read_trace
from foreload.traces.timings import Span, Timings, write_timings

pytestmark = pytest.mark.unit


@pytest.fixture
def trace_file(tmp_path: Path, make_trace: Any, write_trace: Any) -> Path:
    path = tmp_path / "trace.parquet"
    write_trace(path, make_trace(has_weights=True))
    return path


def test_help_names_every_command(capsys: Any) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in [*COMMANDS, *GROUPS])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_and_json(name: str, capsys: Any) -> None:
    assert main([name, "--help"]) == 0
    assert "--json" in capsys.readouterr().out
    assert COMMANDS[name].__doc__


def test_version(capsys: Any) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == "foreload 0.1.0\n"


def test_no_argument_shows_help(capsys: Any) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("Usage: foreload ")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["trace", "info"], "Missing argument 'TRACE'"),
        (["trace", "info", "x", "--nonsense"], "No such option: --nonsense"),
        (["trace", "export", "x"], "Missing option '--out'"),
        (["trace", "export", "x", "--out", "y", "--format", "xml"], "'xml' is not one of 'csv', 'perfetto'"),
        (["trace", "info", "no.parquet"], "no.parquet: trace cannot be read: No such file or directory"),
        (
            ["plan", "mini", "--context", "-5"],
            "Invalid value for '--context': Input should be greater than or equal to 1",
        ),
        (
            ["run", "mini", "--prompt", "a", "--context", "0"],
            "Invalid value for '--context': Input should be greater than or equal to 1",
        ),
        (["dashboard", "--validation", "no.json"], "--validation goes with --profile and --trace"),
        (
            ["dashboard", "--profile", "p", "--trace", "t", "--validation", "no.json"],
            "no.json: validation cannot be read: No such file or directory",
        ),
        (["report", "no-run"], "no-run: no run here: result.json is missing"),
    ],
)
def test_wrong_use(args: list[str], expected: str, capsys: Any) -> None:
    assert main(args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert expected in shown.err
    assert shown.err.count("\n") == 1

    assert main([*args, "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.err == ""
    told = json.loads(shown.out)
    assert expected in told["error"]
    assert told["exit_code"] == 2


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (MismatchError("profile: of\nanother shape"), 2, "error: profile: of another shape\n"),
        (BudgetError("3 bytes short", "vram", 3), 3, "error: 3 bytes short\n"),
        (InternalError("slots are lost"), 1, "error: slots are lost\n"),
        (ZeroDivisionError("oh"), 1, "error: ZeroDivisionError: oh (a bug; set FORELOAD_DEBUG=1 to see where)\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (typer.Exit(5), 5, ""),
    ],
)
def test_errors_become_exit_codes(
    error: BaseException, code: int, expected: str, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    app.command("fail")(raising(error))
    assert main(["fail"]) == code
    assert capsys.readouterr().err == expected


def test_budget_errors_carry_the_shortfall(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))

    @app.command("fail")
    def fail(as_json: bool = typer.Option(False, "--json")) -> None:
        raise BudgetError("3 bytes short", "vram", 3)

    assert main(["fail", "--json"]) == 3
    expected = {"error": "3 bytes short", "exit_code": 3, "budget": "vram", "shortfall_bytes": 3}
    assert json.loads(capsys.readouterr().out) == expected


def test_warnings_are_one_line(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))

    @app.command("warn")
    def warn() -> None:
        warnings.simplefilter("always")
        warnings.warn("link: memory is\npageable", stacklevel=1)

    assert main(["warn"]) == 0
    assert capsys.readouterr().err == "warning: link: memory is pageable\n"


def test_debug_shows_where(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("FORELOAD_DEBUG", "1")
    monkeypatch.setattr(app, "registered_commands", list(app.registered_commands))
    app.command("fail")(raising(ZeroDivisionError("oh")))
    assert main(["fail"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_trace_info(trace_file: Path, capsys: Any) -> None:
    assert main(["trace", "info", str(trace_file), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["rows"], values["requests"], values["decode_rows"], values["steps"]) == (26, 2, 16, 18)
    assert [load["layer"] for load in values["expert_load"]] == [1, 2, 3]

    assert main(["trace", "info", str(trace_file)]) == 0
    shown = capsys.readouterr().out
    assert "3 MoE layers, 8 experts, top 2" in shown
    assert "source: measured" in shown
    assert "use over all rows, prompts' too; again over decoded tokens" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


def test_trace_export_csv(trace_file: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "t.csv"
    assert main(["trace", "export", str(trace_file), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(out), "format": "csv", "lines": 26 * 6}
    assert len(out.read_text().splitlines()) == 26 * 6 + 1


def test_trace_export_perfetto(tmp_path: Path, capsys: Any) -> None:
    spans = (Span("gpu", "attention", "attention 0", 0.0, 10.0, step=0, layer=0),)
    write_timings(tmp_path / "t.parquet", Timings(spans, {"source": "measured"}))
    out = tmp_path / "t.json"
    assert main(["trace", "export", str(tmp_path / "t.parquet"), "--out", str(out)]) == 0
    assert "1 spans" in capsys.readouterr().out
    assert json.loads(out.read_text())["traceEvents"][0]["args"] == {"name": "measured"}


def test_trace_recover(tmp_path: Path, make_trace: Any, capsys: Any) -> None:
    trace = make_trace()
    path = tmp_path / "t.parquet"
    TraceWriter(path, trace.meta, flush_rows=1).append(0, 0, 1, 0, 7, trace.experts[:1])
    assert main(["trace", "recover", f"{path}.partial", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(path), "rows": 1}
    assert read_trace(path).rows == 1


def test_output_json_is_strict(capsys: Any) -> None:
    import numpy as np

    Output(True).finish({"a": np.float32(0.5), "b": np.arange(2), "c": Path("x")}, lambda _: None)
    assert json.loads(capsys.readouterr().out) == {"a": 0.5, "b": [0, 1], "c": "x"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        Output(True).finish({"a": float("nan")}, lambda _: None)


def test_tables_fit_and_take_no_markup(capsys: Any) -> None:
    output = Output(False)
    output.stdout.print(table("a [red]title", ("name", "value"), [("[bold]x", "y" * 200)], "source: measured"))
    output.stdout.print(facts("f", {"[a]": "[b]"}))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    assert all(text in shown for text in ("a [red]title", "[bold]x", "[a]", "[b]", "source: measured"))


def foreload(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from foreload.cli import main; sys.exit(main())", *args]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=120)


@pytest.mark.integration
def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from foreload.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'numba', 'pyarrow', 'pandas', 'scipy', 'pulp', 'simpy', 'transformers', 'numpy'}; "
        "print(sorted(heavy & sys.modules.keys())); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.integration
def test_the_process_exits_as_told(trace_file: Path) -> None:
    done = foreload("trace", "info", str(trace_file), NO_COLOR="1")
    assert done.returncode == 0
    assert "\x1b[" not in done.stdout
    assert done.stderr == ""
    done = foreload("trace", "info", "no.parquet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: no.parquet: trace cannot be read: No such file or directory\n"


@pytest.mark.integration
def test_interrupt_exits_130() -> None:
    code = (
        "import signal, sys, time; from foreload.cli import app, main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell may have it ignored\n"
        "@app.app.command('sleep')\n"
        "def sleep() -> None:\n    print('ready', flush=True); time.sleep(600)\n"
        "sys.exit(main(['sleep']))"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (130, "error: interrupted\n")


@pytest.mark.integration
def test_a_closed_pipe_is_no_bug(trace_file: Path) -> None:
    command = (
        f"{sys.executable} -c 'import sys; from foreload.cli import main; sys.exit(main())' trace info {trace_file}"
    )
    done = subprocess.run(["bash", "-c", f"{command} | true"], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
