"""`examine`: what `foreload doctor` says of a machine, with or without a GPU, and what is wrong with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from foreload.backend.cuda.open import missing
from foreload.backend.models.checkpoint import Checkpoint
from foreload.backend.native import describe
from foreload.formats import FORMAT_OF_DTYPE, block_layout
from foreload.machine import stolen
from foreload.profiler import transfers
from foreload.profiler.fits import Fit, fits
from foreload.profiler.formats import ScratchExperts, cpu_samples
from foreload.profiler.probes import thread_counts
from foreload.profiler.schema import HardwareProfile, Measurement
from foreload.profiler.stats import summarise
from foreload.profiler.system import Gpu, System, system, this_gpu
from foreload.units import format_bytes

GB_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""PCIe payload in GB/s per lane and direction, by generation, before packet headers."""
EXPECTED_SHARE = 0.7
"""Of that, what pinned copies of some megabytes should reach."""
SHAPE = "shape:qwen3-30b-a3b"
"""Whose experts the CPU computes here."""
SECONDS = 0.2  # for each point
NOT_READ = "the file is too small, or the system does not let go of what it has of it in memory (a tmpfs, an overlay)"
MOST_STOLEN_PCT = 1.0


@dataclass(frozen=True)
class Problem:
    """Something that costs speed, or that keeps Foreload from running, and what helps."""

    what: str
    advice: str


@dataclass(frozen=True)
class Examined:
    """One machine."""

    system: System
    gpu: Gpu | None  # under load
    gpu_name: str  # as torch says; empty without one
    cpu_experts: str
    graphs: str  # why decode steps cannot be graphs here; empty: they can
    measurements: tuple[Measurement, ...]
    pinned_bytes: int | None  # that could be pinned; None without a GPU
    not_pinned_bytes: int | None  # the first size that could not
    spills: bool | None
    not_read: str = ""  # why no storage was measured; empty: it was
    stolen_pct: float = 0.0  # of all cores' time while CPU experts ran: the host of a virtual machine ran somebody else

    @property
    def fits(self) -> list[Fit]:
        """Lines through what was measured."""
        return fits(self.measurements)

    def fastest(self, probe: str, **at: int) -> float | None:
        """The best rate of a probe by bytes, in bytes per second; None if it was not measured."""
        rates = [
            m.at["bytes"] * 1e6 / m.p50_us
            for m in self.measurements
            if m.probe == probe and at.items() <= m.at.items() and m.p50_us
        ]
        return max(rates, default=None)


def examine(step: Callable[[str], None] = lambda _: None, file: Path | None = None) -> Examined:
    """Measure what can be measured without a model; `step(what)` before each part; `file`: storage to read from."""
    cuda = torch.cuda.is_available()
    found: list[Measurement] = []
    step("CPU experts")
    with stolen() as share:
        found += cpu_experts()
    step("storage")
    reads = list(transfers.storage(file, transfers.SIZES, SECONDS))
    found += reads
    gpu, pinned, refused, spills = None, None, None, None
    if cuda:
        step("copies")
        found += transfers.copies_to_device(transfers.SIZES, SECONDS)
        found += transfers.copies_back(transfers.SIZES, SECONDS)
        step("link under load")
        gpu = under_load()
        step("pinned memory")
        pinned, refused = transfers.pinned_quota()
        spills = transfers.spills_into_host_memory(torch.cuda.mem_get_info()[0])
    return Examined(
        system=system(),
        gpu=gpu,
        gpu_name=torch.cuda.get_device_name() if cuda else "",
        cpu_experts=describe(),
        graphs=_no_graphs(cuda),
        measurements=tuple(found),
        pinned_bytes=pinned,
        not_pinned_bytes=refused,
        spills=spills,
        not_read="" if reads else NOT_READ,
        stolen_pct=share[0],
    )


def cpu_experts() -> Iterator[Measurement]:
    """A layer-step's experts of a published shape on the CPU, by threads (`experts_cpu`)."""
    shape = Checkpoint.open(SHAPE).shape
    scratch = ScratchExperts(shape, torch.bfloat16, FORMAT_OF_DTYPE["bfloat16"])
    for threads in thread_counts():
        for experts, samples in cpu_samples(scratch, threads, (shape.top_k,), 100, SECONDS):
            yield summarise("experts_cpu", samples, experts=experts, threads=threads)


def _no_graphs(cuda: bool) -> str:
    if not cuda:
        return "there is no GPU"
    shape = Checkpoint.open(SHAPE).shape
    return missing([block_layout("bf16", shape)], shape) or ""


