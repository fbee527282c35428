"""What lies around an answer: what each setting is worth, more or less memory, and another machine. All simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foreload.settings import Settings, staging_slots
from foreload.simulator.candidates import Space
from foreload.simulator.tuner.jobs import PROFILED, PlanJob, SimJob, sharing
from foreload.simulator.tuner.moves import neighbours
from foreload.simulator.tuner.search import Found, Search
from foreload.simulator.whatif import Machine

GIB = 1 << 30
RATIOS = (0.0, 0.03, 0.06, 0.12, 0.17, 0.25, 0.37, 0.5, 0.75, 1.0)
"""Shares of all experts that the front looks at."""
KINDS = 3
"""Kinds of settings that are planned anew for other memory or another machine: the best of as many families."""
MACHINES = {"a link twice as fast": Machine(link=2.0), "CPU experts twice as fast": Machine(cpu=2.0)}


@dataclass(frozen=True)
class Single:
    """One change of the best settings; `loss` is a share of their time, negative where another is faster."""

    change: str
    settings: Settings
    loss: float
    whole: bool  # on all requests that choose; else on a part of them


@dataclass(frozen=True)
class Point:
    """The best that was found for an amount of memory or a machine; nanoseconds per token on the same part."""

    name: str
    slots: int  # staging included
    slot_bytes: int
    settings: Settings
    tpot_ns: float
    same_ns: float | None  # the best settings of the tune, as they are; None where they do not fit
    default_ns: float | None  # the default's decisions; None where their staging does not fit


@dataclass(frozen=True)
class Study:
    """See the parts."""

    singles: tuple[Single, ...]  # the dearest first
    front: tuple[Point, ...]  # by memory; only where more memory is faster
    what_if: tuple[Point, ...]  # as things are, then with more memory or another machine

    def as_dict(self) -> dict[str, Any]:
        """JSON values, times in milliseconds."""
        return {
            "single_changes": [
                {"change": s.change, "loss_pct": 100 * s.loss, "simulated_on": "all" if s.whole else "a part"}
                for s in self.singles
            ],
            "memory_front": [_values(point) for point in self.front],
            "what_if": [_values(point) for point in self.what_if],
        }


def _values(point: Point) -> dict[str, Any]:
    def ms(ns: float | None) -> float | None:
        return None if ns is None else ns / 1e6

    return {
        "name": point.name,
        "slots": point.slots,
        "slot_bytes": point.slot_bytes,
        "tpot_ms": ms(point.tpot_ns),
        "same_settings_ms": ms(point.same_ns),
        "default_ms": ms(point.default_ns),
        "settings": point.settings.model_dump(mode="json", exclude_defaults=True),
    }


@dataclass(frozen=True)
class _Ask:
    """An amount of memory on a machine."""

    name: str
    space: Space
    machine: Machine = PROFILED


def study(search: Search, space: Space, found: Found, best: Settings) -> Study:
    """Of a finished search with the answer `best`."""
    kinds = _kinds(found, best)
    more = GIB if space.expert_bytes * space.shape.all_experts // 4 >= GIB else max(1, space.room_bytes // 10)
    said = "1 GiB more memory" if more == GIB else "10 % more memory for slots"
    asks = [_Ask("as it is", space), _Ask(said, _with_room(space, space.room_bytes + more))]
    asks += [_Ask(name, space, machine) for name, machine in MACHINES.items() if machine.cpu == 1 or space.threads]
    staging = space.expert_bytes * staging_slots(space.base, space.shape)
    every = space.expert_bytes * space.shape.all_experts
    rooms = [_Ask(f"{ratio:.0%} of the experts", _with_room(space, int(ratio * every) + staging)) for ratio in RATIOS]
    points = _points(search, [*asks, *rooms], kinds, best)
    front: list[Point] = []
    for point in points[len(asks) :]:
        if point is not None and (not front or point.tpot_ns < front[-1].tpot_ns):
            front.append(point)
    return Study(_singles(space, found, best), tuple(front), tuple(p for p in points[: len(asks)] if p is not None))


def _with_room(space: Space, room_bytes: int) -> Space:
    return replace(space, room_bytes=room_bytes, slots=room_bytes // space.expert_bytes)


def _kinds(found: Found, best: Settings) -> list[Settings]:
    """The answer, and the best of other families, without their slots."""
    kinds = {best.changed(slots_per_layer=None): None}
    seen: set[str] = set()
    for candidate in found.ranked():
        if candidate.family not in seen and candidate.settings.pool == "layer":
            seen.add(candidate.family)
            kinds.setdefault(candidate.settings.changed(slots_per_layer=None))
    return list(kinds)[:KINDS]


def _singles(space: Space, found: Found, best: Settings) -> tuple[Single, ...]:
    singles = []
    for what, settings in neighbours(space, best):
        candidate = found.whole.get(settings)
        if candidate is not None and not candidate.over_ns:
            singles.append(Single(what, settings, candidate.tpot_ns / found.whole[best].tpot_ns - 1, True))
        elif candidate is None and found.part.get(settings, math.inf) < math.inf:
            singles.append(Single(what, settings, found.part[settings] / found.part[best] - 1, False))
    return tuple(sorted(singles, key=lambda single: -single.loss))


def _points(search: Search, asks: Sequence[_Ask], kinds: Sequence[Settings], best: Settings) -> list[Point | None]:
    """Per ask the best of: plans of every kind, every kind with uniform slots, the default."""
    planned = _planned(search, asks, kinds)
    jobs: list[SimJob] = []
    groups: list[tuple[_Ask, list[Settings], Settings | None]] = []
    for ask, plans in zip(asks, planned, strict=True):
        default = ask.space.uniform()
        uniform = [ask.space.filled(kind) for kind in kinds]
        tried = [s for s in (*plans, *uniform, default, best) if s is not None and ask.space.fits(s)]
        tried = list(dict.fromkeys(tried))
        groups.append((ask, tried, default))
        jobs += [search.part_job(settings, ask.machine) for settings in tried]
    times = iter(search.times(jobs, "simulate other memory and machines"))
    return [_point(ask, {settings: next(times) for settings in tried}, default, best) for ask, tried, default in groups]


def _planned(search: Search, asks: Sequence[_Ask], kinds: Sequence[Settings]) -> list[list[Settings]]:
    """Plans of every kind for every ask; those of one machine share their replays."""
    found: list[list[Settings]] = [[] for _ in asks]
    for machine in dict.fromkeys(ask.machine for ask in asks):
        mine = [at for at, ask in enumerate(asks) if ask.machine == machine]
        wanted = [(kind, asks[at].space.budget(kind)) for kind in kinds for at in mine]
        owners = [at for _ in kinds for at in mine]
        like = search.rough_plan(machine)
        known = dict(_answers(search, sharing(wanted, search.space.shape, like)))
        for at, ask in zip(owners, wanted, strict=True):
            if ask in known:
                found[at].append(known[ask])
    return found


def _answers(search: Search, jobs: Sequence[PlanJob]) -> list[tuple[tuple[Settings, int], Settings]]:
    return [
        ((plan.settings.changed(slots_per_layer=None), plan.slots), plan.settings)
        for plan in search.plans(jobs, "plan other memory and machines")
    ]


def _point(ask: _Ask, times: dict[Settings, float], default: Settings | None, best: Settings) -> Point | None:
    times = {settings: ns for settings, ns in times.items() if ns < math.inf}  # others keep the link too busy
    if not times:
        return None
    winner = min(times, key=lambda settings: times[settings])
    space = ask.space
    default_ns = None if default is None else times.get(default)
    return Point(ask.name, space.slots, space.room_bytes, winner, times[winner], times.get(best), default_ns)
