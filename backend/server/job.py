"""One request on its way through the engine: what is asked, and the events that tell its client about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import uuid4

from foreload.backend.sampling import Sampling


class TokenScore(NamedTuple):
    """A token and its natural log-probability under the model; `top` are the likeliest tokens at its place."""

    token: int
    logprob: float | None  # None: the first token of a text has nothing before it
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Ask:
    """What a request wants of the engine; prompts are answered in order."""

    prompts: tuple[list[int], ...]
    max_tokens: int  # 0: the prompt is only scored
    sampling: Sampling
    stops: tuple[str, ...] = ()
    top: int | None = None  # log-probabilities, with so many of the likeliest tokens; None: none
    echo: bool = False  # the prompt is part of the answer


@dataclass(frozen=True)
class Waiting:
    """`position` requests go first."""

    position: int


@dataclass(frozen=True)
class Piece:
    """Text that became certain in choice `index`, and the scores of the tokens that brought it, if asked for."""

    index: int
    text: str
    scores: tuple[TokenScore, ...] = ()


@dataclass(frozen=True)
class Choice:
    """Choice `index` is complete: why (`stop` or `length`), and how many tokens were generated."""

    index: int
    reason: str
    tokens: int


@dataclass(frozen=True)
class Ended:
    """All choices are complete."""


@dataclass(frozen=True)
class Failed:
    """The request is over before its time."""

    status: int
    message: str
    code: str


Event = Waiting | Piece | Choice | Ended | Failed


@dataclass
class Job:
    """A request in the queue or running. `deliver` is called by any thread, and must not block."""

    ask: Ask
    deliver: Callable[[Event], None]
    deadline: float  # time.monotonic()
    id: str = field(default_factory=lambda: uuid4().hex)
    arrived: float = field(default_factory=time.monotonic)
    cancelled: threading.Event = field(default_factory=threading.Event)
    position: int = 0  # requests that go first, as last told

    @property
    def late(self) -> bool:
        """Whether its time is over."""
        return time.monotonic() > self.deadline
