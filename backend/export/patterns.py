"""Placement rules of llama.cpp and ik_llama.cpp: patterns over tensor names, and what a list of them does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from foreload.errors import UsageError

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Routed experts in every spelling, never shared ones or the router; what llama.cpp builds for its own flags."""
_ELSEWHERE = re.compile(r"\(\?(?![:=!])|\\[AZ]|\[\[[:.=]")
"""Spellings that C++ (ECMAScript) and Python do not read alike."""


@dataclass(frozen=True)
class Rule:
    """Tensors whose name holds a match of `pattern` go to `device`."""

    pattern: str
    device: str
    flag: str

    @property
    def because(self) -> str:
        """As an explanation names it: a rule of one's own by its pattern, a flag that makes rules by the flag."""
        return f"{self.flag} {self.pattern}" if self.flag == "-ot" else self.flag

    def hits(self, name: str) -> bool:
        """Whether the tensor's name holds a match."""
        return re.search(self.pattern, name) is not None


def alternation(numbers: Sequence[int]) -> str:
    """A pattern that matches exactly these decimal numbers, without a comma: [3-9]|1[0-9]|2[0-2]."""
    tens: dict[str, set[int]] = {}
    for number in sorted(set(numbers)):
        tens.setdefault(str(number)[:-1], set()).add(number % 10)
    classes = [(prefix, _digits(sorted(units))) for prefix, units in tens.items()]
    return "|".join(prefix + units for prefix, units in classes)


def _digits(units: list[int]) -> str:
    if len(units) == 1:
        return str(units[0])
    runs = []
    for _, run in groupby(enumerate(units), key=lambda pair: pair[1] - pair[0]):
        ends = [unit for _, unit in run]
        runs.append(str(ends[0]) if len(ends) == 1 else f"{ends[0]}{'-' if len(ends) > 2 else ''}{ends[-1]}")
    return f"[{''.join(runs)}]"


def layers_rule(layers: Sequence[int], device: str) -> str:
    """`PATTERN=DEVICE` for the routed experts of these decoder layers."""
    return rf"blk\.({alternation(layers)}){EXPERTS}={device}"


def read_rules(value: str, flag: str = "-ot") -> list[Rule]:
    """The rules in one value: split at every comma, then at the first `=`; UsageError for what is no rule."""
    rules = []
    for entry in value.split(","):
        pattern, equals, device = entry.partition("=")
        if not equals or not pattern or not device:
            raise UsageError(f"{flag}: {entry!r} is no rule: write PATTERN=DEVICE, without a comma in the pattern")
        if _ELSEWHERE.search(pattern):
            raise UsageError(f"{flag}: pattern {pattern!r} is not read alike by C++ and here: use plain groups")
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{flag}: pattern {pattern!r} is no regular expression: {error}") from error
        rules.append(Rule(pattern, device, flag))
    return rules


def first_hit(rules: Sequence[Rule], name: str) -> Rule | None:
    """The rule that decides: the first that hits."""
    return next((rule for rule in rules if rule.hits(name)), None)
