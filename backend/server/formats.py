"""Answers in the OpenAI API's shapes: one way for completions, one for chats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from foreload.backend.server.job import Ask, TokenScore
from foreload.backend.tokenizer import TextTokenizer

LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


class Format(ABC):
    """Builds whole answers and chunks of streams for one request; knows what its choices have said so far."""

    name: str
    chunk_name: str
    id_prefix: str

    def __init__(self, tokenizer: TextTokenizer, ask: Ask, model: str, job_id: str) -> None:
        self._tokenizer, self._ask = tokenizer, ask
        self._head = {"id": f"{self.id_prefix}-{job_id}", "created": int(time.time()), "model": model}
        self.generated = 0

    def usage(self) -> dict[str, int]:
        """Tokens of all choices."""
        prompt = sum(map(len, self._ask.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": self.generated, "total_tokens": prompt + self.generated}

    def whole(self, texts: Sequence[str], scores: Sequence[Sequence[TokenScore]], reasons: Sequence[str]) -> Any:
        """The answer to a request without a stream."""
        choices = [
            {"index": index, **self.text(text), "logprobs": self.logprobs(index, told), "finish_reason": reason}
            for index, (text, told, reason) in enumerate(zip(texts, scores, reasons, strict=True))
        ]
        return {**self._head, "object": self.name, "choices": choices, "usage": self.usage()}

    def chunk(self, index: int, text: str | None, scores: Sequence[TokenScore], reason: str | None) -> Any:
        """One chunk of a stream; `text` None: nothing new."""
        choice = {"index": index, **self.delta(text), "logprobs": None, "finish_reason": reason}
        if scores:
            choice["logprobs"] = self.logprobs(index, scores)
        return {**self._head, "object": self.chunk_name, "choices": [choice]}

    def last_chunk(self) -> Any:
        """The chunk that tells the usage."""
        return {**self._head, "object": self.chunk_name, "choices": [], "usage": self.usage()}

    @abstractmethod
    def text(self, text: str) -> dict[str, Any]:
        """A choice's text in a whole answer."""

    @abstractmethod
    def delta(self, text: str | None) -> dict[str, Any]:
        """A choice's text in a chunk."""

    @abstractmethod
    def logprobs(self, index: int, scores: Sequence[TokenScore]) -> Any:
        """The next scores of choice `index`; None if none were asked for."""

    def first_chunks(self) -> list[Any]:
        """Chunks before the first text."""
        return []


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


class CompletionFormat(Format):
    """`text_completion` objects; a token that is no whole character is written `bytes:\\x..`."""

    name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, tokenizer: TextTokenizer, ask: Ask, model: str, job_id: str) -> None:
        super().__init__(tokenizer, ask, model, job_id)
        self._offsets = [0] * len(ask.prompts)

    def text(self, text: str) -> dict[str, Any]:
        """As `text`."""
        return {"text": text}

    def delta(self, text: str | None) -> dict[str, Any]:
        """As `text`."""
        return {"text": text or ""}

    def logprobs(self, index: int, scores: Sequence[TokenScore]) -> Any:
        """Four lists with an entry per token."""
        if self._ask.top is None:
            return None
        tokens, offsets, tops = [], [], []
        for score in scores:
            tokens.append(self._name(score.token))
            offsets.append(self._offsets[index])
            self._offsets[index] += len(self._tokenizer.piece(score.token))
            tops.append(self._top(score))
        logprobs = [None if score.logprob is None else finite(score.logprob) for score in scores]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, score: TokenScore) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one; of tokens that read the same, the likeliest."""
        if score.logprob is None:
            return None
        best: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            best.setdefault(self._name(token), finite(logprob))
        return best

    def _name(self, token: int) -> str:
        piece = self._tokenizer.piece(token)
        if "\ufffd" not in piece:
            return piece
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._tokenizer.piece_bytes(token))


class ChatFormat(Format):
    """`chat.completion` objects."""

    name, chunk_name = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def first_chunks(self) -> list[Any]:
        """Who speaks."""
        chunk = self.chunk(0, None, (), None)
        chunk["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return [chunk]

    def text(self, text: str) -> dict[str, Any]:
        """As `message`."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str | None) -> dict[str, Any]:
        """As `delta`."""
        return {"delta": {} if text is None else {"content": text}}

    def logprobs(self, index: int, scores: Sequence[TokenScore]) -> Any:
        """An entry per token, with its bytes."""
        if self._ask.top is None:
            return None
        content = [
            {
                **self._entry(score.token, score.logprob or 0.0),
                "top_logprobs": [self._entry(token, logprob) for token, logprob in score.top],
            }
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        made = self._tokenizer.piece_bytes(token)
        return {"token": self._tokenizer.piece(token), "logprob": finite(logprob), "bytes": list(made)}
