"""A conversation with an engine: each turn renders the whole chat and generates the next message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from foreload.backend.chat import ChatTemplate, Message
from foreload.backend.engine import Engine
from foreload.backend.follow import Follower, StopGeneration
from foreload.backend.generation import Generation
from foreload.backend.sampling import Sampling
from foreload.backend.text import TextStream


@dataclass
class Conversation:
    """Messages so far; `say` adds the user's and the model's next one."""

    engine: Engine
    template: ChatTemplate
    messages: list[Message] = field(default_factory=list)

    def say(
        self, text: str, max_tokens: int, sampling: Sampling, on_text: Callable[[str], None]
    ) -> tuple[str, Generation]:
        """The answer to `text`, given to `on_text` piece by piece, and what it cost.

        UsageError, with the conversation as it was, if it does not fit the context or the template refuses it.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        prompt_ids = self.engine.tokenizer.encode(self.template.render(asked), special=False)
        answer = _Answer(TextStream(self.engine.tokenizer, self.template.stops), on_text)
        generation = self.engine.generate(prompt_ids, max_tokens, sampling, follower=answer)
        answer.show(answer.stream.flush())
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer.text, generation


class _Answer(Follower):
    """Shows text as it becomes certain and ends at a stop string."""

    def __init__(self, stream: TextStream, on_text: Callable[[str], None]) -> None:
        self.stream, self.text = stream, ""
        self._on_text = on_text

    def token(self, token: int) -> None:
        """Show the next piece."""
        self.show(self.stream.push(token))
        if self.stream.stopped:
            raise StopGeneration

    def show(self, piece: str) -> None:
        """Add to the text."""
        self.text += piece
        if piece:
            self._on_text(piece)