def under_load() -> Gpu | None:
    """The GPU as its driver describes it while copies keep its link busy."""
    stop = threading.Event()

    def copy() -> None:
        source = torch.ones(64 << 20, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device="cuda")
        stream = torch.cuda.Stream()
        while not stop.is_set():
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            stream.synchronize()

    busy = threading.Thread(target=copy)
    busy.start()
    try:
        time.sleep(0.3)
        return this_gpu()
    finally:
        stop.set()
        busy.join()


def problems(found: Examined, profile: HardwareProfile | None = None) -> list[Problem]:
    """What is wrong, the worst first; nothing if all is as it should be."""
    said = [*_gpu_problems(found), *_memory_problems(found), *_cpu_problems(found)]
    if profile is not None and profile.meta.noise_pct > 25:
        said.append(
            Problem(
                f"a fixed block varied by {profile.meta.noise_pct:.0f} % while the profile was taken",
                "profile again on a quiet machine: predictions cannot be better than it",
            )
        )
    return said


def _gpu_problems(found: Examined) -> Iterator[Problem]:
    gpu = found.gpu
    if not found.gpu_name:
        yield Problem("no CUDA GPU is visible", "on a machine with one: install a torch build for CUDA and the driver")
        return
    if found.graphs:
        yield Problem(f"decode steps cannot be graphs: {found.graphs}", "they run with --eager, several times slower")
    if found.spills:
        yield Problem(
            "the driver gives out host memory as device memory",
            "turn the system memory fallback off: slots would live behind the link without anyone knowing",
        )
    if gpu is None:
        return
    if gpu.link_width and gpu.link_width_max and gpu.link_width < gpu.link_width_max:
        yield Problem(
            f"the link has {gpu.link_width} of {gpu.link_width_max} lanes",
            "another slot, no riser, or fewer devices that share its lanes",
        )
    if gpu.link_gen and gpu.link_gen_max and gpu.link_gen < gpu.link_gen_max:
        yield Problem(
            f"the link runs at PCIe {gpu.link_gen} of {gpu.link_gen_max} under load", "see the slot and BIOS settings"
        )
    rate, nominal = found.fastest("copy", pinned=1), nominal_bytes_per_s(gpu)
    if rate and nominal and rate < EXPECTED_SHARE * nominal:
        yield Problem(
            f"pinned copies reach {rate / 1e9:.1f} GB/s of the link's {nominal / 1e9:.1f}",
            "other load on the link or on host memory, or a virtual machine without huge pages",
        )


def nominal_bytes_per_s(gpu: Gpu) -> float | None:
    """What the link could carry one way; None if it is not told."""
    if gpu.link_gen is None or gpu.link_width is None:
        return None
    return GB_PER_LANE.get(gpu.link_gen, 0.0) * gpu.link_width * 1e9 or None


def _memory_problems(found: Examined) -> Iterator[Problem]:
    of = found.system
    if found.not_pinned_bytes is not None:
        yield Problem(
            f"{format_bytes(found.not_pinned_bytes)} of host memory cannot be pinned",
            "raise the memlock limit (ulimit -l unlimited), or in WSL the memory of the virtual machine",
        )
    elif found.gpu_name and of.memlock_bytes is not None and of.memlock_bytes < of.ram_bytes // 2:
        yield Problem(
            f"only {format_bytes(of.memlock_bytes)} may be locked in memory",
            "ulimit -l unlimited, if experts turn out not to be pinned",
        )
    if of.memory_limit_bytes is not None and of.memory_limit_bytes < of.ram_bytes:
        yield Problem(
            f"this container may use {format_bytes(of.memory_limit_bytes)} of {format_bytes(of.ram_bytes)}",
            "the experts must fit into it",
        )
    if of.swap_used_bytes > 1 << 30:
        yield Problem(
            f"{format_bytes(of.swap_used_bytes)} are swapped out", "free memory: experts that are swapped stall tokens"
        )


def _cpu_problems(found: Examined) -> Iterator[Problem]:
    of = found.system
    if found.cpu_experts.startswith("torch"):
        yield Problem(f"CPU experts run on {found.cpu_experts}", "install a C compiler, then the package again")
    if of.cpu_quota is not None and of.cpu_quota < of.cores:
        yield Problem(
            f"{of.cores} cores are visible, and the time of {of.cpu_quota:g} may be used",
            "use no more CPU threads than that",
        )
    if found.stolen_pct > MOST_STOLEN_PCT:
        yield Problem(
            f"the host of this virtual machine took {found.stolen_pct:.1f} % of the cores' time while CPU experts ran",
            "a layer waits for the slowest thread: compare fewer CPU threads, and expect times to vary",
        )
    if len(of.numa_nodes) > 1:
        where = (
            "" if found.gpu is None or found.gpu.numa_node is None else f", the GPU is at node {found.gpu.numa_node}"
        )
        yield Problem(
            f"memory is in {len(of.numa_nodes)} NUMA nodes{where}", "bind the process to the GPU's node (numactl)"
        )
