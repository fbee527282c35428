"""Machines that are not there: what changes of a profile, what stays, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_inputs import make_graph_profile, make_profile, make_shape, make_trace

from foreload.errors import UsageError
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.simulator.compiled import simulate
from foreload.simulator.costs import CostModel
from foreload.simulator.machines import CARDS, NAMES, assume, expert_rate
from foreload.simulator.whatif import Machine, on_machine

pytestmark = pytest.mark.unit
SHAPE = make_shape()
GPU = make_profile(SHAPE, "cuda", gpu_us=5.0)


def named(profile: HardwareProfile, device: str) -> HardwareProfile:
    return profile.model_copy(update={"meta": profile.meta.model_copy(update={"device_name": device})})


def us(profile: HardwareProfile, probe: str, **at: int) -> float:
    return profile.points(probe, **at)[0].p50_us


def test_a_slower_link_is_the_bottleneck_of_its_copies() -> None:
    """100 us a copy, 125 beside CPU experts: at half the rate the link alone decides, the CPU loses half as much."""
    slow = on_machine(GPU, Machine(link=0.5))
    size = GPU.meta.expert_bytes
    assert us(slow, "copy", bytes=size) == 200
    assert us(slow, "copy_beside_cpu", threads=1) == 200
    assert us(GPU, "experts_cpu_beside_copy", experts=1, threads=1) == 90
    assert us(slow, "experts_cpu_beside_copy", experts=1, threads=1) == 75
    assert us(slow, "experts_cpu", experts=1, threads=1) == 60
    barely = on_machine(GPU, Machine(link=0.9))
    assert us(barely, "copy_beside_cpu", threads=1) == 125


def test_a_faster_link_is_still_slowed_by_the_cpu() -> None:
    fast = on_machine(GPU, Machine(link=2.0))
    assert us(fast, "copy_beside_cpu", threads=1) == pytest.approx(62.5)
    assert us(fast, "experts_cpu_beside_copy", experts=1, threads=1) == pytest.approx(120)


def test_slower_cpu_experts_disturb_less() -> None:
    slow = on_machine(GPU, Machine(cpu=0.5))
    assert us(slow, "experts_cpu", experts=1, threads=1) == 120
    assert us(slow, "experts_cpu_beside_copy", experts=1, threads=1) == pytest.approx(2 * (60 + 15))
    assert us(slow, "copy_beside_cpu", threads=1) == pytest.approx(112.5)
    assert us(slow, "copy", bytes=GPU.meta.expert_bytes) == 100


def test_a_card_scales_what_keeps_the_gpu_busy() -> None:
    profile = named(GPU, "NVIDIA H200")
    found = assume(profile, None, None, "rtx-4090")
    assert found.vram_bytes == 24 * 2**30
    for before, after in zip(profile.measurements, found.profile.measurements, strict=True):
        if before.gpu_us:
            assert after.gpu_us == pytest.approx(before.gpu_us * 4800 / 1008)
            assert after.source == "assumed"
    assert expert_rate(found.profile) == pytest.approx(0.86 * 1.969 * 16e9, rel=1e-6)
    assert found.profile.meta.machine == "test; assumed: rtx-4090, 1008 GB/s of memory, link 27.1 GB/s"


@pytest.mark.parametrize("name", NAMES)
def test_every_name(name: str) -> None:
    """Each gives a profile that simulates, every changed figure assumed; --link takes the place of its own."""
    profile = named(GPU, "NVIDIA H200")
    found = assume(profile, None, None, name)
    result = simulate(make_trace(SHAPE), found.profile, SHAPE, Settings(cache_ratio=0.25), (2,) * 4)
    assert result.sources["copy"] == "assumed"
    assert (found.vram_bytes is not None) == (name in CARDS)
    other = assume(profile, 10**9, 2.0, name).profile
    assert expert_rate(other) == pytest.approx(1e9)
    assert "link 1 GB/s, CPU experts x 2" in other.meta.machine
    for before, after in zip(profile.measurements, other.measurements, strict=True):
        assert before == after or after.source == "assumed"


def test_graphs_on_another_machine() -> None:
    """A slower link slows what fetches by no more than its copies, a slower CPU what computes there, a card both."""
    profile, trace = named(make_graph_profile(SHAPE), "NVIDIA H200"), make_trace(SHAPE, requests=1)
    fetch, cpu = Settings(cache_ratio=0.0), Settings(cache_ratio=0.0, miss_action="cpu", cpu_threads=2)

    def total(found: HardwareProfile, settings: Settings) -> int:
        return simulate(trace, found, SHAPE, settings, (0,) * 4).total_ns

    slow_link = on_machine(profile, Machine(link=0.5))
    assert total(profile, fetch) < total(slow_link, fetch) < 2 * total(profile, fetch)
    assert total(slow_link, cpu) == total(profile, cpu)
    slow_cpu = on_machine(profile, Machine(cpu=0.5))
    assert total(slow_cpu, fetch) == total(profile, fetch)
    assert total(slow_cpu, cpu) > total(profile, cpu)
    card = assume(profile, None, None, "rtx-3090").profile
    assert total(card, cpu) > total(profile, cpu)


@given(link=st.floats(0.05, 20), cpu=st.floats(0.05, 20))
def test_nothing_is_faster_in_company(link: float, cpu: float) -> None:
    costs = CostModel(on_machine(GPU, Machine(link=link, cpu=cpu)), SHAPE)
    for threads in costs.cpu_threads:
        beside = costs.cost("copy_beside_cpu", 0, threads).host_ns
        assert beside >= costs.copy_ns - 1
        assert costs.cost("experts_cpu_beside_copy", 1, threads).host_ns >= costs.experts_cpu_ns(1, threads) - 1


@given(factor=st.floats(1.01, 50))
def test_a_faster_link_never_slows_fetching(factor: float) -> None:
    trace, settings = make_trace(SHAPE, requests=1), Settings(cache_ratio=0.25)
    slow = simulate(trace, GPU, SHAPE, settings, (2,) * 4)
    fast = simulate(trace, on_machine(GPU, Machine(link=factor)), SHAPE, settings, (2,) * 4)
    assert fast.total_ns <= slow.total_ns


def test_no_change_is_the_profile_itself() -> None:
    assert on_machine(GPU, Machine()) is GPU
    assert not Machine().describe()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((None, None, "rtx-9090"), r"--machine 'rtx-9090' is unknown: there are pcie3x4, .*rtx-a6000"),
        ((None, 0.0, None), "--cpu-scale 0: a factor above 0 is needed"),
        ((None, float("nan"), None), "--cpu-scale nan: a factor above 0"),
        ((None, None, "rtx-4090"), "memory bandwidth of the profiled device 'test' is not known"),
    ],
)
def test_refused(asked: tuple[int | None, float | None, str | None], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        assume(GPU, *asked)


def test_a_card_needs_a_profiled_gpu() -> None:
    with pytest.raises(UsageError, match="the profile is of device 'cpu', without a GPU"):
        assume(named(make_profile(SHAPE), "NVIDIA H200"), None, None, "rtx-3090")
