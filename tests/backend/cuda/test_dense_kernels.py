"""Dense, attention and router kernels against torch; rows do not depend on how many a step has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foreload.backend.cuda.buffers import host_tensor
from foreload.backend.cuda.kernels.ops import (
    AttentionScratch,
    HostInputs,
    Ops,
    Ranking,
    Turn,
    chunk_tokens,
    power_of_two,
)
from foreload.backend.cuda.kernels.torch_ops import TorchOps
from foreload.backend.cuda.pieces import ranking_of
from foreload.backend.cuda.plan import write_plan
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.models.decoder import Gated
from foreload.backend.models.routing import route
from foreload.backend.policy.step import ACT_CPU, ACT_HIT

pytest.importorskip("triton")
from foreload.backend.cuda.kernels.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = TritonOps(fence=DEVICE.type == "cuda")
REFERENCE = TorchOps()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def randn(generator: torch.Generator, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=generator).to(dtype)


def on(device: torch.device, *tensors: Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.clone().to(device) for tensor in tensors]


def current(position: int, row: int = 0) -> Tensor:
    return torch.tensor([1, position, row], dtype=torch.int32)


@pytest.mark.unit
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_linear_and_residual(dtype: torch.dtype, bias: bool, generator: torch.Generator) -> None:
    x, norm, weights = randn(generator, 3, 40, dtype=dtype), randn(generator, 40, dtype=dtype), randn(generator, 22, 40)
    weights, offset = weights.to(dtype), randn(generator, 22, dtype=dtype) if bias else None
    results = []
    for ops, device in ((REFERENCE, torch.device("cpu")), (OPS, DEVICE)):
        a, b, c, d, e = on(device, x, norm, weights, offset, randn(generator, 3, 22, dtype=dtype) * 0)
        y, normed = torch.empty(3, 22, device=device), torch.empty_like(a)
        ops.norm_linear(a, b, c, d, y, normed, 1e-6)
        back = torch.empty_like(e)
        ops.linear_residual(a, c, d, e + 2, back)
        results.append((y.cpu(), normed.cpu(), back.cpu()))
    tolerance = 1e-5 if dtype == torch.float32 else 0.1  # the interpreter rounds to bfloat16 toward zero
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def attended(
    ops: Ops, device: torch.device, inputs: list[Tensor], context: int, n: int, position: int = 70, **extra: Any
) -> list[Tensor]:
    """q, cache and output of `n` rows that start at `position`."""
    qkv, norm, cos, sin, keys, values = on(device, *inputs)
    q = torch.empty(n, 4, 8, device=device)
    now = current(position).to(device)
    ring = "window" in extra
    ops.rope_store(qkv[:n].contiguous(), norm, (cos, sin), now, q, (keys, values), 1e-6, ring)
    out = torch.full((n, 32), float("nan"), device=device)
    scratch = AttentionScratch.on(device, n, 4, 8, context)
    ops.attend(q, (keys, values), now, scratch, out, 8**-0.5, **extra)
    return [t.cpu() for t in (q, keys, values, out)]


@pytest.mark.unit
@pytest.mark.parametrize("case", ["plain", "no_norm", "window", "sinks"])
def test_attention(case: str, generator: torch.Generator) -> None:
    """Grouped heads over two chunks of keys, two rows."""
    context, n = 128, 2
    assert chunk_tokens(context) == 64
    keys, values = randn(generator, 2, context, 8), randn(generator, 2, context, 8)
    keys[:, 72:], values[:, 72:] = float("nan"), float("nan")  # never written yet, so never read
    norm = None if case == "no_norm" else randn(generator, 6, 8)
    inputs: Any = [randn(generator, n, 8 * 8), norm, randn(generator, context, 1, 8), randn(generator, context, 1, 8)]
    extra: dict[str, Any] = {"window": 5} if case == "window" else {}
    sinks = randn(generator, 4)
    results = []
    for ops, device in ((REFERENCE, torch.device("cpu")), (OPS, DEVICE)):
        if case == "sinks":
            extra = {"sinks": sinks.to(device)}
        results.append(attended(ops, device, [*inputs, keys, values], context, n, **extra))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert torch.isfinite(results[1][3]).all()


@pytest.mark.unit
@pytest.mark.parametrize("position", [3, 20, 70])
def test_a_window_over_a_ring(position: int, generator: torch.Generator) -> None:
    """Keys go round in 22 places: before the ring is full, while a step wraps, and after."""
    ring, window, n = 22, 5, 3
    cache = [randn(generator, 2, ring, 8), randn(generator, 2, ring, 8)]
    if position < ring:
        for part in cache:
            part[:, position:] = float("nan")
    inputs: Any = [randn(generator, n, 8 * 8), None, randn(generator, 128, 1, 8), randn(generator, 128, 1, 8), *cache]
    results = [
        attended(ops, device, inputs, 128, n, position, window=window)
        for ops, device in ((REFERENCE, torch.device("cpu")), (OPS, DEVICE))
    ]
    torch.testing.assert_close(results[1][3], results[0][3], rtol=1e-5, atol=1e-5)
    assert torch.isfinite(results[1][3]).all()
    one = attended(OPS, DEVICE, [inputs[0][:1], *inputs[1:]], 128, 1, position, window=window)
    assert torch.equal(one[3][0], results[1][3][0])


@pytest.mark.unit
def test_a_row_does_not_depend_on_the_number_of_rows(generator: torch.Generator) -> None:
    context = 128
    cache = [randn(generator, 2, context, 8), randn(generator, 2, context, 8)]
    inputs: Any = [randn(generator, 3, 8 * 8), None, randn(generator, context, 1, 8), randn(generator, context, 1, 8)]
    found = {n: attended(OPS, DEVICE, [*inputs, *cache], context, n) for n in (1, 3)}
    assert torch.equal(found[1][3][0], found[3][3][0])
    x, weights, norm = randn(generator, 3, 40), randn(generator, 22, 40), randn(generator, 40)
    y = [torch.empty(n, 22, device=DEVICE) for n in (1, 3)]
    for out in y:
        OPS.norm_linear(*on(DEVICE, x[: len(out)], norm, weights), None, out, None, 1e-6)
    assert torch.equal(y[0][0], y[1][0])


RANKINGS = {
    "softmax": Ranking(normalise=False),
    "normalised": Ranking(normalise=True),
    "scaled": Ranking(normalise=False, scale=2.5),
    "sigmoid": Ranking(normalise=False, sigmoid=True),
    "corrected": Ranking(normalise=True, sigmoid=True, scale=1.8),
}


@pytest.mark.unit
@pytest.mark.parametrize("name", RANKINGS)
def test_top_k(name: str, generator: torch.Generator) -> None:
    ranking = RANKINGS[name]
    logits = randn(generator, 3, 13)
    logits[1, 4] = logits[1, 9] = logits[1].max() + 1  # a tie goes to the lower id
    correction = torch.rand(13, generator=generator) if name == "corrected" else None
    if correction is not None:
        correction[[4, 9]] = 2.0
    results = []
    for ops, device in ((REFERENCE, torch.device("cpu")), (OPS, DEVICE)):
        ids, weights = torch.empty(3, 3, dtype=torch.int64, device=device), torch.empty(3, 3, device=device)
        words = torch.zeros(9, dtype=torch.int32, device=device)
        now, added = current(0).to(device), None if correction is None else correction.to(device)
        ops.top_k(logits.to(device), ids, weights, ranking, now, words, added)
        results.append((ids.cpu(), weights.cpu()))
        assert words.tolist() == [1 << 16 | expert for expert in ids.reshape(-1).tolist()]
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][0][1, :2].tolist() == [4, 9]
    torch.testing.assert_close(results[1][1], results[0][1])
    if ranking.normalise:
        torch.testing.assert_close(results[1][1].sum(1), torch.full((3,), ranking.scale))


@pytest.mark.unit
@pytest.mark.parametrize("family", ["glm-4.7-flash", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_a_ranking_is_that_of_the_family(family: str, generator: torch.Generator) -> None:
    shape = Checkpoint.random(family).shape
    logits = randn(generator, 3, shape.experts)
    correction = torch.rand(shape.experts, generator=generator) if shape.correction_bias else None
    ids, weights = torch.empty(3, shape.top_k, dtype=torch.int64), torch.empty(3, shape.top_k)
    REFERENCE.top_k(logits, ids, weights, ranking_of(shape), current(0), None, correction)
    expected = route(logits, correction, shape)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1])


@pytest.mark.unit
@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_experts(dtype: torch.dtype, switched: bool, generator: torch.Generator) -> None:
    """A width that is no multiple of a program's rows; a row's bits are its own."""
    x, gate_up = randn(generator, 3, 40, dtype=dtype), randn(generator, 42, 40, dtype=dtype) / 6
    switch, down = randn(generator, 1, 40, dtype=dtype) if switched else None, randn(generator, 40, 21, dtype=dtype)
    expected = Gated(gate_up.float(), down.float(), None if switch is None else switch.float())(x.float())
    for ops, device in ((REFERENCE, torch.device("cpu")), (OPS, DEVICE)):
        here, weights, chosen, last = on(device, x, gate_up, switch, down)
        mid, found = torch.empty(3, 21, device=device), torch.empty(3, 40, device=device)
        ops.shared_gate_up(here, weights, chosen, mid)
        ops.linear_residual(mid, last, None, torch.zeros_like(found), found)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
        one = torch.empty(1, 21, device=device)
        ops.shared_gate_up(here[:1], weights, chosen, one)
        assert torch.equal(one[0], mid[0])


@pytest.mark.unit
def test_embed_replay_and_publish(generator: torch.Generator) -> None:
    """A step's numbers come from the host, recorded routing replaces the router's, and the host is told last."""
    table = randn(generator, 9, 24)
    ids_table = torch.randint(0, 9, (6, 2, 2), generator=generator, dtype=torch.int16)
    weights_table = torch.rand(6, 2, 2, generator=generator).half()
    guesses = torch.randint(-1, 9, (2, 6, 4, 5), generator=generator, dtype=torch.int16)
    results = []
    for ops, device in ((REFERENCE, torch.device("cpu")), (OPS, DEVICE)):
        given, now = torch.tensor([5, 70, 3, 8, 2], dtype=torch.int32, device=device), current(0).to(device)
        x = torch.empty(2, 24, device=device)
        ops.embed(given, now, table.to(device), x)
        ids, weights = torch.zeros(2, 2, dtype=torch.int64, device=device), torch.zeros(2, 2, device=device)
        tables = (ids_table.to(device), weights_table.to(device))
        told = torch.zeros(4, dtype=torch.int32, device=device)
        ops.replay_routes(now, tables, 1, ids, weights, None)
        assert not told.any()
        ops.replay_routes(now, tables, 1, ids, weights, told)
        predicted = torch.zeros(2, 2, 3, dtype=torch.int64, device=device)
        ops.replay_predictions(now, guesses.to(device), 1, predicted)
        words, more = (torch.zeros(count, dtype=torch.int32, device=device) for count in (4, 12))
        rows, host_weights = torch.zeros(2, 24, device=device), torch.zeros(2, 2, device=device)
        ops.publish(now, ids, words, HostInputs((x, rows), (weights, host_weights)))
        ops.publish(now, predicted, more)
        assert torch.equal(told, words)
        results.append([t.cpu() for t in (now, x, ids, weights, predicted, words, rows, more, host_weights)])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)
    now, x, ids, weights, predicted, words, rows, more, host_weights = results[1]
    assert now.tolist() == [5, 70, 3]
    assert torch.equal(x, table[[8, 2]])
    assert torch.equal(rows, x)
    assert torch.equal(host_weights, weights)
    assert torch.equal(ids, ids_table[3:5, 1].long())
    assert predicted[1].tolist() == guesses[1, 3:5, 2, :3].tolist()
    assert (words >> 16).tolist() == [5] * 4
    assert (words & 0xFFFF).tolist() == ids.reshape(-1).tolist()
    assert (more & 0xFFFF).to(torch.int16).tolist() == predicted.reshape(-1).tolist()


@pytest.mark.unit
@pytest.mark.parametrize("ops", [REFERENCE, OPS])
def test_a_plan_is_taken_word_by_word(ops: Ops) -> None:
    """Two resident experts, 40 bits of address among them, one of three items; an item of the host's; a later turn."""
    device = torch.device("cpu") if ops is REFERENCE else DEVICE
    now, layers, at = current(0).to(device), 48, 3
    turn = (int(now[0]) * layers + at) << 32
    address, item = 0xAB_9234_5678, [2, 0 | 1 << 31, 3, 1]
    words = torch.tensor(
        [[address & 0xFFFFFFFF, 0, 64, 0], [address >> 32, 0, 0, 0], [3 << 16 | 1, 0, 1 << 16 | 3, 0], item]
    )
    host = host_tensor((4, 4), torch.int64, device).copy_(words + turn)
    here = [torch.full(size, -1, device=device) for size in ((4, 4), (4,), (4,))]
    here[0].zero_()
    ops.take_plan(host, *here, Turn(now, layers, at))
    assert here[0].tolist() == [[address, 1, 3, 0], [0] * 4, [64, 3, 1, 0], [0] * 4]
    assert here[1].tolist() == [2, 0, 3, 1]
    assert here[2].tolist() == [0, 1, 0, 0]
    host += 5 << 32
    ops.take_plan(host, *here, Turn(now, layers, at))  # a later one's, as when all is let go
    host[:3] = 0
    ops.take_plan(host, *here, None)
    assert not here[0].any()


