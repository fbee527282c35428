"""What OpenAI clients ask: text, streams, stops, seeds, log-probabilities, usage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from http_client import Client
from openai import BadRequestError, NotFoundError, OpenAI
from running_server import CONTEXT, Running

from foreload.backend.chat import ChatTemplate
from foreload.backend.engine import Engine
from foreload.backend.sampling import Sampling

pytestmark = pytest.mark.integration

PROMPT = "The kernel is"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a kernel?"}]


@pytest.fixture
def client(running: Running) -> Any:
    with OpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def greedy(engine: Engine, prompt: str, tokens: int, special: bool = True) -> str:
    ids = engine.tokenizer.encode(prompt, special)
    return engine.tokenizer.decode(engine.generate(ids, tokens).token_ids)


def test_chat_streams_what_the_engine_generates(client: OpenAI, engine: Engine) -> None:
    expected = greedy(engine, ChatTemplate.of(engine.checkpoint.folder).render(MESSAGES), 24, special=False)
    asked: Any = {"model": "mini", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == expected
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1


def test_completions_and_models(client: OpenAI, engine: Engine) -> None:
    assert [model.id for model in client.models.list()] == ["mini"]
    done = client.completions.create(model="mini", prompt=PROMPT, max_tokens=12, temperature=0)
    assert done.choices[0].text == greedy(engine, PROMPT, 12)
    assert done.usage is not None
    assert done.usage.total_tokens == len(engine.tokenizer.encode(PROMPT)) + 12
    with pytest.raises(NotFoundError, match="model 'gpt' is not served here: this is 'mini'"):
        client.completions.create(model="gpt", prompt=PROMPT)
    with pytest.raises(BadRequestError, match=f"exceed the context of {CONTEXT} tokens by"):
        client.completions.create(model="mini", prompt=PROMPT, max_tokens=CONTEXT)


def test_several_prompts_as_text_or_tokens(ask: Client, engine: Engine) -> None:
    prompts = [PROMPT, "Memory", "é漢😀"]
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    expected = [greedy(engine, prompt, 8) for prompt in prompts]
    for given in (prompts, ids):
        reply = ask.complete(given).json
        assert [choice["text"] for choice in reply["choices"]] == expected
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
        streamed = ask.complete(given, stream=True).events
        for index in range(3):
            texts = [c["text"] for event in streamed for c in event["choices"] if c["index"] == index]
            assert "".join(texts) == expected[index]
    assert ask.complete(ids[0]).json["choices"][0]["text"] == expected[0]


def test_stop_strings_across_tokens(ask: Client, engine: Engine) -> None:
    text = greedy(engine, PROMPT, 24)
    stop = text[9:14]
    at = text.find(stop)
    for fields in ({"stop": stop}, {"stop": ["not there", stop]}):
        choice = ask.complete(PROMPT, max_tokens=24, **fields).json["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[:at], "stop")
        events = ask.complete(PROMPT, max_tokens=24, stream=True, **fields).events
        assert "".join(event["choices"][0]["text"] for event in events) == text[:at]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_seeds(ask: Client, engine: Engine) -> None:
    def text(**fields: Any) -> str:
        return str(ask.complete(PROMPT, max_tokens=16, temperature=1.5, **fields).json["choices"][0]["text"])

    ids = engine.tokenizer.encode(PROMPT)
    drawn = engine.generate(ids, 16, Sampling(1.5, 0.9, 7)).token_ids
    assert text(seed=7, top_p=0.9) == engine.tokenizer.decode(drawn)
    assert text(seed=-(2**63)) == text(seed=-(2**63))
    assert len({text() for _ in range(4)}) > 1


def test_log_probabilities_do_not_depend_on_how_they_are_asked(ask: Client) -> None:
    """Echoed and generated tokens have the same numbers; the offsets point at the tokens in the text."""
    whole = ask.complete(PROMPT, echo=True, logprobs=3).json["choices"][0]
    told = whole["logprobs"]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert "".join(told["tokens"]) == whole["text"]
    ends = [*told["text_offset"][1:], len(whole["text"])]
    assert [whole["text"][a:b] for a, b in zip(told["text_offset"], ends, strict=True)] == told["tokens"]
    assert all(a <= b for a, b in pairwise(ends))
    for logprob, top, token in list(zip(told["token_logprobs"], told["top_logprobs"], told["tokens"], strict=True))[1:]:
        assert top[token] == logprob
        assert 3 <= len(top) <= 4
    events = ask.complete(PROMPT, echo=True, logprobs=3, stream=True).events
    streamed = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert [x for part in streamed for x in part["token_logprobs"]] == told["token_logprobs"]
    assert [x for part in streamed for x in part["text_offset"]] == told["text_offset"]
    again = ask.complete(whole["text"], echo=True, logprobs=0, max_tokens=0).json["choices"][0]
    assert again["text"] == whole["text"]
    assert again["logprobs"]["token_logprobs"][1:] == pytest.approx(told["token_logprobs"][1:], abs=1e-4)


def test_chat_log_probabilities_have_bytes(ask: Client) -> None:
    asked = {"model": "mini", "messages": MESSAGES, "max_tokens": 6, "temperature": 0}
    choice = ask("POST", "/v1/chat/completions", {**asked, "logprobs": True, "top_logprobs": 2}).json["choices"][0]
    told = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in told).decode() == choice["message"]["content"]
    assert [entry["token"] for entry in told] == [entry["top_logprobs"][0]["token"] for entry in told]
    assert all(entry["logprob"] == entry["top_logprobs"][0]["logprob"] for entry in told)


def test_ends_at_the_end_token(ask: Client, engine: Engine, monkeypatch: Any) -> None:
    ids = engine.generate(engine.tokenizer.encode(PROMPT), 6).token_ids
    at = ids.index(ids[3])
    monkeypatch.setattr(engine.tokenizer, "stop_ids", frozenset([ids[3]]))
    choice = ask.complete(PROMPT, max_tokens=20).json
    assert choice["choices"][0]["finish_reason"] == "stop"
    assert choice["usage"]["completion_tokens"] == at + 1
