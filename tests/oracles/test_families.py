"""Every family in every layout: logits and routing of prefill and 64 decode steps equal those of `transformers`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from family_models import TINY, VOCAB, fp8_reference, save, save_fp8, save_mxfp4
from safetensors.torch import load_file
from torch import Tensor

from foreload.backend.engine import Engine, EngineOptions
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.decoder import Decoder
from foreload.backend.predict import PREDICTORS
from foreload.backend.speculate.base import Proposal
from foreload.backend.speculate.ngram import NgramDrafter
from foreload.settings import Settings

PROMPT = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(3)).tolist()
STEPS = 64
SETTINGS = {
    "nothing_kept": Settings(cache_ratio=0.0, prefill_chunk_tokens=7),
    "half": Settings(cache_ratio=0.5, prefill_chunk_tokens=64),
    "prefetching": Settings(cache_ratio=0.25, predictor="gate", prefetch_depth=2, prefill_chunk_tokens=9),
    "on_the_cpu": Settings(cache_ratio=0.25, miss_action="cpu", prefill_chunk_tokens=30),
    "resident": Settings(cache_ratio=1.0),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Models by family, saved as published."""
    made: dict[str, tuple[Any, Path]] = {}
    for name, tiny in TINY.items():
        model = tiny.make()
        made[name] = model, save(model, tmp_path_factory.mktemp("families") / name)
    return made


