"""The reference (`transformers`) and one engine, both on the bundled model in fp32 on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreload.assets import ASSETS
from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import SplitCosts
from foreload.backend.recorder import read_prompts
from foreload.settings import Settings

sys.path.insert(0, str(Path(__file__).parent))

PROMPTS, PROMPT_TOKENS = 64, 96


@pytest.fixture(scope="session")
def reference() -> Any:
    """The bundled model in `transformers`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(ASSETS / "mini", dtype=torch.float32).eval()


def made_up_costs(settings: Settings) -> SplitCosts:
    """A copy takes as long as an expert on the CPU, so that two absent experts or more are shared out."""
    n = np.arange(5, dtype=np.int64)
    return SplitCosts(io_ns=100, gpu_ns=10 * n, cpu_ns=100 * n)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """An engine on the bundled model, with its draft model on the device."""
    options, settings = EngineOptions(context_tokens=256), {"cache_ratio": 0.25, "draft": {"model": "draft"}}
    with Engine(Checkpoint.open("mini"), options, Settings.parse(settings), made_up_costs) as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """64 prompts of 96 tokens: the beginnings of the bundled prompts, then what follows those."""
    texts = [engine.tokenizer.encode(prompt.text) for prompt in read_prompts()]
    longest = max(map(len, texts))
    pieces = [ids[at : at + PROMPT_TOKENS] for at in range(0, longest, PROMPT_TOKENS) for ids in texts]
    chosen = [piece for piece in pieces if len(piece) == PROMPT_TOKENS][:PROMPTS]
    assert len(chosen) == PROMPTS
    return chosen
