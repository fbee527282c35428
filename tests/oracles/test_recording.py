"""The recorded routing and predictions equal what the reference's own gates say about the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foreload.backend.engine import Engine
from foreload.backend.recorder import Prompt, record
from foreload.settings import Settings
from foreload.traces.io import read_trace
from foreload.traces.schema import DECODE, PREFILL, Trace

REQUESTS, TOKENS, WIDTH, DEPTH = 4, 20, 6, 2


@pytest.fixture(scope="module")
def trace(engine: Engine, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A recording under settings that fetch, prefetch and feed prompts in chunks."""
    engine.apply(Settings(cache_ratio=0.25, predictor="gate", prefetch_depth=1, prefill_chunk_tokens=40))
    out = tmp_path_factory.mktemp("recording") / "trace.parquet"
    texts = [Prompt("", engine.tokenizer.decode(ids)) for ids in prompts[:REQUESTS]]
    assert all(len(engine.tokenizer.encode(text.text)) >= 64 for text in texts)
    options: dict[str, Any] = {"prompt_tokens": 64, "max_tokens": TOKENS, "depth": DEPTH, "width": WIDTH}
    record(engine, texts, out, **options, weights=True, stop=False)
    return read_trace(out)


@contextmanager
def hooked(reference: Any) -> Iterator[dict[str, list[Tensor]]]:
    """Per layer: the gate's ids and weights, and the residual stream it came from."""
    seen: dict[str, list[Tensor]] = {"ids": [], "weights": [], "residual": []}

    def gate(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        seen["weights"].append(output[1])
        seen["ids"].append(output[2])

    def norm(_: Any, arguments: tuple[Tensor]) -> None:
        seen["residual"].append(arguments[0][0])

    layers = reference.model.layers
    handles = [layer.mlp.gate.register_forward_hook(gate) for layer in layers]
    handles += [layer.post_attention_layernorm.register_forward_pre_hook(norm) for layer in layers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def run_reference(reference: Any, tokens: np.ndarray) -> dict[str, Tensor]:
    """Ids [R, L, k], weights [R, L, k] and residual streams [R, L, hidden] of one request's tokens."""
    with torch.inference_mode(), hooked(reference) as seen:
        reference(torch.from_numpy(tokens.astype(np.int64))[None])
    return {name: torch.stack(blocks, dim=1) for name, blocks in seen.items()}


@pytest.fixture(scope="module")
def answers(reference: Any, trace: Trace) -> list[tuple[Trace, dict[str, Tensor]]]:
    """Each request beside the reference's view of it."""
    requests = [trace.select([number]) for number in trace.requests()]
    return [(request, run_reference(reference, request.token_id)) for request in requests]


@pytest.mark.integration
def test_rows_are_the_tokens_in_order(trace: Trace) -> None:
    assert trace.requests() == tuple(range(REQUESTS))
    for number in trace.requests():
        request = trace.select([number])
        assert request.position.tolist() == list(range(64 + TOKENS - 1))
        assert (request.phase[:64] == PREFILL).all()
        assert (request.phase[64:] == DECODE).all()
        assert len(set(request.step[:64].tolist())) == 2


@pytest.mark.integration
def test_experts_equal_a_forward_hook(answers: list[tuple[Trace, dict[str, Tensor]]]) -> None:
    for request, reference in answers:
        recorded, expected = request.experts.astype(np.int64), reference["ids"].numpy()
        assert (np.sort(recorded, axis=2) == np.sort(expected, axis=2)).all()
        differ = recorded != expected
        weights = reference["weights"].numpy()
        swapped = np.take_along_axis(weights, np.argsort(expected, axis=2), axis=2)
        weights_as_recorded = np.take_along_axis(swapped, np.argsort(np.argsort(recorded, axis=2), axis=2), axis=2)
        assert (np.abs(weights_as_recorded - weights)[differ] < 1e-5).all()


@pytest.mark.integration
def test_weights_equal_a_forward_hook(answers: list[tuple[Trace, dict[str, Tensor]]]) -> None:
    for request, reference in answers:
        assert request.weights is not None
        expected = reference["weights"].numpy()
        np.testing.assert_allclose(request.weights.astype(np.float32), expected, atol=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_predictions_equal_a_recomputation(
    reference: Any, answers: list[tuple[Trace, dict[str, Tensor]]], depth: int
) -> None:
    """A later layer's own norm and gate on this layer's residual stream, best first."""
    layers = reference.model.layers
    for request, seen in answers:
        recorded = request.predictions["gate", depth]
        decode = torch.from_numpy(request.phase == DECODE)
        for layer in range(depth, len(layers)):
            with torch.inference_mode():
                residual = seen["residual"][decode, layer - depth]
                scores = layers[layer].mlp.gate(layers[layer].post_attention_layernorm(residual))[0]
            ids = torch.from_numpy(recorded[decode.numpy(), layer].astype(np.int64))
            assert (ids.sort(dim=1).values.diff(dim=1) > 0).all()
            torch.testing.assert_close(scores.gather(1, ids), scores.topk(WIDTH).values, atol=1e-4, rtol=0)


@pytest.mark.integration
@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_no_predictions_where_there_can_be_none(trace: Trace, depth: int) -> None:
    recorded = trace.predictions["gate", depth]
    decode = trace.phase == DECODE
    assert (recorded[~decode] == -1).all()
    assert (recorded[:, :depth] == -1).all()
    assert (recorded[decode][:, depth:] >= 0).all()
