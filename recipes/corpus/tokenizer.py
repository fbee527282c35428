"""Train the byte-level BPE and pack the corpus into token ids.

    python -m recipes.corpus.tokenizer --work .build/corpus --out foreload/assets/mini

writes tokenizer.json and tokenizer_config.json to `--out`, and to `--work`: `train.bin.xz` (uint16 ids, documents
in hash order, each closed by <|endoftext|>), `heldout.bin.xz` and `heldout.meta.json` (kind, bytes and id range of
every held-out document).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

END = "<|endoftext|>"
VOCABULARY = 4096
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE_BYTES_PER_KIND = 8_000_000


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a corpus file."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def sample(path: Path) -> Iterator[str]:
    """Up to `SAMPLE_BYTES_PER_KIND` of text of each kind, so that no kind dominates the merges."""
    taken: dict[str, int] = {}
    for row in read_rows(path):
        if taken.get(row["kind"], 0) < SAMPLE_BYTES_PER_KIND:
            taken[row["kind"]] = taken.get(row["kind"], 0) + len(row["text"])
            yield row["text"]


def train(path: Path) -> Tokenizer:
    """A byte-level BPE of 4,096 tokens; id 0 is <|endoftext|>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(sample(path), trainer)
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """tokenizer.json and the configuration that `transformers.AutoTokenizer` reads."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def pack(tokenizer: Tokenizer, rows: list[dict[str, Any]]) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """(ids as uint16, per document: kind, bytes, begin, end), documents in hash order."""
    rows = sorted(rows, key=lambda r: hashlib.sha256((r["source"] + "\n" + r["key"]).encode()).digest())
    end = tokenizer.token_to_id(END)
    parts: list[np.ndarray] = []
    meta: list[dict[str, Any]] = []
    at = 0
    for first in range(0, len(rows), 500):
        batch = rows[first : first + 500]
        for row, encoding in zip(batch, tokenizer.encode_batch([r["text"] for r in batch]), strict=True):
            ids = np.array([*encoding.ids, end], dtype=np.uint16)
            size = len(row["text"].encode())
            meta.append({"kind": row["kind"], "bytes": size, "begin": at, "end": at + len(ids)})
            parts.append(ids)
            at += len(ids)
    return np.concatenate(parts), meta


def write_packed(path: Path, ids: np.ndarray) -> None:
    """xz-compressed little-endian uint16 ids."""
    path.write_bytes(lzma.compress(ids.astype("<u2").tobytes(), preset=4))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".build/corpus"))
    parser.add_argument("--out", type=Path, default=Path("foreload/assets/mini"))
    args = parser.parse_args()
    tokenizer = train(args.work / "train.jsonl")
    save(tokenizer, args.out)
    for part in ("heldout", "train"):
        ids, meta = pack(tokenizer, list(read_rows(args.work / f"{part}.jsonl")))
        write_packed(args.work / f"{part}.bin.xz", ids)
        if part == "heldout":
            (args.work / "heldout.meta.json").write_text(json.dumps(meta))
        size = sum(m["bytes"] for m in meta)
        print(f"{part}: {size:,} bytes, {len(ids):,} tokens, {size / len(ids):.2f} bytes per token")


if __name__ == "__main__":
    main()
