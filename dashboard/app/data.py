"""What the pages show: sources (a profile and a recording), and simulations of them, kept for the next click."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.assets import ASSETS
from foreload.budget import fixed_bytes
from foreload.errors import UsageError
from foreload.files import read_mapping
from foreload.formats import layer_formats, slot_bytes
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.bounds import Bounds, belady_loads, bounds
from foreload.simulator.costs import CostModel
from foreload.simulator.curves import Curves, curve_steps, curves, slot_points
from foreload.simulator.engine_model import simulate
from foreload.simulator.result import SimResult
from foreload.simulator.whatif import Machine, on_machine
from foreload.simulator.workload import load_requests, request_numbers
from foreload.traces.histogram import uses
from foreload.traces.io import read_trace
from foreload.traces.schema import DECODE, PREFILL

TOKENS = 256
"""Decode tokens that a what-if simulates: the last requests of the recording that hold about as many."""
KEPT = 256


@dataclass(frozen=True)
class Source:
    """Files that belong together; `validation` is what `foreload validate --out` wrote on that machine."""

    name: str
    profile: Path
    trace: Path
    validation: Path | None = None


class Dataset:
    """A source in memory. Raises FileError or MismatchError if its files cannot be used together."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.profile = HardwareProfile.load(source.profile)
        self.trace = read_trace(source.trace)
        self.shape: ModelShape = self.trace.meta.model_shape()
        self.profile.check_model(self.shape, self.profile.meta.dtype)
        self.validation: dict[str, Any] | None = None
        if source.validation is not None:
            self.validation = read_mapping(source.validation, "validation")

    @property
    def dtype(self) -> str:
        """Type of the weights, as profiled."""
        return self.profile.meta.dtype

    @cached_property
    def requests(self) -> tuple[int, ...]:
        """The requests that are simulated: the last ones, of about `TOKENS` decode tokens together."""
        chosen: list[int] = []
        tokens = 0
        for number in reversed(request_numbers(self.trace)):
            here = int(((self.trace.request == number) & (self.trace.phase == DECODE)).sum())
            if chosen and tokens + here > TOKENS:
                break
            chosen.insert(0, number)
            tokens += here
        return tuple(chosen)

    @cached_property
    def longest(self) -> int:
        """Positions of the longest recorded request."""
        return int(self.trace.position.max(initial=0)) + 1

    @cached_property
    def curves(self) -> Curves:
        """Hits of every policy at every number of slots, over the whole recording."""
        return curves(curve_steps([self.trace], self.trace.meta))

    @cached_property
    def loads(self) -> NDArray[np.int64]:
        """Belady's loads of the simulated requests, [L, E + 1]."""
        return belady_loads(load_requests(self.trace, self.shape, None, self.requests), self.shape)

    @cached_property
    def use(self) -> NDArray[np.int64]:
        """Tokens per MoE layer and expert in decoding, [L, E]."""
        return self._use(self.trace.phase == DECODE)

    @cached_property
    def use_before(self) -> NDArray[np.int64]:
        """The same of the requests before those that are simulated; of all, if there are none before."""
        decoded = self.trace.phase == DECODE
        before = decoded & ~np.isin(self.trace.request, self.requests)
        return self._use(before if before.any() else decoded)

    def expert_bytes(self, settings: Settings) -> int:
        """Bytes of a slot under `settings`."""
        return slot_bytes(layer_formats(settings.expert_format, self.shape, self.dtype), self.shape)

    def _use(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        return uses(self.trace.experts[chosen], self.shape.experts)

    def describe(self) -> str:
        """Provenance on one line."""
        meta, decoded = self.profile.meta, self.trace.decode_rows
        rate = meta.emulated_link_bytes_per_s
        link = "" if rate is None else f", link emulated at {rate / 1e6:g} MB/s"
        prompt = int((self.trace.phase == PREFILL).sum())
        return (
            f"{self.trace.meta.model} on {meta.device_name} ({meta.machine}{link}), profiled {meta.date[:10]}; "
            f"{len(self.trace.requests())} requests recorded, {prompt} prompt and {decoded} decoded tokens"
        )


_SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            "mini, 2 CPU cores",
            ASSETS / "dashboard" / "profile-cpu.json",
            ASSETS / "dashboard" / "trace.parquet",
            ASSETS / "dashboard" / "validation-cpu.json",
        ),
        Source("mini, H200", ASSETS / "dashboard" / "profile-h200.json", ASSETS / "dashboard" / "trace.parquet"),
    )
}


