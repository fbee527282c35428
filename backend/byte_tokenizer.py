"""The tokenizer of a model that has none: random weights in a published shape take the bytes of a text."""

from __future__ import annotations

from collections.abc import Sequence

from foreload.backend.tokenizer import TextTokenizer


class ByteTokenizer(TextTokenizer):
    """Token ids are UTF-8 bytes; other ids are shown as numbers. Nothing ends a text."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self.stop_ids = frozenset()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of `text`, within the vocabulary."""
        return [byte % self._vocab for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        return b"".join(map(self.piece_bytes, ids)).decode(errors="replace")

    def piece(self, token: int) -> str:
        """One token as text; what is no whole character shows as a replacement."""
        return self.decode([token])

    def piece_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for."""
        return bytes([token]) if token < 256 else f"<{token}>".encode()
