"""What prompts and graphs take on a device is known before it is allocated."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from foreload.backend.cuda.buffers import DeviceMemory
from foreload.backend.cuda.kernels.torch_ops import TorchOps
from foreload.backend.cuda.throttle import CapturedStopwatch
from foreload.backend.experts.batch import PlainChunk, weighted_sum
from foreload.backend.experts.blocks import ExpertViews
from foreload.backend.options import working_bytes
from foreload.budget import AT_ONCE, chunk_bytes
from foreload.settings import Draft, Settings
from foreload.shape import Latent, ModelShape
from foreload.traces.synthetic import shape_of

SHAPE = shape_of(2, 8, 2)
LATENT = replace(SHAPE, latent=Latent(24, 64, 12, 4, 20), shared_width=40)


def options(**fields: Any) -> Any:
    """Options of a GPU, which this machine need not have."""
    return SimpleNamespace(
        **{"device": "cuda", "resolved_dtype": "bfloat16", "context_tokens": 300, "eager": False} | fields
    )


@pytest.mark.unit
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("shape", [SHAPE, LATENT])
def test_static_memory_is_counted_as_it_is_made(shape: ModelShape, rows: int) -> None:
    made = DeviceMemory.make(shape, rows, 300, torch.bfloat16, torch.device("cpu"))
    tensors = [getattr(made, f.name) for f in fields(made) if f.name != "scratch"]
    tensors += [value for value in vars(made.scratch).values() if isinstance(value, torch.Tensor)]
    assert DeviceMemory.bytes(shape, rows, 300, torch.bfloat16) == sum(t.nbytes for t in tensors)


@pytest.mark.unit
def test_budget_knows_prompts_and_graphs() -> None:
    plain = Settings(prefill_chunk_tokens=64)
    assert working_bytes(options(device="cpu"), SHAPE, plain) == 0
    eager = working_bytes(options(eager=True), SHAPE, plain)
    assert eager == chunk_bytes(SHAPE, "bfloat16", 64, 300, grouped=False)
    graphs = working_bytes(options(), SHAPE, plain)
    chunk = chunk_bytes(SHAPE, "bfloat16", 64, 300, grouped=True)
    assert graphs == chunk + DeviceMemory.bytes(SHAPE, 1, 300, torch.bfloat16)
    drafted = plain.changed(draft=Draft(kind="ngram", gamma=4))
    assert working_bytes(options(), SHAPE, drafted) == chunk + DeviceMemory.bytes(SHAPE, 5, 300, torch.bfloat16)
    assert working_bytes(options(eager=True), SHAPE, Settings(prefill_chunk_tokens=4096)) == chunk_bytes(
        SHAPE, "bfloat16", 300, 300, grouped=False
    )


@pytest.mark.unit
def test_a_long_chunk_is_summed_in_parts_as_at_once() -> None:
    tokens, k, hidden, generator = AT_ONCE + 37, 2, 4, torch.Generator().manual_seed(0)
    outputs = torch.randn(tokens, k, hidden, generator=generator)
    weights = torch.rand(tokens, k, generator=generator)
    assert torch.equal(weighted_sum(outputs, weights, None), (weights[..., None] * outputs).sum(1))


@pytest.mark.unit
def test_a_chunk_gives_every_token_its_own_outputs_back() -> None:
    generator, eye = torch.Generator().manual_seed(1), torch.eye(4)
    h, ids = torch.randn(9, 4, generator=generator), torch.randint(5, (9, 2), generator=generator)
    chunk = PlainChunk(h, ids, 6, lambda slot: ExpertViews(torch.cat([eye, slot * eye]), eye))
    assert chunk.counts.tolist() == torch.bincount(ids.reshape(-1), minlength=6).tolist()
    for some in ([5, 0], [1, 2, 3, 4]):
        demanded = [expert for expert in some if chunk.counts[expert]]
        chunk.run(demanded, [expert + 1 for expert in demanded])
    expected = (F.silu(h) * h)[:, None] * (ids + 1)[..., None]
    torch.testing.assert_close(chunk.outputs, expected)
    weights = torch.rand(9, 2, generator=generator)
    torch.testing.assert_close(chunk.add_to(h, weights, h), 2 * h + (weights[..., None] * expected).sum(1))


@pytest.mark.unit
def test_what_a_throttle_writes_to_stays_its_own() -> None:
    """A captured graph holds addresses; where the tensor is gone, it writes into whatever is there next."""
    seen: list[weakref.ref[torch.Tensor]] = []

    class Seen(TorchOps):
        def stamp(self, begun: torch.Tensor) -> None:
            seen.append(weakref.ref(begun))

        def hold(self, begun: torch.Tensor, least: torch.Tensor) -> None:
            seen.extend(map(weakref.ref, (begun, least)))

    def capture(piece: Callable[[], None]) -> int:
        piece()
        return 1

    watch = CapturedStopwatch(Seen(), torch.device("cpu"), capture)  # type: ignore[arg-type]
    gc.collect()
    assert len(seen) == 6
    assert all(tensor() is not None for tensor in seen)
    watch.last(5)
