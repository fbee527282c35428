"""Follows the engine through one prompt of a job and tells the client about it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from foreload.backend.engine import Engine
from foreload.backend.follow import Follower, StopGeneration
from foreload.backend.server.job import Choice, Job, Piece, TokenScore
from foreload.backend.server.scoring import Scorer
from foreload.backend.text import TextStream


class Answer(Follower):
    """Choice `index` of a job, by the decoding thread."""

    def __init__(self, engine: Engine, job: Job, index: int, on_token: Callable[[], None]) -> None:
        """`on_token` is called for every token as it comes."""
        ask = job.ask
        self.prompt_logits = ask.echo and ask.top is not None
        self._engine, self._job, self._index, self._on_token = engine, job, index, on_token
        self._prompt = ask.prompts[index]
        self._stream = TextStream(engine.tokenizer, ask.stops)
        self._scorer = None if ask.top is None else Scorer(ask.top)
        self._scored = [TokenScore(self._prompt[0], None, ())] if self.prompt_logits else []
        self._held: list[TokenScore] = []  # of tokens whose text has not been told yet
        self._tokens = 0
        self._ended = False

    @property
    def max_tokens(self) -> int:
        """Tokens to ask the engine for: at least one, which a request for none does not get to see."""
        return max(1, self._job.ask.max_tokens)

    def fed(self, tokens: int) -> None:
        """Between two chunks of the prompt."""
        self._go_on()

    def logits(self, rows: Tensor) -> None:
        """Of the prompt, as long as there are prompt tokens without a score; then of what is generated."""
        if self._scorer is None:
            return
        self._scorer.add(rows)
        if self.prompt_logits and len(self._scored) < len(self._prompt):
            self._scored += self._scorer.take(self._prompt[len(self._scored) :][: len(rows)])

    def token(self, token: int) -> None:
        """Tell what became certain."""
        if self._tokens == 0 and self._job.ask.echo:
            self._tell(self._engine.tokenizer.decode(self._prompt), tuple(self._scored))
        self._tokens += 1
        self._on_token()
        if self._job.ask.max_tokens == 0:
            raise StopGeneration
        self._ended = token in self._engine.tokenizer.stop_ids
        if self._scorer is not None:
            self._held += self._scorer.take([token])
        if text := self._stream.push(token):
            self._tell(text, self._take_held())
        if self._stream.stopped:
            raise StopGeneration
        self._go_on()

    def finish(self) -> int:
        """Tell the rest and why it ended; returns how many tokens were generated."""
        made = min(self._tokens, self._job.ask.max_tokens)
        rest = self._stream.flush()
        scores = () if self._stream.stopped else self._take_held()
        if rest or scores:
            self._tell(rest, scores)
        reason = "stop" if self._stream.stopped or self._ended else "length"
        self._job.deliver(Choice(self._index, reason, made))
        return made

    def _take_held(self) -> tuple[TokenScore, ...]:
        held, self._held = tuple(self._held), []
        return held

    def _tell(self, text: str, scores: tuple[TokenScore, ...]) -> None:
        self._job.deliver(Piece(self._index, text, scores))

    def _go_on(self) -> None:
        if self._job.cancelled.is_set() or self._job.late:
            raise StopGeneration
