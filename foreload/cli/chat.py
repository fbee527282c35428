"""`foreload run --chat`: a conversation, one line of standard input a turn."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from foreload.cli.output import Output
from foreload.errors import UsageError

if TYPE_CHECKING:
    from foreload.backend.engine import Engine
    from foreload.backend.sampling import Sampling


def chat(
    engine: Engine, system: str | None, first: str | None, tokens: int, sampling: Sampling, output: Output
) -> dict[str, Any]:
    """Talk until standard input ends; `first` is the first turn, if given. Returns the messages and what each cost.

    A turn that does not fit the context is refused on stderr and may be said otherwise.
    """
    from foreload.backend.chat import ChatTemplate
    from foreload.backend.conversation import Conversation
    from foreload.cli.run_model import summary

    folder = engine.checkpoint.folder
    if folder is None:
        raise UsageError(f"{engine.checkpoint.name} has random weights and no chat template: give a model's folder")
    template = ChatTemplate.of(folder)
    talk = Conversation(engine, template, [] if system is None else [{"role": "system", "content": system}])
    costs: list[dict[str, Any]] = []
    shown = not output.as_json
    if shown:
        output.note(f"chat template: {template.name}; an empty line or the end of input ends the conversation")
    while (said := first if first is not None else _read(shown)) is not None:
        first = None
        try:
            _, generation = talk.say(said, tokens, sampling, _print if shown else lambda _: None)
        except UsageError as error:
            output.note(f"error: {error}")
            continue
        costs.append(summary(engine, generation))
        if shown:
            _print("\n")
    return {"template": template.name, "messages": list(talk.messages), "turns": costs}


def _read(shown: bool) -> str | None:
    """The next line that is said, or None at the end."""
    if shown and sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip() or None


def _print(piece: str) -> None:
    print(piece, end="", flush=True)
