"""Mutated configurations and damaged weight files: one clear line each, never a crash, a hang or other weights."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load
from test_random_weights import BY_NAME, SMALL
from tiny_models import save_tiny

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint, read_shape
from foreload.backend.models.published import published_config, published_names
from foreload.errors import ForeloadError
from foreload.settings import Settings

ODD: tuple[Any, ...] = (
    None, 0, -1, 1, 2, 3, 7, 8, 64, 1.5, 1e-300, 1e300, 10**12, 10**400, float("nan"), float("inf"), True, False, "",
    "8", "silu", [], [0], [0, 1], ["dense"], [None], {}, {"rope_type": "yarn"}, {"rope_type": "llama3", "factor": 8.0},
    {"quant_method": "fp8"}, {"quant_method": "mxfp4"}, {"factor": 2}, "\u2028", "x" * 100_000,
)  # fmt: skip


def mutated(config: dict[str, Any], random: Random) -> dict[str, Any]:
    """Some fields removed, replaced, or given to each other."""
    changed = dict(config)
    for _ in range(random.randint(1, 3)):
        name = random.choice(list(changed))
        match random.randrange(4):
            case 0:
                del changed[name]
            case 1:
                changed[name] = changed[random.choice(list(changed))]
            case _:
                changed[name] = random.choice(ODD)
    return changed


def check_line(error: ForeloadError, place: str) -> bool:
    """False, once the error is known to be one line that begins with the place."""
    assert str(error).startswith(place)
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 600
    return False


def check_configuration(seed: int) -> bool:
    """Whether a mutated configuration is accepted; if so a small model of it runs, or is refused."""
    random = Random(seed)
    name = random.choice(published_names())
    config = mutated({**published_config(name), **SMALL, **BY_NAME.get(name, {}), "num_hidden_layers": 2}, random)
    try:
        _, shape = read_shape(json.loads(json.dumps(config)), "config.json")
    except ForeloadError as error:
        return check_line(error, "config.json: ")
    if shape.total_weights > 3e6:
        return True
    checkpoint = Checkpoint.random(name, **dict.fromkeys(published_config(name)) | config)
    try:
        engine = Engine(checkpoint, EngineOptions(context_tokens=16), Settings(cache_ratio=0.0))
    except ForeloadError as error:
        check_line(error, "")
        return True
    with engine:
        decoder = engine.forward.decoder
        logits, seen = decoder.logits, []
        decoder.logits = lambda x: seen.append(logits(x)) or seen[-1]
        assert len(engine.generate([0], 2, stop=False).token_ids) == 2
    assert all(torch.isfinite(one).all() for one in seen)
    return True


def damage(whole: bytes, random: Random) -> bytes:
    """Cut short, or with bits turned over in the header or anywhere."""
    if random.random() < 0.3:
        return whole[: random.randrange(len(whole))]
    header = 8 + int.from_bytes(whole[:8], "little")
    changed = bytearray(whole)
    for _ in range(random.choice((1, 1, 2, 8))):
        at = random.randrange(random.choice((8, header, len(whole))))
        changed[at] ^= 1 << random.randrange(8)
    return bytes(changed)


def check_weights(folder: Path, whole: bytes, seed: int) -> bool:
    """Whether damaged weights are loaded; if so they are what the file holds, by another reader."""
    damaged = damage(whole, Random(seed))
    (folder / "model.safetensors").write_bytes(damaged)
    checkpoint = Checkpoint.open(str(folder))
    try:
        dense = {name: tensor for layer, name, tensor in checkpoint.read_dense() if layer in (None, 1)}
        experts = {(at, e, part): tensor for at, e, part, tensor in checkpoint.read_experts()}
    except ForeloadError as error:
        return check_line(error, str(folder))
    stored = load(damaged)
    for (at, expert, part), tensor in experts.items():
        assert torch.equal(tensor, stored[f"model.layers.{at}.mlp.experts.{expert}.{part}_proj.weight"])
    assert torch.equal(dense["embed"], stored["model.embed_tokens.weight"])
    assert torch.equal(dense["gate"], stored["model.layers.1.mlp.gate.weight"])
    assert all(torch.isfinite(tensor).all() for tensor in [*dense.values(), *experts.values()])
    return True


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    save_tiny(tmp_path / "tiny")
    return (tmp_path / "tiny" / "model.safetensors").read_bytes()


def check_all(folder: Path, whole: bytes, seeds: range) -> None:
    accepted = [check_configuration(seed) for seed in seeds]
    assert {True, False} == set(accepted)
    loaded = [check_weights(folder, whole, seed) for seed in seeds]
    assert {True, False} == set(loaded)


@pytest.mark.integration
def test_sample(tmp_path: Path, whole: bytes) -> None:
    check_all(tmp_path / "tiny", whole, range(40))


@pytest.mark.slow
def test_500(tmp_path: Path, whole: bytes) -> None:
    check_all(tmp_path / "tiny", whole, range(1000, 1500))