def register(source: Source) -> None:
    """Offer `source` first."""
    others = {name: one for name, one in _SOURCES.items() if name != source.name}
    _SOURCES.clear()
    _SOURCES.update({source.name: source, **others})
    load.cache_clear()


def names() -> list[str]:
    """The sources on offer."""
    return list(_SOURCES)


@lru_cache(maxsize=8)
def load(name: str) -> Dataset:
    """The source of that name; UsageError lists the known ones."""
    if name not in _SOURCES:
        raise UsageError(f"source {name!r} is unknown: there are {', '.join(_SOURCES)}")
    return Dataset(_SOURCES[name])


@lru_cache(maxsize=64)
def costs(name: str, machine: Machine) -> CostModel:
    """The cost model of a source on a changed machine."""
    data = load(name)
    return CostModel(on_machine(data.profile, machine), data.shape)


@lru_cache(maxsize=KEPT)
def predict(name: str, machine: Machine, settings: Settings, capacity: tuple[int, ...]) -> SimResult:
    """What the settings would do on the source's last requests, from a cold start.

    Only `static` starts with experts: those that the requests before use most.
    """
    data = load(name)
    warm = data.use_before if settings.eviction == "static" else None
    return simulate(data.trace, costs(name, machine), data.shape, settings, capacity, data.requests, warm=warm)


@lru_cache(maxsize=16)
def timeline(name: str, machine: Machine, settings: Settings, capacity: tuple[int, ...], request: int) -> SimResult:
    """One request with every span of host, device, link and CPU."""
    data = load(name)
    warm = data.use_before if settings.eviction == "static" else None
    return simulate(
        data.trace, costs(name, machine), data.shape, settings, capacity, [request], timeline=True, warm=warm
    )


@lru_cache(maxsize=KEPT)
def floor(name: str, machine: Machine, settings: Settings, slots: int) -> Bounds:
    """What no setting with so many slots, and experts in the format of `settings`, can beat on the same requests."""
    data = load(name)
    requests = load_requests(data.trace, data.shape, None, data.requests)
    return bounds(requests, costs(name, machine).for_settings(settings), slots, data.loads)


def warm(name: str, progress: Callable[[str], None] = lambda what: None) -> None:
    """Load a source and all compiled code, so that the first page is quick."""
    progress("reading profile and recording")
    data = load(name)
    progress("simulating once")
    capacity = (data.shape.experts // 4,) * data.shape.n_moe_layers
    predict(name, Machine(), Settings(), capacity)
    floor(name, Machine(), Settings(), sum(capacity))
    progress("hit rates at every cache size")
    _ = data.curves


def kinds(name: str, chosen: Settings) -> dict[str, Settings]:
    """Kinds of settings to compare over memory: the default, each miss action, and the chosen decisions."""
    threads = costs(name, Machine()).cpu_threads
    found = {"fetch": Settings()}
    if threads:
        found["CPU, background uploads"] = Settings(miss_action="cpu", admission="background", cpu_threads=threads[-1])
        found["split, background uploads"] = Settings(
            miss_action="split", admission="background", cpu_threads=threads[-1]
        )
    free = chosen.changed(slots_per_layer=None, cache_ratio=None)
    return found if free in found.values() else {**found, "these decisions": free}


def pareto(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (memory, time) pairs that no other beats in both, by memory."""
    best: list[tuple[float, float]] = []
    for memory, time in sorted(points):
        if not best or time < best[-1][1]:
            best.append((memory, time))
    return best


def sweep(name: str, machine: Machine, settings: Settings, context: int) -> list[tuple[int, SimResult]]:
    """Device bytes and simulation at about a dozen uniform slot counts, ascending."""
    data = load(name)
    staging, size = staging_slots(settings, data.shape), data.expert_bytes(settings)
    fixed = fixed_bytes(data.shape, data.dtype, context) + settings.headroom_bytes + staging * size
    found = []
    for count in slot_points(data.shape.experts):
        capacity = (count,) * data.shape.n_moe_layers
        found.append((fixed + sum(capacity) * size, predict(name, machine, settings, capacity)))
    return found
