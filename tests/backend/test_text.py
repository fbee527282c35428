"""Text from tokens as they come, and stop strings, against decoding and searching the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from foreload.assets import ASSETS
from foreload.backend.text import REPLACEMENT, Detokenizer, StopFinder, TextStream
from foreload.backend.tokenizer import TextTokenizer

pytestmark = pytest.mark.unit

MINI = TextTokenizer(ASSETS / "mini")


def pieces(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    stream = Detokenizer(tokenizer)
    return [*(stream.push(token) for token in ids), stream.flush()]


@given(st.text(max_size=40))
def test_characters_are_never_split(text: str) -> None:
    ids = MINI.encode(text)
    made = pieces(MINI, ids)
    assert "".join(made) == MINI.decode(ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in made)


@given(st.lists(st.integers(0, 4095), max_size=30))
def test_any_tokens_add_up_to_their_decoding(ids: list[int]) -> None:
    assert "".join(pieces(MINI, ids)) == MINI.decode(ids)


def test_byte_fallback_and_leading_spaces() -> None:
    """As SentencePiece vocabularies do it: a word's space belongs to its token, unknown characters are byte tokens."""
    names = ["<unk>", "▁", "a", "b", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    inner = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = TextTokenizer.__new__(TextTokenizer)
    tokenizer._tokenizer, tokenizer._byte_level = inner, False
    ids = [4, 3, 1, *(5 + byte for byte in "漢字😀".encode()), 4, 2, 1, 1, 3]
    made = pieces(tokenizer, ids)
    assert "".join(made) == inner.decode(ids) == "ab 漢字😀 aa  b"
    assert not any(REPLACEMENT in piece for piece in made)
    assert b"".join(map(tokenizer.piece_bytes, ids[3:13])) == "漢字😀".encode()


@given(st.text(max_size=30))
def test_bytes_of_tokens_are_the_text(text: str) -> None:
    ids = MINI.encode(text)
    assert b"".join(map(MINI.piece_bytes, ids)) == MINI.decode(ids).encode()


@settings(max_examples=300)
@given(st.text("ab", max_size=25), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers())
def test_stop_strings_wherever_the_text_is_cut(text: str, stops: list[str], seed: int) -> None:
    finder, shown, at, random_ = StopFinder(stops), "", 0, random.Random(seed)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    while at < len(text):
        size = random_.randint(1, 4)
        shown += finder.push(text[at : at + size])
        at += size
        assert text.startswith(shown)
        if finder.found:
            break
    shown += finder.flush()
    assert finder.found == bool(ends)
    if ends:
        assert not any(stop in shown for stop in stops)
        assert min(begin for _, begin in ends) == len(shown) or len(shown) in {begin for _, begin in ends}
    else:
        assert shown == text


def test_what_may_be_a_stop_waits_for_the_next_token() -> None:
    stream = TextStream(MINI, ["lo w"])
    shown = [stream.push(token) for token in MINI.encode("Hello world")]
    assert "".join(shown) + stream.flush() == "Hel"
    assert stream.stopped
    free = TextStream(MINI, ["lo x"])
    assert "".join(map(free.push, MINI.encode("Hello"))) == "Hel"
    assert free.flush() == "lo"
