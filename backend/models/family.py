"""One file per family knows the Hugging Face spellings; `FAMILIES` lists them. Everything after sees `ModelShape`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foreload.errors import FileError
from foreload.shape import ModelShape


@dataclass(frozen=True)
class Family:
    """How one `model_type` is read: its shape and the names of its tensors.

    Layer names are formatted with `layer` and expert names with `layer` and `expert`.
    """

    model_type: str
    shape: Callable[[ConfigFields], ModelShape]
    embed: str
    final_norm: str
    head: str
    layer: dict[str, str]  # our name -> tensor name
    expert: tuple[str, str, str]  # gate, up, down


class ConfigFields:
    """A `config.json` whose fields are read by name and type, or refused by name."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def number(self, name: str, default: float | None = None) -> float:
        """A number; FileError if missing without a default, or not a number."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise FileError(f"{self._source}: field {name!r} is {value!r}: a number is needed")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer; FileError otherwise."""
        value = self.number(name, default)
        if value != int(value) or value < 1:
            raise FileError(f"{self._source}: field {name!r} is {value!r}: a whole number above 0 is needed")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; FileError otherwise."""
        value = self._values.get(name, default)
        if not isinstance(value, bool):
            raise FileError(f"{self._source}: field {name!r} is {value!r}: true or false is needed")
        return value

    def get(self, name: str) -> Any:
        """The raw value, or None."""
        return self._values.get(name)

    def refuse(self, name: str, accepted: str) -> FileError:
        """The error that says `name` has a value this family cannot run."""
        return FileError(f"{self._source}: field {name!r} is {self._values.get(name)!r}: {accepted}")
