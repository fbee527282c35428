"""`--preset`: another system's method as settings; `--preset help` lists them."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def _listed(name: str | None) -> str | None:
    if name != "help":
        return name
    from foreload.cli.output import Output, table
    from foreload.presets import PRESETS

    values = {key: {"summary": found.summary, "source": found.source} for key, found in PRESETS.items()}
    rows = [(key, found.summary, found.source) for key, found in PRESETS.items()]
    needs = [key for key, found in PRESETS.items() if found.warm]
    listed = table("Presets", ("name", "what it does", "source"), rows, f"with --warm-start: {', '.join(needs)}")
    Output("--json" in sys.argv).finish(values, lambda console: console.print(listed))
    raise typer.Exit


PresetFlag = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        callback=_listed,
        is_eager=True,
        help="Settings of another system; `help` lists them.",
    ),
]
