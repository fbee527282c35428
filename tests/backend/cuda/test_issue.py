"""Ordering rules of the native copy path, on a device whose operations the test runs one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from fake_device import FakeDevice

from foreload.backend.cuda.copies import NativeCopies
from foreload.backend.cuda.issue import Blocks, CStep, Issuer, issue_library
from foreload.backend.policy import Brain
from foreload.backend.policy.calls import queue_calls
from foreload.backend.policy.copies import WINDOW
from foreload.backend.policy.state import DEMAND, IN_FLIGHT, KEPT, LANDED, PREFETCH, QUEUED
from foreload.errors import InternalError
from foreload.settings import Settings
from foreload.shape import ModelShape

BYTES = 64


class Bench:
    """A brain, its copies without a thread of their own, and a device that does what the test says."""

    def __init__(self, shape: ModelShape, settings: Settings) -> None:
        library, calls = issue_library(), queue_calls()
        if library is None or calls is None:
            pytest.skip("no native library, or numba compiles nothing")
        self.shape = shape
        self.brain = Brain(shape, settings, (1,) * shape.n_moe_layers)
        layers, slots = shape.n_moe_layers, 2 * self.brain.slots
        self.host = np.arange(layers * shape.experts, dtype=np.uint8)[:, None].repeat(BYTES, 1).copy()
        self.slots = np.full((slots, BYTES), 255, np.uint8)
        sources = self.host.ctypes.data + BYTES * np.arange(layers * shape.experts, dtype=np.int64)
        targets = self.slots.ctypes.data + BYTES * np.arange(slots, dtype=np.int64)
        blocks = Blocks(sources.reshape(layers, -1), np.full(layers, BYTES, np.int64), targets)
        self.device = FakeDevice(automatic=False)
        self.issuer = Issuer(library, self.device.functions, threaded=False)
        self.copies = NativeCopies(self.brain, self.issuer, calls, lambda: blocks)
        self.targets = targets

    def begin(self, layer: int, *experts: int) -> list[int]:
        with self.copies.lock:
            demand = np.array(experts, np.int32)
            actions = self.brain.begin(layer, demand, np.ones(len(experts), np.int32))
            self.copies.kick()
        return actions.tolist()

    def pump(self) -> None:
        with self.copies.lock:
            self.copies.kick()

    def run(self) -> None:
        """Let the device do all it can, and serve the queue meanwhile."""
        while self.device.advance():
            self.pump()

    def finish(self, layer: int) -> None:
        with self.copies.lock:
            self.brain.finish(layer)
            self.copies.kick()

    def copied(self) -> list[int]:
        """Slots in the order in which copies into them ran."""
        return [(at - int(self.targets[0])) // BYTES for kind, at in self.device.log if kind == "copy"]

    def status(self, layer: int, *experts: int) -> list[int]:
        return [self.brain.status(layer, expert) for expert in experts]


@pytest.fixture
def bench(shape: ModelShape) -> Iterator[Bench]:
    made = Bench(shape, Settings(cache_ratio=0.125, predictor="gate", prefetch_depth=1, prefetch_width=2))
    yield made
    while made.device.advance():
        pass
    made.issuer.close()


@pytest.mark.unit
def test_the_window_and_what_arrives(bench: Bench) -> None:
    bench.begin(0, 3, 5)
    with bench.copies.lock:
        bench.brain.prefetch(1, np.array([6, 1], np.int32))
        bench.copies.kick()
    assert bench.status(0, 3, 5) == [IN_FLIGHT] * 2
    assert bench.status(1, 6, 1) == [QUEUED] * 2
    assert bench.device.most_in_flight == WINDOW == 2
    bench.device.advance()  # the copy
    bench.pump()
    assert bench.status(0, 3) == [IN_FLIGHT], "the copy has run, and its event not yet"
    bench.device.advance()
    bench.pump()
    assert bench.status(0, 3, 5) == [LANDED, IN_FLIGHT]
    assert bench.status(1, 6, 1) == [IN_FLIGHT, QUEUED]
    bench.run()
    assert bench.status(1, 6, 1) == [LANDED] * 2
    assert bench.device.most_in_flight == WINDOW
    for layer, expert in ((0, 3), (0, 5), (1, 6), (1, 1)):
        block = bench.slots[bench.brain.slot(layer, expert)]
        assert (block == layer * bench.shape.experts + expert).all()


@pytest.mark.unit
def test_demand_overtakes_prefetches(bench: Bench) -> None:
    """What is issued stays; a demand goes before what only waits; a prefetch that is demanded moves up."""
    bench.begin(0, 3)
    with bench.copies.lock:
        bench.brain.prefetch(1, np.array([6, 1], np.int32))
        bench.copies.kick()
    assert bench.status(1, 6, 1) == [IN_FLIGHT, QUEUED]
    bench.run()
    bench.finish(0)
    bench.device.log.clear()
    with bench.copies.lock:
        bench.brain.prefetch(2, np.array([7, 4], np.int32))
        bench.brain.prefetch(1, np.array([6, 1], np.int32))
        bench.brain.begin(1, np.array([0, 2], np.int32), np.ones(2, np.int32))
        bench.copies.kick()
    bench.run()
    assert bench.copied()[:2] == [bench.brain.slot(1, 0), bench.brain.slot(1, 2)]


@pytest.mark.unit
def test_a_copy_waits_for_the_kernels_that_read_its_slot(bench: Bench) -> None:
    bench.begin(0, 3, 5)
    bench.run()
    old = bench.brain.slot(0, 5)
    reads: list[int] = []
    graph = bench.device(lambda: reads.append(int(bench.slots[old][0])))
    step = CStep(resident=graph, n_used=2, late=0)
    used = np.array([bench.brain.slot(0, 3), old], np.int32)
    step.used = used.ctypes.data
    bench.issuer.run(step)
    bench.finish(0)  # 5 gives its slot back
    with bench.copies.lock:
        free = bench.brain.state.free
        assert old in free[: bench.brain.state.scalars[0]]
    bench.begin(1, 2, 4, 6)
    assert old in [bench.brain.slot(1, expert) for expert in (2, 4, 6)]
    [copies] = [s for s in bench.device._streams if s]
    while bench.device.advance(copies):
        bench.pump()
    assert bench.slots[old][0] == 5, "overwritten before the kernel that reads it has run"
    bench.run()
    assert reads == [5]
    assert bench.slots[old][0] != 5


@pytest.mark.unit
def test_late_experts_run_behind_their_copies_in_link_order(bench: Bench) -> None:
    """One launch each, in the order of the link, then what follows; the device may be as late as it likes.

    What they are told comes to the device before any of them waits.
    """
    seen: list[tuple[int, ...]] = []
    plan, here = np.zeros((3, 4), np.int64), np.zeros((3, 4), np.int64)

    def wave(number: int) -> None:
        address, first, count, _ = here[number]
        slot = (address - int(bench.targets[0])) // BYTES
        seen.append((int(bench.slots[slot][0]), first, count))

    waves = np.array([bench.device(lambda n=n: wave(n)) for n in range(3)], np.uint64)  # type: ignore[misc]
    then, bring = bench.device(lambda: seen.append((-1,))), bench.device(lambda: np.copyto(here, plan))
    bench.begin(0, 1, 4)
    late = np.array([[4, 1], [0, 1], [1, 3]], np.int64)
    step = CStep(waves=waves.ctypes.data, plan=plan.ctypes.data, late=2, next=then, bring=bring)
    step.keys, step.firsts, step.counts = (row.ctypes.data for row in late)
    bench.issuer.run(step)
    assert seen == []
    assert bench.device.advance(0)
    assert here.any()
    assert bench.device.advance(0) is False, "kernels wait for the copies"
    bench.run()
    assert seen == [(1, 1, 3), (4, 0, 1), (-1,)]


@pytest.mark.unit
def test_more_late_experts_than_the_window(shape: ModelShape) -> None:
    """The call itself issues what becomes free while it waits, on a device that works by itself."""
    library, calls = issue_library(), queue_calls()
    if library is None or calls is None:
        pytest.skip("no native library, or numba compiles nothing")
    bench = Bench(shape, Settings(cache_ratio=0.125, draft={"kind": "ngram", "gamma": 3}))
    bench.device.close()
    device = FakeDevice(seed=3)
    issuer = Issuer(library, device.functions)
    copies = NativeCopies(bench.brain, issuer, calls, bench.copies._find_blocks)
    ran: list[int] = []
    plan, here = np.zeros((6, 4), np.int64), np.zeros((6, 4), np.int64)
    waves = np.array([device(lambda n=n: ran.append(int(here[n, 1]))) for n in range(6)], np.uint64)  # type: ignore[misc]
    bring = device(lambda: np.copyto(here, plan))
    experts = np.array([0, 2, 3, 5, 6, 7], np.int32)
    with copies.lock:
        bench.brain.begin(0, experts, np.ones(6, np.int32))
        copies.kick()
    late = np.array([experts, range(6), np.ones(6)]).astype(np.int64)
    step = CStep(waves=waves.ctypes.data, plan=plan.ctypes.data, late=6, bring=bring)
    step.keys, step.firsts, step.counts = (row.ctypes.data for row in late)
    issuer.run(step)
    copies.wait_landed(late[0].tolist())
    while not device.idle:
        pass
    assert ran == list(range(6))
    assert device.most_in_flight <= WINDOW
    with copies.lock:
        bench.brain.finish(0)
        copies.settle()
    bench.brain.check_integrity()
    copies.close()
    device.close()
    bench.issuer.close()


@pytest.mark.unit
def test_new_state_is_followed(bench: Bench) -> None:
    bench.begin(0, 3)
    bench.run()
    with bench.copies.lock:
        bench.brain.finish(0)
        bench.brain.quiesce()
        bench.copies.settle()
        bench.brain.reconfigure(Settings(cache_ratio=0.25), (2,) * bench.shape.n_moe_layers)
    assert bench.status(0, 3) == [KEPT]
    bench.begin(1, 0)
    assert bench.status(1, 0) == [IN_FLIGHT]
    bench.run()
    assert bench.status(1, 0) == [LANDED]
    bench.brain.check_integrity()


@pytest.mark.unit
def test_spans(bench: Bench) -> None:
    bench.copies.spans = []
    bench.begin(0, 3)
    with bench.copies.lock:
        bench.brain.prefetch(1, np.array([6], np.int32))
        bench.copies.kick()
    bench.run()
    found = bench.copies.spans
    bench.copies.spans = None
    assert found is not None
    assert [(span.key, span.purpose) for span in found] == [(3, DEMAND), (14, PREFETCH)]
    assert all(span.issued_ns <= span.landed_ns for span in found)
    assert bench.copies.spans is None


@pytest.mark.unit
def test_a_throttled_copy_is_between_two_graphs(bench: Bench) -> None:
    """In the stream of copies, before the event that says it has landed; none once the throttle is off."""
    before, after = bench.device(lambda: None), bench.device(lambda: None)
    with bench.copies.lock:
        bench.issuer.throttle(before, after)
    bench.begin(0, 3, 5)
    for _ in range(2):  # the graph before, and the copy
        bench.device.advance()
        bench.pump()
    assert bench.status(0, 3) == [IN_FLIGHT]
    bench.run()
    assert [at if kind == "graph" else kind for kind, at in bench.device.log] == [before, "copy", after] * 2
    bench.finish(0)
    with bench.copies.lock:
        bench.issuer.throttle(None, None)
    bench.device.log.clear()
    bench.begin(1, 4)
    bench.run()
    assert [kind for kind, _ in bench.device.log] == ["copy"]


@pytest.mark.unit
@pytest.mark.parametrize("function", ["cudaMemcpyAsync", "cudaEventQuery"])
def test_errors_are_named(bench: Bench, function: str) -> None:
    bench.device.failing[function] = 719

    def work() -> None:
        bench.begin(0, 3)
        bench.pump()

    with pytest.raises(InternalError, match="CUDA error 719"):
        work()
    with pytest.raises(InternalError, match="719"):
        bench.copies.wait_landed([3])


@pytest.mark.unit
def test_words_are_awaited(bench: Bench) -> None:
    words = np.array([7 << 16 | 3, 7 << 16 | 0xFFFF, 6 << 16], np.int32)
    assert bench.issuer.told(words.ctypes.data, 2, 7, 0)
    assert not bench.issuer.told(words.ctypes.data, 3, 7, 1_000_000)
    words[2] = 7 << 16 | 1
    assert bench.issuer.told(words.ctypes.data, 3, 7, 0)


@pytest.mark.unit
def test_c_structures_agree() -> None:
    """Pointers and 64-bit numbers alone, so that no padding can differ."""
    for structure in (CStep,):
        assert all(ctypes.sizeof(kind) == 8 for _, kind in structure._fields_)
