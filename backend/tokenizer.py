"""Text to tokens and back, from a model folder's `tokenizer.json`."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from foreload.errors import FileError
from foreload.files import read_bytes, read_mapping


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

    @staticmethod
    def _stop_ids(folder: Path) -> frozenset[int]:
        for name in ("generation_config.json", "config.json"):
            if (folder / name).exists():
                eos = read_mapping(folder / name, "model configuration").get("eos_token_id")
                if eos is not None:
                    return frozenset([eos] if isinstance(eos, int) else eos)
        return frozenset()

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        return str(self._tokenizer.decode(ids))