@pytest.mark.unit
@pytest.mark.parametrize("places", [[2, 0, 3, 1], [3, 1]])
def test_a_plan_that_is_written_is_taken(places: list[int]) -> None:
    """Also one of fewer places than there are items, as probes have it: the others are told of too, as nobody's."""
    experts, counts = np.array([4, 6], np.int32), np.array([len(places) - 1, 1], np.int32)
    actions, slots = np.array([ACT_CPU, ACT_HIT], np.int8), np.arange(8, dtype=np.int32)
    targets, now = 2**40 + 512 * np.arange(8), current(0)
    words, used, late = np.zeros(16, np.int64), np.zeros(4, np.int32), np.zeros((3, 4), np.int64)
    turn = Turn(now, 48, 3)
    found = write_plan(
        experts, counts, np.array(places), actions, 0, slots, targets, int(now[0]) * 48 + 3,
        words, np.ones(4, np.int64), used, late,
    )  # fmt: skip
    assert found == (1, 0)
    assert used[0] == 6
    here = [torch.full(size, -1) for size in ((4, 4), (4,), (4,))]
    here[0].zero_()
    REFERENCE.take_plan(torch.from_numpy(words).view(4, 4), *here, turn)
    assert here[0].tolist() == [[0] * 4, [2**40 + 512 * 6, len(places) - 1, 1, 0], [0] * 4, [0] * 4]
    assert here[1].tolist() == [*places, *[0] * (4 - len(places))]
    assert here[2].tolist() == [int(item in places[:-1]) for item in range(4)]


@pytest.mark.unit
def test_plan_of_resident_experts(generator: torch.Generator) -> None:
    addresses = torch.arange(1, 19).view(2, 9) * 1024
    ids = torch.tensor([[4, 0, 7], [0, 8, 4], [4, 1, 2]])
    results = []
    for ops, device in ((REFERENCE, torch.device("cpu")), (OPS, DEVICE)):
        plan = torch.full((9, 4), -1, device=device)
        listed = torch.full((9,), -1, device=device)
        ops.plan_resident(ids.to(device), addresses.to(device), 1, plan, listed)
        results.append((plan[:, :3].cpu(), listed.cpu()))
    for plan, listed in results:
        groups = {}
        for address, first, count in plan.tolist():
            if address:
                groups[address // 1024 - 10] = listed[first : first + count].tolist()
        flat = ids.reshape(-1).tolist()
        assert groups == {expert: [i for i, its in enumerate(flat) if its == expert] for expert in set(flat)}
        assert sorted(listed.tolist()) == list(range(9))


@pytest.mark.unit
def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 8, 9)] == [1, 1, 2, 4, 8, 16]
    assert [chunk_tokens(n) for n in (1, 2048, 16384, 16385, 65536)] == [64, 64, 64, 128, 256]
