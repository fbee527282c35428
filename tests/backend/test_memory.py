"""Device slots and the host slab: blocks, moves, and what is said when memory is short."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import FIELDS

from foreload.backend.experts import pool as pool_module
from foreload.backend.experts import slab as slab_module
from foreload.backend.experts.blocks import BlockCodec
from foreload.backend.experts.pool import SlotPool
from foreload.backend.experts.slab import HostSlab, PageableWarning
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.placement import other_cores, place_threads
from foreload.errors import BudgetError, ForeloadError
from foreload.formats import block_layout
from foreload.shape import ModelShape

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tiny: Path) -> Checkpoint:
    return Checkpoint.open(str(tiny))


@pytest.fixture(scope="module")
def shape(checkpoint: Checkpoint) -> ModelShape:
    return checkpoint.shape


@pytest.fixture
def pool(shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> SlotPool:
    """A pool whose blocks hold three slots."""
    monkeypatch.setattr(pool_module, "BLOCK_BYTES", 3 * shape.expert_bytes("float32"))
    codec = BlockCodec(block_layout("fp32", shape), shape, torch.float32)
    return SlotPool([codec] * shape.n_moe_layers, codec.layout.bytes, CPU)


@pytest.mark.unit
def test_pool_grows_by_what_is_missing_and_shrinks_by_blocks(pool: SlotPool, shape: ModelShape) -> None:
    size = shape.expert_bytes("float32")
    pool.grow(4)
    assert (len(pool), pool.allocated_bytes) == (4, 4 * size)
    pool.grow(9)
    assert len(pool) == 9
    pool.grow(2)
    assert len(pool) == 9
    pool.shrink(5)
    assert (len(pool), pool.allocated_bytes) == (7, 7 * size)
    pool.shrink(0)
    assert (len(pool), pool.allocated_bytes) == (0, 0)


@pytest.mark.unit
def test_slots_keep_their_content_when_the_pool_changes(pool: SlotPool) -> None:
    pool.grow(3)
    for index in range(3):
        pool.slot(index).fill_(index)
    gate_up, down, *_ = pool.views(1, 0)
    pool.grow(8)
    pool.move(2, 7)
    pool.shrink(3)
    assert [float(pool.slot(index)[0]) for index in range(3)] == [0, 1, 2]
    assert gate_up.shape == (2 * FIELDS["moe_intermediate_size"], FIELDS["hidden_size"])
    assert down.shape == (FIELDS["hidden_size"], FIELDS["moe_intermediate_size"])
    pool.poison(1)
    assert torch.isnan(gate_up).all()
    assert torch.isnan(down).all()
    assert not torch.isnan(pool.views(0, 0).gate_up).any()


@pytest.mark.unit
def test_a_move_copies_the_whole_slot(pool: SlotPool) -> None:
    pool.grow(5)
    pool.slot(4).copy_(torch.arange(pool.slot(4).numel()))
    pool.move(4, 0)
    assert torch.equal(pool.slot(0), pool.slot(4))


@pytest.mark.unit
def test_slots_made_while_a_request_runs_can_be_written_by_any_thread(pool: SlotPool) -> None:
    with torch.inference_mode():
        pool.grow(2)
    failed: list[BaseException] = []

    def write() -> None:
        try:
            pool.slot(0).fill_(3)
            pool.move(0, 1)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert failed == []
    assert (pool.slot(1) == 3).all()


@pytest.mark.unit
def test_no_device_memory_changes_nothing(pool: SlotPool, shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortfall is what could not be allocated; blocks that could are given back."""
    pool.grow(2)
    allocate, calls = torch.empty, []

    def full(*size: Any, **options: Any) -> torch.Tensor:
        calls.append(size)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return allocate(*size, **options)

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(BudgetError, match=r"device memory: .* short for 9 expert slots") as caught:
        pool.grow(9)
    assert caught.value.shortfall_bytes == 4 * shape.expert_bytes("float32")
    assert len(pool) == 2


@pytest.mark.unit
def test_slab_holds_every_expert_in_one_block(checkpoint: Checkpoint, shape: ModelShape) -> None:
    calls: list[tuple[int, int]] = []
    slab = HostSlab(checkpoint, torch.float32, False, lambda *call: calls.append(call))
    total = 3 * shape.n_moe_layers * shape.experts
    assert calls == [(n, total) for n in range(1, total + 1)]
    assert not slab.pinned
    assert checkpoint.folder is not None
    stored = load_file(checkpoint.folder / "model.safetensors")
    parts = [stored[f"model.layers.2.mlp.experts.5.{name}_proj.weight"] for name in ("gate", "up", "down")]
    assert torch.equal(slab.block(2, 5).view(torch.float32), torch.cat([part.flatten() for part in parts]))


class FakeRuntime:
    """A CUDA runtime that refuses, or grants, to register memory."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: list[tuple[int, int]] = []
        self.given_back: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.registered.append((address, size))
        return self.code

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        self.given_back.append(address)


@pytest.mark.unit
def test_memory_that_cannot_be_pinned_is_said(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(2))
    monkeypatch.setattr(slab_module, "clear_cuda_error", lambda: None)
    with pytest.warns(PageableWarning, match=r"could not be pinned \(CUDA error 2\).*pageable memory.*memlock"):
        slab = HostSlab(checkpoint, torch.float32, True)
    assert not slab.pinned
    slab.close()


@pytest.mark.unit
def test_memory_is_pinned_in_one_call_and_given_back(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    slab = HostSlab(checkpoint, torch.float32, True)
    whole = (slab.blocks.data_ptr(), slab.blocks.numel())
    assert slab.pinned
    assert runtime.registered == [whole]
    slab.close()
    slab.close()
    assert runtime.given_back == [whole[0]]
    assert not slab.pinned


@pytest.mark.unit
def test_pinned_memory_is_given_back_if_loading_fails(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(*_: object) -> None:
        raise KeyboardInterrupt

    runtime = FakeRuntime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(Checkpoint, "read_stored", torn)
    with pytest.raises(KeyboardInterrupt):
        HostSlab(checkpoint, torch.float32, True)
    assert runtime.given_back == [runtime.registered[0][0]]


@pytest.mark.unit
def test_no_host_memory_is_said(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ForeloadError, match=r"host memory: 144 KiB for the experts cannot be allocated"):
        HostSlab(checkpoint, torch.float32, False)


@pytest.mark.unit
def test_placing_helpers_that_cannot_be_placed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    place_threads([ended, threading.Thread(target=lambda: None)], {0})
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})

    def refuse(*_: Any) -> None:
        raise PermissionError("not allowed")

    monkeypatch.setattr("os.sched_setaffinity", refuse)
    assert len(other_cores()) == 3
    place_threads([threading.current_thread()], other_cores())
