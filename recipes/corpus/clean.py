"""Cleaning of documents: characters, boilerplate, language, duplicates."""

from __future__ import annotations

import hashlib
import re
import unicodedata

_QUOTES = str.maketrans(
    {
        "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2010": "-", "\u2011": "-", "\u2012": "-",
        "\u2013": "-", "\u2014": "--", "\u2212": "-", "\u2026": "...", "\u00a0": " ", "\u2022": "*", "\u00ad": "",
        "\u200b": "", "\ufeff": "", "\u2192": "->", "\ufffd": "", "\u00b6": "", "\f": "\n", "\r": "",
    }
)  # fmt: skip
_STOP = re.compile(r"\b(?:the|of|and|to|in|is|a|for|that|it|with|as|be|or|this|are|not|by|on|from)\b", re.I)
_BOILERPLATE = re.compile(
    r"permission is granted|warranty|all rights reserved|this program is free software|copyright \(c\)|"
    r"©|see the gnu general public|redistribution and use|javascript|mailing list archive|^\W*$|"
    r"(?:^|\n)(?:prev|next|up|home|previous|table of contents)(?:\s+(?:prev|next|up|home))*\s*$",
    re.I,
)
MIN_CHARS = 200


def normalise(text: str, is_code: bool) -> str:
    """NFC, plain quotes, no control characters, no trailing or repeated blanks."""
    text = unicodedata.normalize("NFC", text).translate(_QUOTES)
    if not is_code:
        text = text.expandtabs(8)
    text = "".join(c for c in text if c in "\n\t" or c.isprintable())
    text = re.sub(r"[ \t]+(?=\n|\Z)", "", text)
    text = re.sub(r"([-=~*_.#^+])\1{23,}", lambda m: m.group(1) * 24, text)
    if not is_code:
        text = re.sub(r"(?<=\S) {4,}", "   ", text)
        text = re.sub(r"(?m)^ {13,}", " " * 12, text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def is_english(text: str, kind: str) -> bool:
    """Mostly ASCII, and (outside code and dictionaries) enough of the commonest words."""
    ascii_share = sum(c < "\x80" for c in text) / len(text)
    if ascii_share < 0.97:
        return False
    if kind in ("code", "dictionary"):
        return True
    words = len(re.findall(r"[A-Za-z]+", text)) or 1
    return len(_STOP.findall(text)) / words >= 0.12


class Deduper:
    """Drops documents and paragraphs seen before, and licence boilerplate, across the whole corpus."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def filter(self, text: str, is_code: bool) -> str:
        """`text` without known paragraphs; in code only long ones are dropped."""
        least = 200 if is_code else 40
        kept = []
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= least and not self._fresh(paragraph):
                continue
            if not is_code and len(paragraph) < 600 and _BOILERPLATE.search(paragraph):
                continue
            kept.append(paragraph)
        return "\n\n".join(kept).strip("\n")

    def _fresh(self, paragraph: str) -> bool:
        key = hashlib.blake2b(re.sub(r"\s+", " ", paragraph).encode(), digest_size=8).digest()
        if key in self._seen:
            return False
        self._seen.add(key)
        return True
