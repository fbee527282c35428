"""The `foreload` command line: one file per command, or per small group of commands.

Adding a command:

1. Write `foreload/cli/NAME.py` with one typed function whose docstring is its help text. Import typer, rich and
   `foreload.cli.output` at the top, and everything of ours inside the function, so that `foreload --help` stays quick
   and never loads torch. Take `as_json: JsonFlag = False`, and end with one `Output.finish(values, show)`: `values` is
   what `--json` prints, `show(console)` prints the same for people, each figure with its unit and source. An option
   that names a file or folder to write has `callback=writable` (`writable_folder`), which refuses before any work.
2. Enter it in `COMMANDS` (or its typer app in `GROUPS`) of `foreload/cli/app.py`.

Raise the errors of `foreload.errors`: `main` turns them into one line on stderr and the exit code. Exit codes: 0 done,
1 failed, 2 wrong use, 3 infeasible, 130 interrupted. Wrap whatever may take over two seconds in `Output.progress()`.
"""

from __future__ import annotations

from collections.abc import Sequence


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line (`args` default to those of the process) and return the exit code."""
    from foreload.cli.app import run

    return run(args)


__all__ = ["main"]
