"""Log-likelihoods as evaluation harnesses ask for them, beside those that `transformers` computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from http_client import Client
from running_server import Running

from foreload.assets import ASSETS
from foreload.backend.recorder import read_prompts

pytestmark = pytest.mark.integration


@cache
def oracle() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ASSETS / "mini", dtype=torch.float32)


def expected(ids: list[int]) -> tuple[list[float], list[bool]]:
    """Of each token after the first: its log-probability, and whether it is the likeliest."""
    with torch.inference_mode():
        rows = oracle()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    chosen = torch.tensor(ids[1:])
    return rows.gather(1, chosen[:, None])[:, 0].tolist(), (rows.argmax(-1) == chosen).tolist()


@pytest.mark.parametrize("batch", [1, 3])
def test_log_likelihoods_are_those_of_transformers(ask: Client, running: Running, batch: int) -> None:
    """The request that lm-eval's `local-completions` sends, and how it reads the answer."""
    tokenizer = running.engine.tokenizer
    prompts = [tokenizer.encode(prompt.text)[:60] for prompt in read_prompts()[: 2 * batch]]
    for at in range(0, len(prompts), batch):
        asked = prompts[at : at + batch]
        reply = ask.complete(asked, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
        for ids, choice in zip(asked, reply.json["choices"], strict=True):
            told = choice["logprobs"]["token_logprobs"][1:-1]
            greedy = [
                logprob == max(top.values())
                for logprob, top in zip(told, choice["logprobs"]["top_logprobs"][1:-1], strict=True)
            ]
            logprobs, likeliest = expected(ids)
            assert told == pytest.approx(logprobs, abs=2e-4)
            assert greedy == likeliest
