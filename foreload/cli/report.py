"""`foreload report`: one self-contained page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foreload.cli.output import JsonFlag, Output, writable


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `demo` or `tune` has written.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FILE", callback=writable, help="Page to write. Default: report.html in the folder."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write one self-contained page about a run."""
    from foreload.dashboard.report import render_report

    page = out or run / "report.html"
    render_report(run, page)
    values = {"file": str(page), "bytes": page.stat().st_size}
    Output(as_json).finish(values, lambda console: console.print(f"{page}: {values['bytes']} bytes", markup=False))
