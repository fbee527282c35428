"""What moves bytes without an engine: copies both ways, storage, and how much host memory may be pinned."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import psutil
import torch

from foreload.backend.experts.slab import clear_cuda_error
from foreload.profiler.schema import Measurement
from foreload.profiler.stats import host_samples, summarise

MIB = 1 << 20
SIZES = tuple(1 << n for n in (14, 18, 20, 22, 24, 26))
QUOTA_STEP, QUOTA_MOST = 256 << 20, 8 << 30


def copies_to_device(sizes: Sequence[int], seconds: float) -> Iterator[Measurement]:
    """`copy` of pinned and pageable host memory, one at a time."""
    device = torch.device("cuda")
    for size in sizes:
        target = torch.empty(size, dtype=torch.uint8, device=device)
        for pinned in (1, 0):
            source = torch.ones(size, dtype=torch.uint8, pin_memory=bool(pinned))
            samples = host_samples(lambda _, t=target, s=source: _copied(t, s), 200, device, seconds)  # type: ignore[misc]
            yield summarise("copy", samples, bytes=size, pinned=pinned)


def copies_back(sizes: Sequence[int], seconds: float) -> Iterator[Measurement]:
    """`to_host` into pinned and pageable memory; `both_ways`, one copy each way at once, until both are done."""
    device = torch.device("cuda")
    there, back = torch.cuda.Stream(), torch.cuda.Stream()
    for size in sizes:
        on_device = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2)]
        for pinned in (1, 0):
            on_host = torch.empty(size, dtype=torch.uint8, pin_memory=bool(pinned))
            samples = host_samples(lambda _, t=on_host, s=on_device[0]: _copied(t, s), 200, device, seconds)  # type: ignore[misc]
            yield summarise("to_host", samples, bytes=size, pinned=pinned)
        on_hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

        def both(_: int, hosts: list[torch.Tensor] = on_hosts, devices: list[torch.Tensor] = on_device) -> None:
            with torch.cuda.stream(there):
                devices[0].copy_(hosts[0], non_blocking=True)
            with torch.cuda.stream(back):
                hosts[1].copy_(devices[1], non_blocking=True)
            torch.cuda.synchronize()

        yield summarise("both_ways", host_samples(both, 200, device, seconds), bytes=size)


def _copied(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()


def storage(path: Path | None, sizes: Sequence[int], seconds: float) -> Iterator[Measurement]:
    """`storage`: reading a file (None: a temporary one) at places of which nothing is in memory.

    Nothing where the system cannot forget a file (a tmpfs), or does not say what it remembers of it.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    with tempfile.TemporaryDirectory() as folder:
        if path is None:
            path = Path(folder) / "read"
            path.write_bytes(os.urandom(MIB) * 64)
        with path.open("rb") as file:
            os.fsync(file.fileno())  # only pages that are written back can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # else more is read ahead than was asked for
            length = os.fstat(file.fileno()).st_size
            for size in sizes:
                samples = _reads(file.fileno(), length, size, seconds)
                if samples:
                    yield summarise("storage", samples, bytes=size)


def _reads(descriptor: int, length: int, size: int, seconds: float) -> list[float]:
    """Microseconds of reads of `size` bytes that were not in memory."""
    samples, until, buffer = list[float](), time.monotonic() + seconds, bytearray(size)
    for at in islice(places(length, size), 200):
        if samples and time.monotonic() > until:
            break
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if in_memory(descriptor, at, size):
            continue
        begun = time.perf_counter_ns()
        os.preadv(descriptor, [buffer], at)
        samples.append((time.perf_counter_ns() - begun) / 1e3)
    return samples


def places(length: int, size: int) -> Iterator[int]:
    """Every place for a read of `size` bytes in whole pages, none twice, neighbours in time far apart in the file."""
    step = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    count = (length - size) // step + 1 if length >= size else 0
    stride = max(1, round(count * 0.618))
    while math.gcd(stride, count) > 1:
        stride += 1
    return (turn * stride % count * step for turn in range(count))


def in_memory(descriptor: int, at: int, size: int) -> bool:
    """Whether any page of a file's bytes from `at` (the start of a page) is in memory; also if that is not known."""
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY, offset=at) as mapped:
        resident = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        failed = ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(size), resident)
        del start  # the mapping cannot be closed while it is pointed to
        return bool(failed) or any(pages & 1 for pages in resident)


def pinned_quota(
    most: int = QUOTA_MOST, register: Callable[[torch.Tensor], bool] | None = None
) -> tuple[int, int | None]:
    """Bytes of host memory that could be pinned, and the first size that could not be (None: as many as were tried).

    Never more than a quarter of what is available is tried; what was pinned is given back.
    """
    pin = register or _pinned
    most = min(most, psutil.virtual_memory().available // 4)
    could, size = 0, QUOTA_STEP
    while size <= most:
        if not pin(torch.empty(size, dtype=torch.uint8)):
            return could, size
        could, size = size, 2 * size
    return could, None


def _pinned(memory: torch.Tensor) -> bool:
    """Pin and unpin; a refusal leaves no error behind."""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0)):
        clear_cuda_error()
        return False
    runtime.cudaHostUnregister(memory.data_ptr())
    return True


def spills_into_host_memory(free_bytes: int) -> bool:
    """Whether more device memory can be had than is free: the driver then takes host memory, which is slow."""
    try:
        torch.empty(free_bytes + (512 << 20), dtype=torch.uint8, device="cuda")
    except RuntimeError:
        return False
    finally:
        torch.cuda.empty_cache()
    return True
