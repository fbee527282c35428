"""Command lines of other engines, split into the flags that matter here and the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from foreload.errors import UsageError


@dataclass(frozen=True)
class Flag:
    """One option: how it may be spelled, and whether values follow (0, 1, or `many` up to the next option)."""

    spellings: tuple[str, ...]
    values: int = 1
    many: bool = False


@dataclass
class Parsed:
    """Values of known flags in the order given, once per occurrence, and words that are not known."""

    given: dict[str, list[list[str]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    @property
    def not_read(self) -> tuple[str, ...]:
        """The flags among the words that are not known, once each and without values."""
        flags = (word.partition("=")[0] for word in self.others if re.match(r"--?[A-Za-z]", word))
        return tuple(dict.fromkeys(flags))

    def last(self, name: str) -> str | None:
        """The value of the last occurrence; None if the flag is absent."""
        found = self.given.get(name)
        return found[-1][0] if found else None

    def words(self, name: str) -> list[str]:
        """All values of the last occurrence."""
        return self.given[name][-1] if name in self.given else []

    def all(self, name: str) -> list[str]:
        """The first value of every occurrence."""
        return [values[0] for values in self.given.get(name, [])]

    def has(self, name: str) -> bool:
        """Whether the flag is there."""
        return name in self.given

    def count(self, name: str, default: int) -> int:
        """A whole number of at least 0; UsageError otherwise."""
        value = self.last(name)
        if value is None:
            return default
        if not value.isdigit():
            raise UsageError(f"{name} is {value!r}: a whole number is needed")
        return int(value)

    def number(self, name: str, default: float) -> float:
        """A number of at least 0; UsageError otherwise."""
        value = self.last(name)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise UsageError(f"{name} is {value!r}: a number of at least 0 is needed")
        return number


def split_command(text: str) -> list[str]:
    """Words of a shell command (line continuations allowed); UsageError for an unclosed quote or nothing at all."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as error:
        raise UsageError(f"command line cannot be read: {error}") from error
    if not words:
        raise UsageError("command line is empty: give the whole command in quotes")
    return words


def parse_flags(words: Sequence[str], known: Mapping[str, Flag]) -> Parsed:
    """`words` by the table `known` (name -> Flag); both `--flag value` and `--flag=value` are read.

    UsageError for a known flag without its value.
    """
    names = {spelling: name for name, flag in known.items() for spelling in flag.spellings}
    parsed, at = Parsed(), 0
    while at < len(words):
        word = words[at]
        at += 1
        spelled, equals, inline = word.partition("=")
        name = names.get(word) or (names.get(spelled) if equals and word.startswith("--") else None)
        if name is None:
            parsed.others.append(word)
            continue
        flag = known[name]
        values = [inline] if word not in names else []
        if flag.many:
            while at < len(words) and not words[at].startswith("-"):
                values.append(words[at])
                at += 1
        while not flag.many and len(values) < flag.values:
            if at == len(words):
                raise UsageError(f"{word} needs a value")
            values.append(words[at])
            at += 1
        if flag.many and not values:
            raise UsageError(f"{word} needs a value")
        parsed.given.setdefault(name, []).append(values)
    return parsed
