"""Timing of short blocks: samples on the decoding thread, time on the GPU, and their summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from foreload.profiler.schema import Measurement


def summarise(
    probe: str, samples_us: Sequence[float], gpu_us: float = 0.0, gpu_p95_us: float = 0.0, **at: int
) -> Measurement:
    """Median and 95th percentile of samples (at least one) as a Measurement."""
    p50, p95 = np.percentile(np.asarray(samples_us), [50, 95])
    return Measurement(
        probe=probe,
        at=at,
        p50_us=round(float(p50), 3),
        p95_us=round(float(p95), 3),
        gpu_us=round(gpu_us, 3),
        gpu_p95_us=round(gpu_p95_us, 3),
        repeats=len(samples_us),
    )


def summarise_device(probe: str, host_us: Sequence[float], device_us: Sequence[float], **at: int) -> Measurement:
    """The same of samples of the host's time and of the device's."""
    p50, p95 = np.percentile(np.asarray(device_us), [50, 95])
    found = summarise(probe, host_us, float(p50), float(p95), **at)
    return found.model_copy(update={"repeats": len(device_us)})


def averaged(probe: str, host_us: Sequence[float], device_us: Sequence[float] | None = None, **at: int) -> Measurement:
    """The same with means: of blocks that every step has, now and then much longer than most of the time."""
    if device_us is None:
        return summarise(probe, host_us, **at).model_copy(update={"mean_us": _mean(host_us)})
    means = {"mean_us": _mean(host_us), "gpu_mean_us": _mean(device_us)}
    return summarise_device(probe, host_us, device_us, **at).model_copy(update=means)


PARTS = 16


def varied(probe: str, host_us: Sequence[float], **at: int) -> Measurement:
    """The same, and how samples are spread, where there are enough: of what something else runs beside."""
    found, ordered = averaged(probe, host_us, None, **at), np.sort(np.asarray(host_us))
    return found.model_copy(update={"parts_us": _parts(ordered)}) if len(ordered) >= PARTS else found


def _parts(ordered_us: NDArray[np.float64]) -> tuple[float, ...]:
    """Means of `PARTS` runs of ordered samples, the longest as in `_mean`."""
    kept = np.minimum(ordered_us, np.percentile(ordered_us, 99, method="lower"))
    return tuple(round(float(part.mean()), 3) for part in np.array_split(kept, PARTS))


def _mean(samples_us: Sequence[float]) -> float:
    """The mean, with the longest hundredth no longer than the longest of the others: it would go by chance."""
    samples = np.asarray(samples_us)
    return round(float(np.minimum(samples, np.percentile(samples, 99, method="lower")).mean()), 3)


def middle_of_each(found: Sequence[Measurement]) -> list[Measurement]:
    """The same with one measurement of each point: of several the medians, the worst 95th percentile, and the mean of
    all samples.
    """
    points: dict[tuple[str, tuple[tuple[str, int], ...]], list[Measurement]] = {}
    for one in found:
        points.setdefault((one.probe, tuple(sorted(one.at.items()))), []).append(one)
    return [several[0] if len(several) == 1 else _middle(several) for several in points.values()]


def _middle(several: Sequence[Measurement]) -> Measurement:
    return several[0].model_copy(
        update={
            "p50_us": round(median(one.p50_us for one in several), 3),
            "p95_us": max(one.p95_us for one in several),
            "gpu_us": round(median(one.gpu_us for one in several), 3),
            "gpu_p95_us": max(one.gpu_p95_us for one in several),
            "mean_us": _mean_of(several, "mean_us"),
            "gpu_mean_us": _mean_of(several, "gpu_mean_us"),
            "parts_us": _parts_of(several),
            "repeats": sum(one.repeats for one in several),
        }
    )


def _mean_of(several: Sequence[Measurement], name: Literal["mean_us", "gpu_mean_us"]) -> float | None:
    known = [(us, one.repeats) for one in several if (us := getattr(one, name)) is not None]
    return round(sum(us * n for us, n in known) / sum(n for _, n in known), 3) if known else None


def _parts_of(several: Sequence[Measurement]) -> tuple[float, ...] | None:
    known = [one.parts_us for one in several if one.parts_us is not None]
    return _parts(np.sort(np.concatenate(known))) if known else None


LEAST_TURNS = 4


def in_time(most: int, seconds: float) -> Iterator[int]:
    """0, 1, ... as long as time is left, at least `LEAST_TURNS` times and at most `most` times."""
    until = time.monotonic() + seconds
    for turn in range(max(most, LEAST_TURNS)):
        if turn >= LEAST_TURNS and time.monotonic() > until:
            return
        yield turn


def host_samples(
    block: Callable[[int], object], repeats: int, device: torch.device, seconds: float = float("inf")
) -> list[float]:
    """Microseconds that `block(i)` keeps the calling thread, each on an idle device, after three warm-ups.

    So many `repeats`, but fewer once `seconds` are over, and at least one.
    """
    samples, until = list[float](), time.monotonic() + seconds
    for i in range(-3, repeats):
        if samples and time.monotonic() > until:
            break
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter_ns()
        block(max(i, 0))
        if i >= 0:
            samples.append((time.perf_counter_ns() - begun) / 1e3)
    return samples


def gpu_microseconds(block: Callable[[int], object], repeats: int, device: torch.device) -> float:
    """Mean microseconds that `block(i)` keeps the GPU busy; 0 on a synchronous device.

    The queue is filled behind a sleeping kernel, so that launch gaps do not count.
    """
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize(device)
    block(0)
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    block(0)
    torch.cuda.synchronize(device)
    launch_s = time.perf_counter() - begun
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    repeats = max(3, min(repeats, int(0.02 / launch_s)))
    torch.cuda._sleep(int(2e9 * launch_s * repeats * 1.5))
    start.record()
    for i in range(repeats):
        block(i)
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) * 1e3 / repeats
