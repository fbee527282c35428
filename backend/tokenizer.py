"""Text to tokens and back, from a model folder's `tokenizer.json`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from foreload.errors import FileError
from foreload.files import read_bytes, read_mapping


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write bytes with: printable ones as they are, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class TextTokenizer:
    """The model's tokenizer and the tokens that end a text."""

    def __init__(self, folder: Path) -> None:
        """Read the folder's tokenizer; FileError if it is missing or corrupt."""
        path = folder / "tokenizer.json"
        raw = read_bytes(path, "tokenizer")
        try:
            self._tokenizer = Tokenizer.from_buffer(raw)
        except Exception as error:  # the library raises plain Exception
            raise FileError(f"{path}: not a readable tokenizer: {error}") from error
        self.stop_ids = self._stop_ids(folder)
        self._byte_level = "ByteLevel" in str(self._tokenizer.decoder)

    @staticmethod
    def _stop_ids(folder: Path) -> frozenset[int]:
        for name in ("generation_config.json", "config.json"):
            if (folder / name).exists():
                eos = read_mapping(folder / name, "model configuration").get("eos_token_id")
                if eos is not None:
                    return frozenset([eos] if isinstance(eos, int) else eos)
        return frozenset()

    @property
    def vocabulary(self) -> dict[str, int]:
        """Every token's number."""
        return dict(self._tokenizer.get_vocab())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`; `special`: with the tokens that the model wants around a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(ids))

    def piece(self, token: int) -> str:
        """One token as text, special tokens by their name; what is no whole character shows as replacements."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def piece_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._byte_level and all(letter in _BYTES for letter in name):
            return bytes(_BYTES[letter] for letter in name)
        single = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)
        return bytes([int(single.group(1), 16)]) if single else self.piece(token).encode("utf-8", "replace")
