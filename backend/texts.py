"""Text to measure or calibrate on: documents with a subject, and windows of tokens cut from them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from foreload.backend.recorder import Prompt, parse_prompt
from foreload.backend.tokenizer import TextTokenizer
from foreload.errors import FileError
from foreload.files import read_bytes


@dataclass(frozen=True)
class Texts:
    """Documents in the order of their files, and what names each file."""

    documents: list[Prompt]
    sources: tuple[str, ...]

    def shuffled(self, seed: int) -> Texts:
        """The same in an order drawn by the seed."""
        documents = list(self.documents)
        Random(seed).shuffle(documents)
        return Texts(documents, self.sources)

    def by_subject(self) -> dict[str, list[str]]:
        """Texts of each subject, in the order in which subjects first come."""
        found: dict[str, list[str]] = {}
        for document in self.documents:
            found.setdefault(document.subject or "text", []).append(document.text)
        return found


def read_texts(paths: Sequence[Path]) -> Texts:
    """JSON lines with `text` and optionally `subject` (or `kind`), one document each; any other file is one document,
    whose subject is the file's name. FileError names the file, and the line that is wrong."""
    documents: list[Prompt] = []
    sources = []
    for path in paths:
        raw = read_bytes(path, "text")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FileError(f"{path}: text is not UTF-8: {error}") from error
        if path.suffix == ".jsonl":
            lines = enumerate(text.splitlines(), 1)
            found = [parse_prompt(path, number, line) for number, line in lines if line.strip()]
        else:
            found = [Prompt(path.stem, text)] if text.strip() else []
        if not found:
            raise FileError(f"{path}: holds no text")
        documents += found
        sources.append(f"{path.name} {hashlib.sha256(raw).hexdigest()[:16]}")
    return Texts(documents, tuple(sources))


def windows(texts: Iterable[str], tokenizer: TextTokenizer, length: int, count: int) -> list[list[int]]:
    """At most `count` windows of `length` tokens, cut from the texts one after the other.

    Each text is led by the end-of-text token, as in training, where the model has one.
    """
    lead = sorted(tokenizer.stop_ids)[:1]
    found: list[list[int]] = []
    rest: list[int] = []
    for text in texts:
        rest += lead + tokenizer.encode(text)
        while len(rest) >= length and len(found) < count:
            found.append(rest[:length])
            rest = rest[length:]
        if len(found) == count:
            break
    return found
