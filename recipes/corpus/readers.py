"""Readers: one function per format, each turning a file into documents (key, text)."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
import subprocess
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from .markup import html_to_text, info_to_text, pod_to_text, rst_to_text

Document = tuple[str, str]
_COMMENT = re.compile(r"\A\s*(/\*.*?\*/|(?://[^\n]*\n)+|(?:#[^\n]*\n)+)", re.S)


def read_text(path: Path) -> str:
    """Content of a plain or gzipped file; Latin-1 where it is not UTF-8."""
    raw = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        raw = gzip.decompress(raw)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def _one(convert: Callable[[str], str]) -> Callable[[Path], Iterator[Document]]:
    def read(path: Path) -> Iterator[Document]:
        yield "", convert(read_text(path))

    return read


def _man(path: Path) -> Iterator[Document]:
    run = subprocess.run(
        ["mandoc", "-T", "utf8", "-O", "width=92"], input=read_text(path).encode(), capture_output=True, check=False
    )
    lines = re.sub(r".\x08", "", run.stdout.decode("utf-8", "replace")).split("\n")
    yield "", "\n".join(line.removeprefix("     ") for line in lines[1:-2])


def _code(text: str) -> str:
    """Source code without the licence comment at its top."""
    head = _COMMENT.match(text)
    while head and re.search(r"copyright|licen[cs]e|SPDX", head.group(0), re.I):
        text = text[head.end() :]
        head = _COMMENT.match(text)
    return text.lstrip("\n")


def _dict(path: Path) -> Iterator[Document]:
    """A dictd database: consecutive entries gathered to documents of about 3,000 bytes."""
    raw = gzip.decompress(path.read_bytes())
    index = path.with_name(path.name.removesuffix(".dict.dz") + ".index")
    starts = set()
    for line in index.read_text("utf-8", "replace").splitlines():
        fields = line.split("\t")
        if len(fields) >= 3 and not fields[0].startswith("00"):
            starts.add(_b64(fields[1]))
    begin, ordered = -1, sorted(starts)
    for start in [*ordered, len(raw)]:
        if begin < 0:
            begin = start
        if start - begin >= 3000 or (start == len(raw) and start > begin):
            yield str(begin), _dict_entries(raw[begin:start].decode("utf-8", "replace"))
            begin = start


def _dict_entries(text: str) -> str:
    text = re.sub(r"\n *\[[^\[\]]*(?:Webster|WordNet|PJC|Century|1913 W)[^\[\]]*\]", "", text)
    return re.sub(r"[{}]", "", text)


def _b64(digits: str) -> int:
    padded = digits.rjust(-(-len(digits) // 4) * 4, "A")
    return int.from_bytes(base64.b64decode(padded), "big")


def _verses(path: Path) -> Iterator[Document]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for (book, chapter), verses in groupby(rows, key=lambda r: (r["book"], r["chapter"])):
        text = "\n".join(f"{v['verse']} {v['text']}" for v in verses)
        yield f"{book} {chapter}", f"{book}, chapter {chapter}\n\n{text}"


def _rdb(path: Path) -> Iterator[Document]:
    """Character vectors of an R lazy-load database, split at chapter headings."""
    raw, at, book = path.read_bytes(), 0, 0
    while at + 4 < len(raw):
        start = raw.find(b"\x78", at)
        if start < 0:
            return
        inflater = zlib.decompressobj()
        try:
            data = inflater.decompress(raw[start:])
        except zlib.error:
            at = start + 1
            continue
        at = len(raw) - len(inflater.unused_data)
        lines = _r_strings(data)
        if len(lines) > 1000:
            book += 1
            for number, chapter in enumerate(re.split(r"(?mi)^(?=(?:chapter|volume) )", "\n".join(lines))):
                yield f"book {book} part {number}", chapter


def _r_strings(data: bytes) -> list[str]:
    """Strings of the longest STRSXP in an R serialisation (XDR): flags, length, then bytes."""
    best: list[str] = []
    for found in re.finditer(rb"\x00\x00\x00\x10(?=....\x00\x04\x00\x09)", data, re.S):
        at, strings = found.end() + 4, []
        for _ in range(struct.unpack(">i", data[found.end() : found.end() + 4])[0]):
            size = struct.unpack(">i", data[at + 4 : at + 8])[0]
            strings.append(data[at + 8 : at + 8 + max(size, 0)].decode("utf-8", "replace"))
            at += 8 + max(size, 0)
        if len(strings) > len(best):
            best = strings
    return best


READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    "text": _one(lambda text: text),
    "html": _one(html_to_text),
    "xml": _one(html_to_text),
    "pod": _one(pod_to_text),
    "info": _one(info_to_text),
    "rst": _one(rst_to_text),
    "code": _one(_code),
    "man": _man,
    "dict": _dict,
    "verses": _verses,
    "rdb": _rdb,
}
