"""Build the corpus: fetch, read, clean, cap, split.

    python -m recipes.corpus.build --work .build/corpus

writes `<work>/train.jsonl` and `<work>/heldout.jsonl` (rows: kind, source, key, text) and the table `SOURCES.md`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .clean import MIN_CHARS, Deduper, is_english, normalise
from .readers import READERS
from .sources import KINDS, Source, fetch, load_sources

KIND_CAP_BYTES = 21_000_000
HELDOUT_SHARE = 0.02
HELDOUT_MIN_BYTES = 200_000
HELDOUT_MAX_DOC_BYTES = 60_000


@dataclass(frozen=True)
class Doc:
    """One cleaned document."""

    kind: str
    source: str
    key: str
    text: str

    @property
    def order(self) -> str:
        """Stable pseudo-random order: a hash of where the document comes from."""
        return hashlib.sha256(f"{self.source}\n{self.key}".encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """UTF-8 length of the text."""
        return len(self.text.encode())


def read_source(job: tuple[Source, Path]) -> list[Doc]:
    """All normalised English documents of one source."""
    source, work = job
    docs = []
    root = work / "tree" / source.folder
    for path in source.files(work):
        for key, raw in READERS[source.format](path):
            text = normalise(raw, source.kind == "code")
            if len(text) >= MIN_CHARS and is_english(text, source.kind):
                name = path.relative_to(root).as_posix()
                docs.append(Doc(source.kind, source.package, f"{name}#{key}" if key else name, text))
    return docs


def dedupe(docs: list[Doc]) -> list[Doc]:
    """Drop repeated paragraphs over the whole corpus, in a stable order of documents."""
    deduper = Deduper()
    kept = []
    for doc in docs:
        text = deduper.filter(doc.text, doc.kind == "code")
        if len(text) >= MIN_CHARS:
            kept.append(Doc(doc.kind, doc.source, doc.key, text))
    return kept


def take(docs: list[Doc], cap_bytes: float) -> list[Doc]:
    """Documents in hash order until `cap_bytes` is reached."""
    kept, total = [], 0
    for doc in sorted(docs, key=lambda d: d.order):
        if total + doc.size_bytes <= cap_bytes:
            kept.append(doc)
            total += doc.size_bytes
    return kept


def split(docs: list[Doc]) -> tuple[list[Doc], list[Doc]]:
    """(train, held-out) of one kind, by document in hash order."""
    want = max(HELDOUT_MIN_BYTES, HELDOUT_SHARE * sum(d.size_bytes for d in docs))
    train, heldout, got = [], [], 0
    for doc in sorted(docs, key=lambda d: d.order, reverse=True):
        if got < want and doc.size_bytes <= HELDOUT_MAX_DOC_BYTES:
            heldout.append(doc)
            got += doc.size_bytes
        else:
            train.append(doc)
    return train, heldout


def write_rows(path: Path, docs: list[Doc]) -> None:
    """One JSON object per line."""
    with path.open("w", encoding="utf-8") as out:
        for doc in docs:
            out.write(json.dumps(vars(doc), ensure_ascii=False) + "\n")


def write_sources(path: Path, sources: list[Source], versions: dict[str, str], docs: list[Doc]) -> None:
    """The table of what the corpus is made of."""
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for doc in docs:
        sizes[doc.kind, doc.source].append(doc.size_bytes)
    lines = [
        "# Sources of the corpus", "",
        "Written by `recipes.corpus.build`. Bytes: UTF-8 text kept after cleaning, caps and removal of duplicates.", "",
        "| kind | package | version | documents | bytes | licence | project |", "|---|---|---|---:|---:|---|---|",
    ]  # fmt: skip
    for s in sources:
        kept = sizes[s.kind, s.package]
        lines.append(
            f"| {s.kind} | {s.package} ({s.manager}) | {versions[s.package]} | {len(kept):,} | {sum(kept):,} "
            f"| {s.licence} | <{s.url}> |"
        )
    for kind in KINDS:
        total = sum(sum(v) for (k, _), v in sizes.items() if k == kind)
        lines.append(f"| **{kind}** | all | | | **{total:,}** | | |")
    lines.append(f"| **total** | | | | **{sum(sum(v) for v in sizes.values()):,}** | | |")
    path.write_text("\n".join(lines) + "\n")


def build(work: Path, workers: int) -> None:
    """Everything, from the archives to the split corpus."""
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    sources = load_sources()
    versions = {s.package: fetch(s, work) for s in sources}
    with ProcessPoolExecutor(workers) as pool:
        lists = list(pool.map(read_source, [(s, work) for s in sources]))
    by_kind: dict[str, list[Doc]] = defaultdict(list)
    for source, docs in zip(sources, lists, strict=True):
        by_kind[source.kind] += take(docs, source.cap_mb * 1e6 or float("inf"))
        print(f"{source.kind:12} {source.package:28} {len(docs):6} documents", file=sys.stderr)
    clean = dedupe([doc for kind in KINDS for doc in by_kind[kind]])
    train: list[Doc] = []
    heldout: list[Doc] = []
    for kind in KINDS:
        kept = take([d for d in clean if d.kind == kind], KIND_CAP_BYTES)
        parts = split(kept)
        train += parts[0]
        heldout += parts[1]
        print(
            f"{kind}: train {sum(d.size_bytes for d in parts[0]):,}, held-out {sum(d.size_bytes for d in parts[1]):,}"
        )
    write_rows(work / "train.jsonl", train)
    write_rows(work / "heldout.jsonl", heldout)
    write_sources(Path(__file__).with_name("SOURCES.md"), sources, versions, train + heldout)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".build/corpus"))
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    build(args.work, args.workers)


if __name__ == "__main__":
    main()
