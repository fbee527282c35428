"""Machines by name, and what flags say of another machine than the profiled one. Everything here is assumed."""

from __future__ import annotations

from dataclasses import dataclass

from foreload.errors import UsageError
from foreload.profiler.schema import HardwareProfile
from foreload.simulator.whatif import Machine, on_machine

LANE_GB_PER_S = {3: 0.985, 4: 1.969, 5: 3.938}
"""Per PCIe generation: one lane and direction, after line coding."""
REACHED = 0.86
"""Share of that which large copies from pinned memory reach: 54.2 of 63 GB/s were measured on PCIe 5.0 x16."""
LANES = (4, 8, 16)
GIB = 1 << 30


@dataclass(frozen=True)
class Card:
    """A graphics card by its data sheet: memory bandwidth, memory, and the PCIe generation of its 16 lanes."""

    gb_per_s: float
    memory_bytes: int
    pcie: int


CARDS = {
    "rtx-3090": Card(936, 24 * GIB, 4),
    "rtx-4090": Card(1008, 24 * GIB, 4),
    "rtx-5090": Card(1792, 32 * GIB, 5),
    "rtx-a6000": Card(768, 48 * GIB, 4),
}
PROFILED_GB_PER_S = {
    "H200": 4800.0, "H100 PCIe": 2039.0, "H100": 3350.0, "A100-SXM4-80GB": 2039.0, "A100 80GB PCIe": 1935.0,
    "A100": 1555.0, "L40S": 864.0, "RTX 5090": 1792.0, "RTX 4090": 1008.0, "RTX 3090": 936.0, "RTX A6000": 768.0,
}  # fmt: skip
"""Memory bandwidth of GPUs that profiles may be of, by a part of their name; the first match counts."""
PORTS = {f"pcie{generation}x{lanes}": (generation, lanes) for generation in LANE_GB_PER_S for lanes in LANES}
NAMES = (*PORTS, *CARDS)


@dataclass(frozen=True)
class Assumed:
    """A profile as another machine would have given it; `vram_bytes` if that machine's memory is known."""

    profile: HardwareProfile
    vram_bytes: int | None = None


def assume(
    profile: HardwareProfile, link_bytes_per_s: int | None, cpu_scale: float | None, name: str | None
) -> Assumed:
    """`profile` on the named machine, with the link or the CPU experts that are given in its place.

    `link_bytes_per_s`: the rate of one expert's copy. `cpu_scale`: factor on the rate of CPU experts. UsageError for an
    unknown name (the known ones are listed), for a factor that is not above 0, and for a card where the profiled GPU's
    memory bandwidth is not known.
    """
    if name is not None and name not in NAMES:
        raise UsageError(f"--machine {name!r} is unknown: there are {', '.join(NAMES)}")
    if cpu_scale is not None and not 0 < cpu_scale < float("inf"):
        raise UsageError(f"--cpu-scale {cpu_scale:g}: a factor above 0 is needed")
    card = CARDS.get(name or "")
    rate = link_bytes_per_s or _port_rate(name, card)
    said = [] if card is None else [f"{name}, {card.gb_per_s:g} GB/s of memory"]
    said += [] if rate is None else [f"link {rate / 1e9:.3g} GB/s"]
    said += [] if cpu_scale is None else [f"CPU experts x {cpu_scale:g}"]
    machine = Machine(
        link=1.0 if rate is None else rate / expert_rate(profile),
        cpu=1.0 if cpu_scale is None else cpu_scale,
        gpu=1.0 if card is None else card.gb_per_s / _profiled_gb_per_s(profile),
    )
    return Assumed(on_machine(profile, machine, ", ".join(said)), None if card is None else card.memory_bytes)


def _port_rate(name: str | None, card: Card | None) -> int | None:
    port = (card.pcie, 16) if card is not None else PORTS.get(name or "")
    return None if port is None else int(REACHED * LANE_GB_PER_S[port[0]] * port[1] * 1e9)


def expert_rate(profile: HardwareProfile) -> float:
    """Bytes per second at which one expert was copied; FileError if that was not measured."""
    found = profile.points("copy", bytes=profile.meta.expert_bytes)
    best = max(found, key=lambda m: m.at.get("pinned", 0))
    return profile.meta.expert_bytes / best.p50_us * 1e6


def _profiled_gb_per_s(profile: HardwareProfile) -> float:
    name = profile.meta.device_name
    for part, rate in PROFILED_GB_PER_S.items():
        if part in name:
            return rate
    raise UsageError(
        f"--machine: memory bandwidth of the profiled device {name!r} is not known: cards can be assumed from profiles "
        f"of {', '.join(PROFILED_GB_PER_S)}; --link and --cpu-scale go with any"
    )
