"""This machine and its software, as provenance."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

SOFTWARE = ("foreload", "torch", "numpy", "numba", "triton")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def cpu_name() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_name() -> str:
    """Processor, cores and system, on one line."""
    return f"{cpu_name()}, {cores()} cores, {platform.system()} {platform.machine()}"


def software() -> dict[str, str]:
    """Versions of what results depend on."""
    found = {"python": platform.python_version()}
    for name in SOFTWARE:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@contextmanager
def stolen() -> Iterator[list[float]]:
    """Give, afterwards, the per cent of all cores' time in which the host of a virtual machine ran somebody else."""
    found, before = [0.0], psutil.cpu_times()
    yield found
    after = psutil.cpu_times()
    passed = sum(after) - sum(before)
    found[0] = 100 * (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / passed if passed > 0 else 0.0
