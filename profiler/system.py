"""What this machine is: processor, memory, limits, GPUs and their links, as far as the system tells."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from foreload.machine import cores, cpu_name, software

SMI_FIELDS = (
    "name", "uuid", "driver_version", "memory.total", "memory.free", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max", "pci.bus_id",
)  # fmt: skip
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it; None: not told."""

    name: str
    uuid: str
    driver: str
    memory_bytes: int | None
    free_bytes: int | None
    link_gen: int | None  # PCIe generation now; it may drop while nothing is copied
    link_gen_max: int | None
    link_width: int | None  # lanes
    link_width_max: int | None
    numa_node: int | None


@dataclass(frozen=True)
class System:
    """The machine without its GPUs."""

    cpu: str
    cores: int  # that this process may use
    cores_all: int
    cpu_quota: float | None  # cores' worth of time that a container may use; None: all
    numa_nodes: tuple[str, ...]  # the cores of each
    ram_bytes: int
    available_bytes: int
    swap_used_bytes: int
    memory_limit_bytes: int | None  # of a container
    memlock_bytes: int | None  # that may be locked; None: no limit
    kernel: str
    wsl: bool
    software: dict[str, str]


def system() -> System:
    """What the operating system says."""
    memory, kernel = psutil.virtual_memory(), f"{platform.system()} {platform.release()}"
    return System(
        cpu=cpu_name(),
        cores=cores(),
        cores_all=os.cpu_count() or 1,
        cpu_quota=_quota(_first_line(Path("/sys/fs/cgroup/cpu.max"))),
        numa_nodes=_numa_nodes(Path("/sys/devices/system/node")),
        ram_bytes=memory.total,
        available_bytes=memory.available,
        swap_used_bytes=psutil.swap_memory().used,
        memory_limit_bytes=_number(_first_line(Path("/sys/fs/cgroup/memory.max"))),
        memlock_bytes=_memlock(),
        kernel=kernel,
        wsl="microsoft" in kernel.lower(),
        software=software(),
    )


def _first_line(path: Path) -> str:
    with suppress(OSError, IndexError):
        return path.read_text(encoding="utf-8").splitlines()[0].strip()
    return ""


def _number(text: str) -> int | None:
    """A whole number; None for anything else ("max", "[N/A]", nothing)."""
    return int(text) if text.strip().isdigit() else None


def _quota(line: str) -> float | None:
    """Cores' worth of time in cgroup's `cpu.max`: quota and period in microseconds."""
    parts = [_number(part) for part in line.split()]
    if len(parts) != 2 or parts[0] is None or not parts[1]:
        return None
    return parts[0] / parts[1]


def _numa_nodes(folder: Path) -> tuple[str, ...]:
    nodes = sorted(folder.glob("node[0-9]*"), key=lambda node: int(node.name[4:]))
    return tuple(_first_line(node / "cpulist") for node in nodes)


def _memlock() -> int | None:
    try:
        import resource
    except ImportError:  # no POSIX limits here
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def gpus() -> list[Gpu]:
    """What `nvidia-smi` says now; nothing where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_smi(said)


def parse_smi(said: str, devices: Path = Path("/sys/bus/pci/devices")) -> list[Gpu]:
    """GPUs in the order of `SMI_FIELDS`, one on a line."""
    found = []
    for line in said.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != len(SMI_FIELDS):
            continue
        total, free, gen, gen_max, width, width_max = map(_number, parts[3:9])
        found.append(
            Gpu(
                name=parts[0],
                uuid=parts[1],
                driver=parts[2],
                memory_bytes=None if total is None else total * MIB,
                free_bytes=None if free is None else free * MIB,
                link_gen=gen,
                link_gen_max=gen_max,
                link_width=width,
                link_width_max=width_max,
                numa_node=_number(_first_line(devices / _sysfs_name(parts[9]) / "numa_node")),
            )
        )
    return found


def _sysfs_name(bus_id: str) -> str:
    """`00000000:1B:00.0` as sysfs spells it, `0000:1b:00.0`."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def this_gpu() -> Gpu | None:
    """The GPU that torch uses, as its driver describes it now; None if it is not told."""
    import torch

    if not torch.cuda.is_available():
        return None
    known = gpus()
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(0), 'uuid', '')}"
    named = [gpu for gpu in known if gpu.uuid == uuid]
    return named[0] if named else (known[0] if len(known) == 1 else None)
