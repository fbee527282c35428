"""A profile of a machine that is not there: the measured one with another link or CPU. Changed figures are assumed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foreload.errors import UsageError
from foreload.profiler.schema import HardwareProfile, Measurement

LINK = ("copy", "copy_beside_cpu")
CPU = ("experts_cpu", "experts_cpu_beside_copy", "cpu_expert")


@dataclass(frozen=True)
class Machine:
    """Factors on the rates of the profiled machine: 2.0 is twice as fast."""

    link: float = 1.0
    cpu: float = 1.0

    @property
    def changed(self) -> bool:
        """Whether it differs from the profiled machine."""
        return (self.link, self.cpu) != (1.0, 1.0)


def on_machine(profile: HardwareProfile, machine: Machine) -> HardwareProfile:
    """`profile` as `machine` would have given it; UsageError for a factor that is not above 0.

    Times of copies and of CPU experts are divided by their factor. Device and CPU experts beside each other keep the
    slow-down that was measured: T(both) = s min + (max - min) of the isolated times, with the same s.
    """
    if min(machine.link, machine.cpu) <= 0:
        raise UsageError(f"link x {machine.link:g}, CPU x {machine.cpu:g}: factors above 0 are needed")
    if not machine.changed:
        return profile
    alone = _isolated(profile)
    found = tuple(_on(measurement, machine, alone) for measurement in profile.measurements)
    return profile.model_copy(update={"measurements": found})


def _isolated(profile: HardwareProfile) -> dict[tuple[str, int, int], float]:
    """Microseconds of resident experts and of CPU experts alone, by (probe, experts, threads)."""
    return {
        (m.probe, m.at["experts"], m.at.get("threads", 0)): max(m.p50_us, m.gpu_us)
        for m in profile.measurements
        if m.probe in ("experts_gpu", "experts_cpu")
    }


def _on(found: Measurement, machine: Machine, alone: Mapping[tuple[str, int, int], float]) -> Measurement:
    if found.probe in LINK and machine.link != 1:
        return _scaled(found, 1 / machine.link)
    if found.probe in CPU and machine.cpu != 1:
        return _scaled(found, 1 / machine.cpu)
    if found.probe == "both" and machine.cpu != 1:
        gpu = alone.get(("experts_gpu", found.at["gpu"], 0))
        cpu = alone.get(("experts_cpu", found.at["cpu"], found.at["threads"]))
        if gpu and cpu:
            return _scaled(found, _both(gpu, cpu, found.p50_us, cpu / machine.cpu) / found.p50_us)
    return found


def _both(gpu_us: float, cpu_us: float, both_us: float, faster_us: float) -> float:
    """Time of both with a CPU that alone takes `faster_us` instead of `cpu_us`."""
    short, long = sorted((gpu_us, cpu_us))
    slow_down = max(1.0, (both_us - long + short) / short)
    short, long = sorted((gpu_us, faster_us))
    return slow_down * short + long - short


def _scaled(found: Measurement, factor: float) -> Measurement:
    return found.model_copy(
        update={"p50_us": found.p50_us * factor, "p95_us": found.p95_us * factor, "source": "assumed"}
    )
