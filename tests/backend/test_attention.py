"""Attention in chunks, with rejected tokens rolled back, equals one pass over the whole text; and a brute force."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from foreload.backend.models import attention
from foreload.backend.models.attention import Attention, GroupedAttention, LatentAttention, masked_attention
from foreload.backend.models.rope import rotary_tables
from foreload.backend.models.tensors import layer_tensors
from foreload.shape import RING_SLACK, Latent, ModelShape

TOKENS = 60
GROUPED = ModelShape(
    family="any",
    layers=1,
    moe_layers=(0,),
    hidden=16,
    heads=4,
    kv_heads=2,
    head_dim=8,
    vocab=8,
    experts=2,
    top_k=1,
    expert_width=4,
    scoring="softmax_topk",
    normalise_weights=True,
    rope_theta=100.0,
    norm_eps=1e-6,
    max_positions=TOKENS,
    tied_embeddings=True,
    qk_norm="none",
)
SHAPES: dict[str, ModelShape] = {
    "all": GROUPED,
    "window": replace(GROUPED, windows=(5,)),
    "wide_window": replace(GROUPED, windows=(TOKENS - RING_SLACK + 3,)),
    "sinks": replace(GROUPED, sinks=True, qkv_bias=True, output_bias=True),
    "sinks_and_window": replace(GROUPED, sinks=True, windows=(7,)),
    "norms": replace(GROUPED, qk_norm="full", clip_qkv=0.7, windows=(3,)),
    "latent": replace(GROUPED, kv_heads=4, latent=Latent(0, 6, 5, 4, 3)),
    "latent_queries": replace(GROUPED, kv_heads=4, latent=Latent(7, 6, 5, 4, 3)),
}


def block(shape: ModelShape) -> Attention:
    """The attention of `shape`, always with the same random weights and nothing kept."""
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(size, generator=generator) for name, size in layer_tensors(shape, 0).items()}
    rotary = rotary_tables(shape, TOKENS, torch.device("cpu"), torch.float32)
    if shape.latent is not None:
        return LatentAttention(shape, shape.latent, weights, TOKENS, rotary)
    return GroupedAttention(shape, 0, weights, TOKENS, rotary)


def text() -> Tensor:
    return torch.randn(TOKENS, GROUPED.hidden, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    return {name: block(shape).attend(text(), 0) for name, shape in SHAPES.items()}


@pytest.mark.unit
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", SHAPES)
def test_chunks_and_roll_backs(whole: dict[str, Tensor], name: str, seed: int) -> None:
    """Each step takes some of the text, then garbage that the next writes over; seed 0: as much as there may be."""
    h, one, random, out, at = text(), block(SHAPES[name]), Random(seed), [], 0
    while at < TOKENS:
        most = min(RING_SLACK, TOKENS - at) - 1
        rejected = random.choice([0, random.randint(0, most)]) if seed else most
        longest = RING_SLACK - rejected if rejected else 25
        kept = h[at : min(at + random.randint(1, longest), TOKENS - rejected)]
        garbage = torch.full((rejected, h.shape[1]), 9.0)
        out.append(one.attend(torch.cat([kept, garbage]), at)[: len(kept)])
        at += len(kept)
    torch.testing.assert_close(torch.cat(out), whole[name], atol=1e-4, rtol=1e-4)


@pytest.mark.unit
def test_a_ring_keeps_the_window_and_its_slack() -> None:
    kept = block(SHAPES["window"])
    assert isinstance(kept, GroupedAttention)
    assert kept.keys.shape == (2, 5 + RING_SLACK, 8)
    full = block(SHAPES["wide_window"])
    assert isinstance(full, GroupedAttention)
    assert full.keys.shape == (2, TOKENS, 8)


@pytest.mark.unit
@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 1 << 20])
def test_masked_attention_by_brute_force(window: int, sinks: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, kv_heads, n, first, position, keys = 4, 2, 6, 3, 7, 10
    monkeypatch.setattr(attention, "SCORE_NUMBERS", rows * heads * keys)
    generator = torch.Generator().manual_seed(window)
    q, k = torch.randn(heads, n, 8, generator=generator), torch.randn(kv_heads, keys, 8, generator=generator)
    v, sink = torch.randn(kv_heads, keys, 5, generator=generator), torch.randn(heads, generator=generator)
    found = masked_attention(q, k, v, first, position, window, 0.3, sink if sinks else None)
    for head in range(heads):
        for row in range(n):
            seen = [j for j in range(keys) if first + j <= position + row]
            seen = [j for j in seen if not window or first + j > position + row - window]
            scores = [0.3 * float(q[head, row] @ k[head // 2, j]) for j in seen]
            weights = torch.tensor(scores + ([float(sink[head])] if sinks else [])).softmax(0)
            expected = sum((weights[i] * v[head // 2, j] for i, j in enumerate(seen)), torch.zeros(5))
            torch.testing.assert_close(found[row, head], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.unit
@pytest.mark.parametrize("name", ["all", "sinks"])
def test_flash_attention_in_their_place(name: str, whole: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operator is asked and what is made of its answer, which a plain computation gives here."""
    asked = []

    def flash(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        asked.append((q.shape[1], k.shape[1]))
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) * scale
        scores = scores.masked_fill(
            ~torch.ones_like(scores[0], dtype=torch.bool).tril(scores.shape[2] - len(scores[0])), -torch.inf
        )
        return scores.softmax(-1) @ v.repeat_interleave(2, 0), scores.logsumexp(-1)

    monkeypatch.setattr(attention, "can_flash", lambda _: True)
    monkeypatch.setattr(attention, "flash_attention", flash)
    one = block(SHAPES[name])
    found = [one.attend(text()[:7], 0), one.attend(text()[7:8], 7), one.attend(text()[8:], 8)]
    torch.testing.assert_close(torch.cat(found), whole[name], atol=1e-4, rtol=1e-4)
    assert asked == [(7, 7), (TOKENS - 8, TOKENS)]


@pytest.mark.unit
def test_windows_read_the_keys_they_see_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the prompt, scores of a window are few."""
    most: list[int] = []
    softmax = attention.softmax_with_sinks

    def spy(scores: Tensor, sinks: Tensor | None) -> Tensor:
        most.append(scores.numel())
        return softmax(scores, sinks)

    monkeypatch.setattr(attention, "softmax_with_sinks", spy)
    n, window = 3 * attention.WINDOW_ROWS, 16
    q, k = torch.ones(2, n, 4), torch.ones(1, n, 4)
    found = masked_attention(q, k, torch.arange(n).float()[None, :, None], 0, 0, window, 1.0, None)
    seen = [sum(range(max(0, at - window + 1), at + 1)) / min(at + 1, window) for at in range(n)]
    torch.testing.assert_close(found[:, 0, 0], torch.tensor(seen))
    assert max(most) <= 2 * attention.WINDOW_ROWS * (attention.WINDOW_ROWS + window)


@pytest.mark.unit
@pytest.mark.parametrize("sink", [-1e4, 0.0, 1e4])
def test_sinks_of_any_size_leave_finite_weights(sink: float) -> None:
    scores = torch.tensor([[[1e4, -1e4, float("-inf")]]])
    weights = attention.softmax_with_sinks(scores, torch.tensor([sink]))
    assert torch.isfinite(weights).all()
    assert float(weights.sum()) <= 1.0
