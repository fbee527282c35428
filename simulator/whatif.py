"""A profile of a machine that is not there: the measured one with another link, CPU or GPU. What changes is assumed.

Link and CPU experts read the same host memory. What one costs the other is taken to grow with its traffic: a link of a
fraction f of the rate slows CPU experts by f of what was measured. A slower link is the bottleneck of its copies: they
take what they took beside the CPU, or what the link needs, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreload.errors import UsageError
from foreload.profiler.schema import HardwareProfile, Measurement

CPU = ("experts_cpu", "cpu_expert", "window_experts_cpu", "cpu_format", "read_ahead")

_Alone = Mapping[tuple[str, int, int], float]
"""Microseconds of copies, resident experts and CPU experts alone, by (probe, experts, threads)."""


@dataclass(frozen=True)
class Machine:
    """Factors on the rates of the profiled machine: 2.0 is twice as fast."""

    link: float = 1.0
    cpu: float = 1.0
    gpu: float = 1.0  # its memory: what keeps the GPU busy is taken to be bound by that

    @property
    def changed(self) -> bool:
        """Whether it differs from the profiled machine."""
        return (self.link, self.cpu, self.gpu) != (1.0, 1.0, 1.0)

    def describe(self) -> str:
        """What differs, in words; nothing if nothing does."""
        named = {"link": self.link, "CPU experts": self.cpu, "GPU": self.gpu}
        return ", ".join(f"{name} x {factor:.3g}" for name, factor in named.items() if factor != 1)


def on_machine(profile: HardwareProfile, machine: Machine, said: str = "") -> HardwareProfile:
    """`profile` as `machine` would have given it, its `meta.machine` saying so (`said`: in these words).

    Device and CPU experts beside each other keep the slow-down that was measured: T(both) = s min + (max - min) of the
    isolated times, with the same s. UsageError for a factor that is not above 0, or a GPU's where none was profiled.
    """
    if min(machine.link, machine.cpu, machine.gpu) <= 0:
        raise UsageError(
            f"link x {machine.link:g}, CPU x {machine.cpu:g}, GPU x {machine.gpu:g}: factors above 0 are needed"
        )
    if machine.gpu != 1 and profile.meta.device != "cuda":
        raise UsageError(f"GPU x {machine.gpu:g}: the profile is of device {profile.meta.device!r}, without a GPU")
    if not machine.changed:
        return profile
    alone = _alone(profile)
    found = tuple(_on(measurement, machine, alone) for measurement in profile.measurements)
    update = {"machine": f"{profile.meta.machine}; assumed: {said or machine.describe()}"}
    if machine.link != 1:
        update["emulated_link_bytes_per_s"] = None  # type: ignore[assignment]
    return profile.model_copy(update={"measurements": found, "meta": profile.meta.model_copy(update=update)})


def _alone(profile: HardwareProfile) -> _Alone:
    found = {
        (m.probe, m.at["experts"], m.at.get("threads", 0)): max(m.cost_us)
        for m in profile.measurements
        if m.probe in ("experts_gpu", "experts_cpu")
    }
    copies = [m for m in profile.measurements if m.probe == "copy" and m.at.get("bytes") == profile.meta.expert_bytes]
    best = max(copies, key=lambda m: m.at.get("pinned", 0), default=None)
    return found if best is None else {**found, ("copy", 1, 0): best.cost_us[0]}


def _on(found: Measurement, machine: Machine, alone: _Alone) -> Measurement:
    factor = _factor(found, machine, alone)
    scaled = found if factor == 1 else _scaled(found, factor)
    if machine.gpu != 1 and found.gpu_us:
        mean = None if found.gpu_mean_us is None else found.gpu_mean_us / machine.gpu
        busy = {"gpu_us": found.gpu_us / machine.gpu, "gpu_mean_us": mean}
        return scaled.model_copy(update={**busy, "source": "assumed"})
    return scaled


def _factor(found: Measurement, machine: Machine, alone: _Alone) -> float:
    """How much longer its host time is on `machine`."""
    if found.probe == "copy":
        return 1 / machine.link
    if found.probe in CPU:
        return 1 / machine.cpu
    if found.probe == "copy_beside_cpu":
        return _copy_beside(found.cost_us[0], alone.get(("copy", 1, 0)), machine)
    if found.probe == "experts_cpu_beside_copy":
        own = alone.get(("experts_cpu", found.at["experts"], found.at["threads"]))
        return _cpu_beside(found.cost_us[0], own, machine)
    if found.probe == "both":
        gpu = alone.get(("experts_gpu", found.at["gpu"], 0))
        cpu = alone.get(("experts_cpu", found.at["cpu"], found.at["threads"]))
        if gpu and cpu:
            return _both(gpu, cpu, found.cost_us[0], machine) / found.cost_us[0]
    return 1.0


def _copy_beside(beside_us: float, copy_us: float | None, machine: Machine) -> float:
    if not copy_us:
        return 1 / machine.link
    contended = copy_us + max(0.0, beside_us - copy_us) * machine.cpu
    return (
        max(contended, copy_us / machine.link) / beside_us if machine.link < 1 else contended / machine.link / beside_us
    )


def _cpu_beside(beside_us: float, cpu_us: float | None, machine: Machine) -> float:
    if not cpu_us:
        return 1 / machine.cpu
    more = max(0.0, beside_us - cpu_us) * machine.link * min(1.0, machine.cpu)
    return (cpu_us + more) / machine.cpu / beside_us


def _both(gpu_us: float, cpu_us: float, both_us: float, machine: Machine) -> float:
    """Time of both where each alone takes what it takes on `machine`."""
    short, long = sorted((gpu_us, cpu_us))
    slow_down = max(1.0, (both_us - long + short) / short)
    short, long = sorted((gpu_us / machine.gpu, cpu_us / machine.cpu))
    return slow_down * short + long - short


def _scaled(found: Measurement, factor: float) -> Measurement:
    mean = None if found.mean_us is None else found.mean_us * factor
    parts = None if found.parts_us is None else tuple(us * factor for us in found.parts_us)
    times = {"p50_us": found.p50_us * factor, "p95_us": found.p95_us * factor, "mean_us": mean, "parts_us": parts}
    return found.model_copy(update={**times, "source": "assumed"})
