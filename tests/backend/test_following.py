"""Followers: every position's logits, early ends that leave nothing behind, and pushes between prompt chunks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foreload.backend.engine import Engine
from foreload.backend.follow import Follower, StopGeneration
from foreload.settings import Settings

pytestmark = pytest.mark.integration

PROMPT = list(range(3, 20))


class Log(Follower):
    """Keeps what it is told, and ends the request where asked."""

    def __init__(self, prompt_logits: bool = False, chunks: int = 99, tokens: int = 99) -> None:
        self.prompt_logits = prompt_logits
        self.rows: list[Tensor] = []
        self.ids: list[int] = []
        self.chunks: list[int] = []
        self._most = (chunks, tokens)

    def fed(self, tokens: int) -> None:
        self.chunks.append(tokens)
        if len(self.chunks) == self._most[0]:
            raise StopGeneration

    def logits(self, rows: Tensor) -> None:
        self.rows += rows.clone()

    def token(self, token: int) -> None:
        self.ids.append(token)
        if len(self.ids) == self._most[1]:
            raise StopGeneration


@pytest.mark.parametrize("chunk", [1, 5, 17, 64])
def test_logits_of_every_position(make_engine: Callable[..., Engine], chunk: int) -> None:
    """Position by position what feeding a shorter prompt gives, and the chosen token is the likeliest of its row."""
    engine = make_engine(Settings(cache_ratio=0.5, prefill_chunk_tokens=chunk))
    log = Log(prompt_logits=True)
    done = engine.generate(PROMPT, 6, stop=False, follower=log)
    assert len(log.rows) == len(PROMPT) - 1 + 6
    assert log.ids == done.token_ids == [int(row.argmax()) for row in log.rows[-6:]]
    assert sum(log.chunks) == len(PROMPT)
    assert done.token_ids == engine.generate(PROMPT, 6, stop=False).token_ids
    for at in (0, 7, len(PROMPT) - 2):
        short = Log()
        engine.generate(PROMPT[: at + 1], 1, follower=short)
        torch.testing.assert_close(log.rows[at], short.rows[0], atol=1e-4, rtol=1e-4)


def test_stopping_early_keeps_what_there_is(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(Settings(cache_ratio=0.25, predictor="gate", prefetch_depth=1, prefill_chunk_tokens=4))
    expected = engine.generate(PROMPT, 12, stop=False).token_ids
    for tokens in (1, 2, 5):
        done = engine.generate(PROMPT, 12, stop=False, follower=Log(tokens=tokens))
        assert done.token_ids == expected[:tokens]
        assert len(done.steps) == tokens - 1
        engine.brain.check_integrity()
    ended = engine.generate(PROMPT, 12, stop=False, follower=Log(chunks=2))
    assert (ended.token_ids, ended.steps, ended.ttft_ns) == ([], [], 0)
    assert engine.generate(PROMPT, 12, stop=False).token_ids == expected


def test_settings_change_between_prompt_chunks(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(Settings(cache_ratio=1.0, prefill_chunk_tokens=3))
    expected = engine.generate(PROMPT, 8, stop=False).token_ids
    ratios = iter([0.0, 0.9, 0.25, 1.0, 0.5] * 9)

    class Push(Follower):
        def fed(self, tokens: int) -> None:
            engine.apply(Settings(cache_ratio=next(ratios), prefill_chunk_tokens=3 + tokens % 2))

        def token(self, token: int) -> None:
            self.fed(1)

    assert engine.generate(PROMPT, 8, stop=False, follower=Push()).token_ids == expected
    engine.brain.check_integrity()
