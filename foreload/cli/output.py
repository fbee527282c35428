"""What commands print: results on stdout as tables or JSON, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

WIDTH = 100

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def writable(path: Path | None) -> Path | None:
    """Callback of an option that names a file to write: FileError before any work if it cannot be written."""
    return _checked(path, folder=False)


def writable_folder(path: Path | None) -> Path | None:
    """The same of a folder to write files into."""
    return _checked(path, folder=True)


def _checked(path: Path | None, folder: bool) -> Path | None:
    from foreload.files import check_writable

    if path is not None:
        check_writable(path, folder)
    return path


class Output:
    """One command's output. Colours and NO_COLOR are rich's; tables fit `WIDTH` columns."""

    def __init__(self, as_json: bool) -> None:
        from rich.console import Console

        self.as_json = as_json
        self.stdout = Console(highlight=False, soft_wrap=False)
        self.stderr = Console(stderr=True, highlight=False)
        if not self.stdout.is_terminal or self.stdout.width > WIDTH:
            self.stdout.width = WIDTH

    def finish(self, values: Mapping[str, Any], show: Callable[[Console], None]) -> None:
        """Print the result: `values` as JSON if asked for, else what `show` prints."""
        if self.as_json:
            print(json.dumps(values, allow_nan=False, default=_plain))
        else:
            show(self.stdout)

    def note(self, text: str) -> None:
        """One line on stderr that belongs to neither form of the result: a warning, a file that was written."""
        print(text, file=sys.stderr)

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A progress display on stderr that goes away when done; silent where stderr is no terminal."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.stderr, transient=True, disable=not self.stderr.is_terminal) as progress:
            yield progress


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Table:
    """A table whose first column is left-aligned and whose others are right-aligned; `note` says the source.

    All texts are taken as they are, without rich's markup.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    made.caption, made.caption_justify = Text(note) if note else None, "left"
    for index, name in enumerate(columns):
        made.add_column(Text(name), justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def facts(title: str, values: Mapping[str, str], note: str = "") -> Table:
    """A table of names and values without a head."""
    made = table(title, ("", ""), list(values.items()), note)
    made.box, made.show_header, made.columns[1].justify = None, False, "left"
    return made


def _plain(value: Any) -> Any:
    """Numpy scalars and arrays, and paths, as JSON knows them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
