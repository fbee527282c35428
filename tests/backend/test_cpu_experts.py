"""CPU experts, native and torch alike: the same arithmetic, any number of tokens and threads, errors, clean ends."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from foreload.backend.experts.blocks import run_expert
from foreload.backend.experts.cpu import CpuExperts, make_cpu_experts
from foreload.backend.experts.cpu_native import NativeExperts
from foreload.backend.experts.cpu_torch import TorchExperts
from foreload.backend.experts.slab import HostSlab
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.native import describe, load
from foreload.errors import InternalError, UsageError

Make = Callable[..., CpuExperts]
needs_library = pytest.mark.skipif(
    load().handle is None and shutil.which("cc") is None, reason="no C compiler built the native library"
)


@pytest.fixture(scope="module")
def slabs(tiny: Path) -> dict[torch.dtype, HostSlab]:
    checkpoint = Checkpoint.open(str(tiny))
    return {dtype: HostSlab(checkpoint, dtype, False) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture(
    params=["torch", pytest.param("scalar", marks=needs_library), pytest.param("native", marks=needs_library)]
)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    if request.param != "native":
        monkeypatch.setenv("FORELOAD_CPU_ISA", request.param)
    made: list[CpuExperts] = []

    def build(slab: HostSlab, threads: int) -> CpuExperts:
        made.append(make_cpu_experts(slab, threads))
        assert isinstance(made[-1], TorchExperts if request.param == "torch" else NativeExperts)
        return made[-1]

    yield build
    for experts in made:
        experts.close()


TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 0.01}
"""Of the largest output; bf16 rounds outputs and, in some kernels, what is between the matrices, to eight bits."""


def off(out: torch.Tensor, slab: HostSlab, layer: int, experts: list[int], x: torch.Tensor, rows: list) -> float:
    """The largest deviation from the same arithmetic in float64, in parts of the largest output."""
    views = [slab.views(layer, expert) for expert in experts]
    pairs = [(x[r].double(), v.gate_up.double(), v.down.double()) for r, v in zip(rows, views, strict=True)]
    expected = torch.cat([run_expert(*pair) for pair in pairs])
    return float((out - expected).abs().max() / expected.abs().max())


def rows_of(*tokens: int) -> list[np.ndarray]:
    return [np.arange(n) + at for at, n in enumerate(tokens)]


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [(1,), (1, 1), (1, 4, 2, 1, 3), (17, 1)])
def test_cpu_experts_equal_the_device_arithmetic(
    make: Make, slabs: dict[torch.dtype, HostSlab], dtype: torch.dtype, tokens: tuple[int, ...]
) -> None:
    slab, rows = slabs[dtype], rows_of(*tokens)
    experts, chosen = make(slab, 1), list(range(7, 7 - len(tokens), -1))
    x = torch.randn(20, slab.shape.hidden).to(dtype)
    for threads in (1, 3, 2):
        experts.resize(threads)
        for layer in range(slab.shape.n_moe_layers):
            out = experts.submit(layer, chosen, x, rows)
            experts.join()
            assert experts.done()
            assert out.dtype == dtype
            assert off(out, slab, layer, chosen, x, rows) < TOLERANCE[dtype]


@pytest.mark.unit
def test_several_submissions_may_be_open(make: Make, slabs: dict[torch.dtype, HostSlab]) -> None:
    slab = slabs[torch.float32]
    experts, x = make(slab, 2), torch.randn(1, slab.shape.hidden)
    experts.spans = []
    outs = [experts.submit(n % 3, [n % 8], x, [np.zeros(1, np.int64)]) for n in range(20)]
    experts.join()
    for n, out in enumerate(outs):
        assert off(out, slab, n % 3, [n % 8], x, [[0]]) < 1e-6
    assert sorted((layer, count) for layer, count, _, _ in experts.spans) == sorted((n % 3, 1) for n in range(20))
    assert all(begun <= ended for _, _, begun, ended in experts.spans)


@pytest.mark.unit
def test_resizing_and_placing_leave_no_thread(make: Make, slabs: dict[torch.dtype, HostSlab]) -> None:
    before = set(Path("/proc/self/task").iterdir())

    def others(expected: int) -> int:
        """Threads beside those; one that has been joined may still be listed for a moment."""
        for _ in range(200):
            found = len(set(Path("/proc/self/task").iterdir()) - before)
            if found == expected:
                break
            time.sleep(0.05)
        return found

    experts = make(slabs[torch.float32], 3)
    assert others(3) == 3
    experts.place({0})
    experts.place([])
    experts.resize(1)
    assert others(1) == 1
    experts.close()
    experts.close()
    assert others(0) == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("foreload-cpu")]


@pytest.mark.unit
def test_errors_of_torch_experts_surface_and_pass(
    slabs: dict[torch.dtype, HostSlab], monkeypatch: pytest.MonkeyPatch
) -> None:
    slab, one = slabs[torch.float32], [np.zeros(1, np.int64)]
    x, experts = torch.ones(1, slab.shape.hidden), TorchExperts(slab, 2)
    experts.submit(0, [1, 99, 2], x, one * 3)
    with pytest.raises(InternalError, match="a CPU expert failed"):
        experts.join()
    out = experts.submit(0, [1], x, one)
    experts.join()
    assert torch.equal(out, run_expert(x, *slab.views(0, 1)))
    experts.close()


@needs_library
@pytest.mark.unit
def test_plans_that_are_not_valid_are_refused(slabs: dict[torch.dtype, HostSlab]) -> None:
    slab = slabs[torch.float32]
    experts = make_cpu_experts(slab, 1)
    assert isinstance(experts, NativeExperts)
    x = torch.ones(2, slab.shape.hidden)
    for rows in ([np.array([2])], [np.array([-1])], [np.array([], np.int64)]):
        with pytest.raises(InternalError, match="refused a plan"):
            experts.submit(0, [1], x, rows)
    experts.resize(0)
    with pytest.raises(InternalError, match="no thread"):
        experts.submit(0, [1], x, [np.array([0])])
    experts.close()


@needs_library
@pytest.mark.unit
def test_the_choice_of_instructions_is_checked_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe().startswith("native, ")
    monkeypatch.setenv("FORELOAD_CPU_ISA", "torch")
    assert describe() == "torch: FORELOAD_CPU_ISA=torch"
    monkeypatch.setenv("FORELOAD_CPU_ISA", "mmx")
    with pytest.raises(UsageError, match=r"FORELOAD_CPU_ISA is 'mmx': this machine runs scalar, .*torch"):
        describe()
