"""A model's `config.json`: fields read by name and type, or refused by name."""

from __future__ import annotations

import math
from typing import Any

from foreload.errors import FileError

LONGEST_SHOWN = 100
LARGEST = 1e15
MOST, MOST_LAYERS, MOST_EXPERTS = 1 << 31, 4096, 32767
"""What a configuration may ask for. Experts are recorded as int16."""


class ConfigFields:
    """A `config.json` whose fields are read by name and type. Absent fields get a default only where one is stated."""

    def __init__(self, values: dict[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._source = source
        self._prefix = prefix

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number; FileError if missing without a default, or not a number."""
        value = self._values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise self.refuse(name, "a number is needed")
        if abs(value) == math.inf:
            raise self.refuse(name, "a finite number is needed")
        if abs(value) > LARGEST:
            raise self.refuse(name, f"a number up to {LARGEST:g} is needed")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        """A number above 0; FileError otherwise."""
        value = self.number(name, default)
        if value <= 0:
            raise self.refuse(name, "a number above 0 is needed")
        return float(value)

    def count(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number from `least` to `most`; FileError otherwise."""
        value = self.number(name, default)
        if value != int(value) or value < least:
            raise self.refuse(name, f"a whole number above {least - 1} is needed")
        if value > most:
            raise self.refuse(name, f"a whole number up to {most} is needed")
        return int(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """A boolean; FileError otherwise."""
        value = self._values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false is needed")
        return value

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self._values.get(name)

    def only(self, name: str, accepted: tuple[Any, ...], why: str = "") -> None:
        """FileError unless the field is absent, null, or one of `accepted`."""
        value = self._values.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in accepted):
            raise self.refuse(name, f"{why}{' or '.join(map(_spelt, accepted))} is needed")

    def section(self, name: str) -> ConfigFields | None:
        """An object inside, or None if it is absent, null or empty; FileError if it is something else."""
        value = self._values.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object is needed")
        return ConfigFields(value, self._source, f"{self._prefix}{name}.")

    def refuse(self, name: str, accepted: str) -> FileError:
        """The error that says `name` has a value that cannot be run."""
        return FileError(
            f"{self._source}: field {self._prefix + name!r} is {shown(self._values.get(name))}: {accepted}"
        )


def shown(value: Any) -> str:
    """A value as errors show it: as Python spells it, cut if that is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def _spelt(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
