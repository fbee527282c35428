"""Text from tokens as they come: whole characters only, and stop strings found wherever tokens split them."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.backend.tokenizer import TextTokenizer

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns tokens into text piece by piece; the pieces together are `TextTokenizer.decode` of all tokens.

    Only the tokens since the last whole character are decoded again, after one piece of context, since some decoders
    treat the beginning of a text differently.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._known = 0  # tokens whose text, `_shown`, has been given out

    def push(self, token: int) -> str:
        """The text that became certain with `token`; empty while a character is incomplete."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith(REPLACEMENT) else self._advance(text)

    def flush(self) -> str:
        """The rest, with a replacement character for what stayed incomplete."""
        return self._advance(self._tokenizer.decode(self._ids))

    def _advance(self, text: str) -> str:
        piece = text[len(self._tokenizer.decode(self._ids[: self._known])) :]
        self._ids = self._ids[self._known :]
        self._known = len(self._ids)
        return piece


class StopFinder:
    """Holds back text that could be the beginning of a stop string, and ends at the first one that is complete."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that no stop string can take back; nothing after a stop was `found`."""
        if self.found:
            return ""
        self._held += text
        at = min((at for stop in self._stops if (at := self._held.find(stop)) >= 0), default=-1)
        self.found = at >= 0
        return self._release(at if self.found else len(self._held) - self._open())

    def flush(self) -> str:
        """What is held back, now that no more text comes; empty once a stop was found."""
        return "" if self.found else self._release(len(self._held))

    def _open(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(self._held[-n:]) for stop in self._stops)), 0)

    def _release(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text


class TextStream:
    """Tokens in, text out: a `Detokenizer` behind a `StopFinder`."""

    def __init__(self, tokenizer: TextTokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer, self._finder = Detokenizer(tokenizer), StopFinder(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found; it and what follows it are not part of the text."""
        return self._finder.found

    def push(self, token: int) -> str:
        """The next certain piece of text."""
        return self._finder.push(self._detokenizer.push(token))

    def flush(self) -> str:
        """The rest, at the end."""
        rest = self._finder.push(self._detokenizer.flush())
        return rest + self._finder.flush()
