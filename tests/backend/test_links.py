"""Links, the copy thread and CPU experts: order, the emulated rate's arithmetic, and errors that surface."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from foreload.backend.engine import Engine
from foreload.backend.experts.link import HostLink
from foreload.backend.experts.pool import SlotPool
from foreload.backend.experts.slab import HostSlab
from foreload.backend.experts.transfer import CopyThread
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.policy import Action, Brain, Counter
from foreload.backend.policy.state import DECODE, LANDED
from foreload.errors import InternalError
from foreload.settings import Settings


class Clock:
    """A clock that moves only when told to, or slept on."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def perf_counter_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("foreload.backend.experts.link.time", clock)
    return clock


def block(value: float, weights: int = 250) -> torch.Tensor:
    return torch.full((weights,), float(value))


@pytest.mark.unit
def test_emulated_link_lands_in_order_at_its_rate(clock: Clock) -> None:
    """1000 bytes at 1 MB/s take 1 ms each, back to back whenever they were issued."""
    link, target = HostLink(1_000_000), torch.empty(3, 250)
    for n in range(3):
        link.issue(n, block(n), target[n], n)
        clock.now_ns += 100_000
    assert link.landed() == []
    assert link.pause_s() == pytest.approx(700e-6)
    link.block()
    assert link.landed() == [0]
    clock.now_ns += 999_999
    assert link.landed() == []
    clock.now_ns += 1_000_001
    assert link.landed() == [1, 2]
    assert target[:, 0].tolist() == [0, 1, 2]


@pytest.mark.unit
def test_emulated_link_idles_between_copies(clock: Clock) -> None:
    link, target = HostLink(1_000_000), torch.empty(250)
    link.issue(0, block(0), target, 0)
    clock.now_ns += 5_000_000
    assert link.landed() == [0]
    link.issue(1, block(1), target, 0)
    assert link.pause_s() == pytest.approx(1e-3)


@pytest.mark.unit
def test_link_without_a_rate_lands_at_once(clock: Clock) -> None:
    link, target = HostLink(None), torch.empty(250)
    link.issue(7, block(3), target, 0)
    assert link.pause_s() == 0
    assert link.landed() == [7]
    assert not link.asynchronous


@pytest.mark.unit
def test_random_delays_keep_the_order_and_the_seed(clock: Clock) -> None:
    def arrivals(seed: int) -> list[int]:
        link, target, start = HostLink(None, Random(seed)), torch.empty(250), clock.now_ns
        for n in range(5):
            link.issue(n, block(n), target, 0)
        times = []
        for n in range(5):
            link.block()
            assert link.landed() == [n]
            times.append(clock.now_ns - start)
        return times

    assert arrivals(1) == arrivals(1) != arrivals(2)
    assert arrivals(1) == sorted(arrivals(1))


# Threads


@pytest.fixture(scope="module")
def slab(tiny: Path) -> HostSlab:
    return HostSlab(Checkpoint.open(str(tiny)), torch.float32, register=False)


class BrokenLink(HostLink):
    """Fails at a chosen call."""

    def __init__(self, fails_at: str) -> None:
        super().__init__(None)
        self.fails_at = fails_at

    def issue(self, *arguments: object) -> None:
        if self.fails_at == "issue":
            raise RuntimeError("cable unplugged")
        super().issue(*arguments)  # type: ignore[arg-type]

    def landed(self) -> list[int]:
        if self.fails_at == "landed" and self._flying:
            raise RuntimeError("cable unplugged")
        return super().landed()


MakeCopies = Callable[[HostLink], CopyThread]


@pytest.fixture
def make_copies(slab: HostSlab) -> Iterator[MakeCopies]:
    made: list[CopyThread] = []

    def make(link: HostLink) -> CopyThread:
        pool = SlotPool(slab.codecs, slab.layout(0).bytes, torch.device("cpu"))
        brain = Brain(slab.shape, Settings(), (1,) * slab.shape.n_moe_layers)
        pool.grow(brain.slots)
        made.append(CopyThread(brain, slab, pool, link))
        return made[-1]

    yield make
    for copies in made:
        copies.close()


def demand(copies: CopyThread, layer: int, experts: list[int]) -> list[int]:
    """Begin a layer-step; the keys it waits for."""
    with copies.lock:
        actions = copies.brain.begin(layer, np.asarray(experts, np.int32), np.ones(len(experts), np.int32))
        copies.kick()
    wanted = zip(experts, actions.tolist(), strict=True)
    return [layer * copies.brain.shape.experts + e for e, action in wanted if action == Action.FETCH]


@pytest.mark.unit
def test_copy_thread_moves_blocks_into_their_slots(make_copies: MakeCopies, slab: HostSlab) -> None:
    copies = make_copies(HostLink(None))
    keys = demand(copies, 1, [2, 6])
    copies.wait_landed(keys)
    for key in keys:
        layer, expert = divmod(key, slab.shape.experts)
        assert copies.brain.status(layer, expert) == LANDED
        slot = copies.brain.slot(layer, expert)
        assert torch.equal(copies._pool.slot(slot), slab.block(layer, expert))


@pytest.mark.unit
def test_copy_thread_hands_out_copies_in_link_order(make_copies: MakeCopies) -> None:
    copies = make_copies(HostLink(None))
    copies.spans = []
    keys = demand(copies, 0, [5, 3])
    copies.wait_landed(keys)
    waiting = set(keys)
    first = copies.take_ready(waiting)
    assert [first] == [span.key for span in copies.spans][:1]
    waiting.remove(first)
    assert copies.take_ready(waiting) == (waiting.pop() if waiting else -1)


@pytest.mark.unit
@pytest.mark.parametrize("fails_at", ["issue", "landed"])
@pytest.mark.parametrize("wait", ["take_ready", "wait_landed"])
def test_errors_of_the_copy_thread_surface(make_copies: MakeCopies, fails_at: str, wait: str) -> None:
    copies = make_copies(BrokenLink(fails_at))
    keys = demand(copies, 0, [1, 2])
    copies.threads[0].join()
    with pytest.raises(InternalError, match="the copy thread stopped: cable unplugged"):
        getattr(copies, wait)(keys)


@pytest.mark.unit
def test_closing_waits_for_what_is_in_flight(make_copies: MakeCopies) -> None:
    copies = make_copies(HostLink(100_000_000))
    demand(copies, 0, [1, 2])
    copies.close()
    assert copies.brain.in_flight() == 0
    assert copies.brain.counters[DECODE, 0, Counter.FETCHED] == 2
    assert not copies.threads[0].is_alive()


@pytest.mark.integration
def test_a_failing_copy_ends_the_request(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "make_link", lambda _: BrokenLink("issue"))
    engine = make_engine(Settings(cache_ratio=0.0))
    with pytest.raises(InternalError, match="the copy thread stopped: cable unplugged"):
        engine.generate([1, 2, 3], 4)


@pytest.mark.integration
def test_a_failing_cpu_expert_ends_the_request(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORELOAD_CPU_ISA", "torch")
    engine = make_engine(Settings(cache_ratio=0.0, miss_action="cpu"))

    def spoil(_: int) -> None:
        engine.cpu._slab = None  # type: ignore[assignment]

    with pytest.raises(InternalError, match="a CPU expert failed"):
        engine.generate([1, 2, 3], 4, on_token=spoil, stop=False)
