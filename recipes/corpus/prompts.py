"""Write `prompts.jsonl`: eight openings of held-out documents per kind, 600 to 900 characters each.

python -m recipes.corpus.prompts --work .build/corpus --out foreload/assets/prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

from .sources import KINDS
from .tokenizer import read_rows

PER_KIND = 8
LEAST, MOST = 600, 900


def opening(text: str) -> str:
    """The longest start of `text` within the limits that ends at a paragraph, line, sentence or word."""
    head = text[:MOST]
    if len(text) <= MOST:
        return head
    for mark in ("\n\n", "\n", ". ", " "):
        at = head.rfind(mark, LEAST)
        if at >= LEAST:
            return head[:at].rstrip() + ("." if mark == ". " else "")
    return head


def choose(path: Path) -> list[dict[str, str]]:
    """Rows {"subject", "text"}: documents spread over the sources of each kind."""
    by_kind: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in KINDS}
    for row in read_rows(path):
        if len(row["text"]) >= 2 * LEAST:
            by_kind[row["kind"]][row["source"]].append(row["text"])
    chosen = []
    for kind in KINDS:
        queues = [list(texts) for texts in by_kind[kind].values()]
        picked: list[str] = []
        while len(picked) < PER_KIND and any(queues):
            for queue in queues:
                if queue and len(picked) < PER_KIND:
                    picked.append(opening(queue.pop(0)))
        chosen += [{"subject": kind, "text": text} for text in picked]
    return chosen


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".build/corpus"))
    parser.add_argument("--out", type=Path, default=Path("foreload/assets/prompts.jsonl"))
    args = parser.parse_args()
    rows = choose(args.work / "heldout.jsonl")
    args.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} prompts, {min(len(r['text']) for r in rows)} to {max(len(r['text']) for r in rows)} characters")


if __name__ == "__main__":
    main()
