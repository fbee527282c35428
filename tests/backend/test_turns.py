from __future__ import annotations

import threading

import pytest
import torch

from foreload.backend.engine import Engine, EngineOptions
from foreload.settings import Settings


@pytest.fixture
def engine():
    with Engine.load("mini", EngineOptions(context_tokens=512), Settings(cache_ratio=0.25)) as loaded:
        yield loaded


@pytest.mark.integration
def test_another_thread_applies_settings_while_a_request_runs(engine: Engine) -> None:
    ids = engine.tokenizer.encode("The kernel maps a page of memory")
    expected = engine.generate(ids, 200, stop=False).token_ids
    seen: list[Settings] = []
    started = threading.Event()

    def push() -> None:
        started.wait()
        for ratio in (0.5, 0.0, 1.0):
            engine.apply(Settings(cache_ratio=ratio))

    def watch(_: int) -> None:
        started.set()
        seen.append(engine.settings)

    pusher = threading.Thread(target=push)
    pusher.start()
    found = engine.generate(ids, 200, on_token=watch, stop=False).token_ids
    pusher.join()
    assert found == expected
    assert seen[-1].cache_ratio == 1.0, "all three were taken before the request ended"
    engine.brain.check_integrity()


@pytest.mark.integration
@pytest.mark.parametrize("settings", [Settings(cache_ratio=0.1), Settings(cache_ratio=0.1, miss_action="cpu")])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_an_interrupted_request_leaves_the_engine_usable(
    engine: Engine, settings: Settings, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.apply(settings)
    ids = engine.tokenizer.encode("The kernel maps a page of memory")
    expected = engine.generate(ids, 12, stop=False).token_ids
    original, calls = engine.forward.decoder.attend, []

    def interrupt(layer: int, x: torch.Tensor, position: int) -> torch.Tensor:
        calls.append(layer)
        if len(calls) == (5 if phase == "prefill" else 8 * 3 + 5):
            raise KeyboardInterrupt
        return original(layer, x, position)

    monkeypatch.setattr(engine.forward.decoder, "attend", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(ids, 12, stop=False)
    monkeypatch.undo()
    assert engine.generate(ids, 12, stop=False).token_ids == expected
    engine.brain.check_integrity()
