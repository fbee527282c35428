"""Chats as prompts: the model folder's own Jinja template in a sandbox, or a plain one where it has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from foreload.errors import FileError, UsageError
from foreload.files import read_bytes, read_mapping

ROLES = ("system", "developer", "user", "assistant", "tool")
PLAIN = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOPS = tuple(f"\n{role.capitalize()}:" for role in ROLES)
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = Mapping[str, str]
"""`role` (one of `ROLES`) and `content`."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The content between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders messages as the text that the model was trained to answer."""

    def __init__(self, source: str, tokens: Mapping[str, str], stops: Sequence[str] = (), name: str = "plain") -> None:
        """`tokens` are the special tokens by name; `stops` end an answer beside the model's end tokens.

        FileError if `source` is no valid template; `name` says where it is from.
        """
        self.stops, self.name = tuple(stops), name
        try:
            self._template = _environment().from_string(source)
        except TemplateSyntaxError as error:
            raise FileError(f"{name}: chat template cannot be read: line {error.lineno}: {error.message}") from error
        self._tokens = dict(tokens)

    @classmethod
    def of(cls, folder: Path | None) -> Self:
        """The template of a model folder: `chat_template.jinja`, else that of `tokenizer_config.json`, else `PLAIN`.

        None is a model without a folder, which gets `PLAIN`.
        """
        if folder is None:
            return cls(PLAIN, {}, PLAIN_STOPS)
        config = folder / "tokenizer_config.json"
        values = read_mapping(config, "tokenizer configuration") if config.exists() else {}
        tokens = {name: text for name in _TOKENS if (text := _token(values.get(name))) is not None}
        own = folder / "chat_template.jinja"
        if own.exists():
            return cls(read_bytes(own, "chat template").decode("utf-8", "replace"), tokens, name=str(own))
        source = values.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {str(entry.get("name")): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if isinstance(source, str):
            return cls(source, tokens, name=str(config))
        return cls(PLAIN, tokens, PLAIN_STOPS)

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt for the assistant's next message; UsageError if the template refuses the messages."""
        given = [dict(message) for message in messages]
        try:
            return self._template.render(
                messages=given, add_generation_prompt=True, tools=None, documents=None, **self._tokens
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise UsageError(f"messages do not fit the model's chat template: {error}") from error


def _token(value: Any) -> str | None:
    """A special token, which is written as a string or as an object."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates of Hugging Face models may use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals.update(helpers)
    environment.filters["tojson"] = _to_json
    return environment


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    """JSON without HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