class Watched:
    """An engine whose logits and routing are kept, row by row."""

    def __init__(self, folder: Path | str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
        checkpoint = Checkpoint.open(str(folder))
        self.engine = Engine(checkpoint, EngineOptions(context_tokens=len(PROMPT) + STEPS + 1), settings)
        self.logits: list[Tensor] = []
        self.routed: list[list[tuple[Tensor, Tensor]]] = [[] for _ in checkpoint.shape.moe_layers]
        decoder = self.engine.forward.decoder
        route, logits = decoder.route, decoder.logits

        def watched_route(at: int, h: Tensor) -> tuple[Tensor, Tensor]:
            self.routed[at].append(route(at, h))
            return self.routed[at][-1]

        def watched_logits(x: Tensor) -> Tensor:
            self.logits.append(logits(x))
            return self.logits[-1]

        monkeypatch.setattr(decoder, "route", watched_route)
        monkeypatch.setattr(decoder, "logits", watched_logits)

    def run(self) -> list[int]:
        """The tokens fed: the prompt, and what was generated greedily but the last."""
        with self.engine:
            return PROMPT + self.engine.generate(PROMPT, STEPS + 1, stop=False).token_ids[:-1]


def reference_run(model: Any, tokens: list[int]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Logits [tokens, vocab], and ids and weights [tokens, k] per MoE layer as a hook on its router sees them."""
    routed: list[tuple[Tensor, Tensor]] = []
    blocks = [getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None)) for layer in model.model.layers]
    hooks = [
        block.register_forward_hook(lambda _, __, output: routed.append((output[2], output[1])))
        for block in blocks
        if block is not None
    ]
    with torch.inference_mode():
        logits = model(torch.tensor([tokens], device=model.device)).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, routed


def check(model: Any, folder: Path | str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(folder, settings, monkeypatch)
    tokens = watched.run()
    logits, routed = reference_run(model, tokens)
    found = torch.stack([rows[-1] for rows in watched.logits])
    chunks = -(-len(PROMPT) // settings.prefill_chunk_tokens)
    torch.testing.assert_close(found[chunks - 1 :], logits[len(PROMPT) - 1 :], atol=1e-4, rtol=0)
    assert len(found) == chunks + STEPS
    assert len(watched.routed) == len(routed) > 0
    for ours, (ids, weights) in zip(watched.routed, routed, strict=True):
        own_ids, own_weights = (torch.cat([step[part] for step in ours]) for part in (0, 1))
        check_routing(own_ids, own_weights, ids, weights)


def check_routing(ids: Tensor, weights: Tensor, expected_ids: Tensor, expected_weights: Tensor) -> None:
    """Same experts with the same weights, in whatever order."""
    order, expected_order = ids.argsort(dim=1), expected_ids.argsort(dim=1)
    assert torch.equal(ids.gather(1, order), expected_ids.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order), expected_weights.gather(1, expected_order), atol=1e-5, rtol=1e-4
    )


@pytest.mark.integration
@pytest.mark.parametrize("name", TINY)
def test_family(models: dict[str, tuple[Any, Path]], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(*models[name], SETTINGS["prefetching"], monkeypatch)


@pytest.mark.integration
@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "prefetching"])
@pytest.mark.parametrize("name", ["gpt_oss", "glm4_moe_lite", "qwen2_every_other"])
def test_offload(
    models: dict[str, tuple[Any, Path]], name: str, settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(*models[name], SETTINGS[settings], monkeypatch)


@pytest.mark.integration
@pytest.mark.parametrize("name", TINY)
def test_predicted_routing(models: dict[str, tuple[Any, Path]], name: str) -> None:
    """A later layer's own norm, gate and scoring on any residual stream, as the reference's modules give it."""
    model, folder = models[name]
    checkpoint = Checkpoint.open(str(folder))
    decoder = Decoder(checkpoint, torch.device("cpu"), torch.float32, 8)
    predictor = PREDICTORS["gate"](decoder, None)
    stream = torch.randn(9, checkpoint.shape.hidden, generator=torch.Generator().manual_seed(4)) * 2
    for at in range(checkpoint.shape.n_moe_layers - 1):
        found = predictor.ahead(at, stream, *decoder.route(at, stream), 1)
        layer = model.model.layers[checkpoint.shape.moe_layers[at + 1]]
        router = getattr(layer.mlp, "gate", None) or layer.mlp.router
        with torch.inference_mode():
            _, weights, ids = router(layer.post_attention_layernorm(stream))
        check_routing(*decoder.choose(at + 1, found[0][0]), ids, weights)
        assert torch.equal(predictor.best(at, found, ids.shape[1])[0].sort().values, ids.sort().values)


@pytest.mark.integration
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral_window", "deepseek_v3", "qwen3_dense_between", "olmoe"])
def test_drafts(models: dict[str, tuple[Any, Path]], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify steps roll back what was rejected: the logits of what was kept are still those of the reference."""
    model, folder = models[name]
    right = Watched(folder, SETTINGS["half"], monkeypatch).run()

    def propose(_: Any, text: list[int], gamma: int, __: Any) -> Proposal:
        """The true continuation with one wrong token, each time at another place."""
        drafts = right[len(text) : len(text) + gamma]
        return Proposal([(t + (n == len(text) % 4)) % VOCAB for n, t in enumerate(drafts)])

    monkeypatch.setattr(NgramDrafter, "propose", propose)
    settings = Settings.parse({"cache_ratio": 0.25, "draft": {"kind": "ngram", "gamma": 5}})
    watched = Watched(folder, settings, monkeypatch)
    decode, steps = watched.engine.forward.decode, []

    def watched_decode(token_ids: list[int], position: int) -> Tensor:
        steps.append((token_ids, position, decode(token_ids, position)))
        return steps[-1][2]

    monkeypatch.setattr(watched.engine.forward, "decode", watched_decode)
    assert watched.run() == right
    logits, _ = reference_run(model, right)
    rejected = 0
    for fed, position, found in steps:
        after = right[position : position + len(fed)]
        kept = next((n for n, (a, b) in enumerate(zip(fed, after, strict=False)) if a != b), min(len(fed), len(after)))
        rejected += len(fed) - kept
        torch.testing.assert_close(found[:kept], logits[position : position + kept], atol=1e-4, rtol=0)
    assert rejected > STEPS // 4
    assert len(steps) < STEPS * 3 // 4


@pytest.mark.integration
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "olmoe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_stacked_experts(
    models: dict[str, tuple[Any, Path]], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As newer versions of `transformers` hold them in memory."""
    model, published = models[name]
    folder = save(model, tmp_path / name, save_original_format=False, max_shard_size="100KB")
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.layout.stacked
    assert len(checkpoint.files()) > 1
    assert not Checkpoint.open(str(published)).layout.stacked
    check(model, folder, SETTINGS["half"], monkeypatch)


@pytest.mark.integration
def test_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY["gpt_oss"].make()
    folder = save_mxfp4(model, tmp_path / "packed")
    assert Checkpoint.open(str(folder)).layout.stored == "mxfp4"
    check(model, folder, SETTINGS["half"], monkeypatch)


@pytest.mark.integration
def test_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_fp8(TINY["deepseek_v3"].make(), tmp_path / "packed")
    checkpoint = Checkpoint.open(str(folder))
    assert checkpoint.stored == "fp8_tile"
    with Engine(checkpoint, EngineOptions(context_tokens=64), SETTINGS["half"]) as engine:
        assert set(engine.formats) == {"fp8_tile"}
        stored = load_file(folder / "model.safetensors")["model.layers.2.mlp.experts.5.down_proj.weight"]
        at, block = engine.slab.layout(1).down, engine.slab.block(1, 5)
        assert torch.equal(block[at : at + stored.numel()], stored.view(torch.uint8).flatten())  # as on disk
    check(fp8_reference(folder, tmp_path / "plain"), folder, SETTINGS["half"], monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", ["half", "prefetching", "on_the_cpu"])
@pytest.mark.parametrize("name", TINY)
def test_bf16_on_a_gpu(models: dict[str, tuple[Any, Path]], name: str, settings: str) -> None:
    """In bf16 the logits are as near to those of fp32 as the reference's own bf16 logits are.

    The distance is the norm of the difference over the norm of the fp32 logits, in the median of the rows: a near tie
    that rounding decides otherwise sends single tokens to other experts, in either program.
    """
    model, folder = models[name]
    options = EngineOptions(device="cuda", dtype="bfloat16", context_tokens=len(PROMPT) + STEPS + 1)
    rounded = copy.deepcopy(model).bfloat16().cuda()
    own, reference = [], []
    with Engine(Checkpoint.open(str(folder)), options, SETTINGS[settings]) as engine:
        for prompt in (PROMPT, PROMPT[::-1], PROMPT[:9] * 2, [7, 1, *PROMPT[5:]]):
            tokens, found = watched_logits(engine, prompt)
            exact, given = (
                each.float().cpu()[len(prompt) - 1 :]
                for each in (reference_run(model, tokens)[0], reference_run(rounded, tokens)[0])
            )
            own.append((found - exact).norm(dim=1) / exact.norm(dim=1))
            reference.append((given - exact).norm(dim=1) / exact.norm(dim=1))
    ours, theirs = (float(torch.cat(rows).median()) for rows in (own, reference))
    print(f"\n{name}, {settings}: {ours:.4f} from fp32; transformers in bf16 {theirs:.4f}")
    assert ours <= 1.5 * theirs + 1e-3


def watched_logits(engine: Engine, prompt: list[int]) -> tuple[list[int], Tensor]:
    """What was fed of a prompt and the greedy text after it, and the logits [steps + 1, vocab] of every step."""
    rows: list[Tensor] = []
    forward = engine.forward
    prefill, decode = forward.prefill, forward.decode

    def kept(logits: Tensor) -> Tensor:
        rows.append(logits.reshape(-1, VOCAB)[-1].float().cpu())
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "prefill", lambda *given: kept(prefill(*given)))
        patch.setattr(forward, "decode", lambda *given: kept(decode(*given)))
        tokens = prompt + engine.generate(prompt, STEPS + 1, stop=False).token_ids[:-1]
    return tokens, torch.stack(rows[-STEPS - 1 :])
