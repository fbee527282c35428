"""Settings worth trying: fixed candidates, presets, one family of options per integer program."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from foreload.budget import predictor_bytes
from foreload.errors import BudgetError, MismatchError, SettingsError
from foreload.formats import FORMATS, block_layout, layer_formats, slot_bytes
from foreload.presets import PRESETS, preset_settings
from foreload.settings import GATE_SIDE, NEXT_STEP, Draft, Settings, check_slots, staging_slots
from foreload.shape import ModelShape
from foreload.simulator.costs import CostModel
from foreload.simulator.result import SimResult
from foreload.simulator.tuner.recorded import Look, looks, usable_draft, widest
from foreload.simulator.tuner.rows import NO_LIMITS, Limits, most_loss_pct
from foreload.traces.schema import Trace

NO_PREFETCH: dict[str, Any] = {
    "predictor": "none",
    "prefetch_depth": 0,
    "prefetch_width": None,
    "prefetch_rolled": False,
    "speculate_layers": (),
    "cpu_read_ahead": False,
}
HALF_LIVES = (16, 64, 256)
"""Of the `aged` eviction order."""
KEPT = ("prefill_chunk_tokens", "headroom_bytes", "expert_format")
"""What a preset takes from the settings to beat."""


@dataclass(frozen=True)
class Change:
    """Settings that change the text and may: layers that execute predictions, a format, or both, at a known loss."""

    predictor: str  # "none" where no layer executes predictions
    layers: tuple[int, ...]
    expert_format: str | tuple[str, ...] | None  # as settings say it
    loss_pct: float  # of perplexity


@dataclass(frozen=True)
class Candidate:
    """One setting with what is predicted for it; several recordings are taken together in `result` and `report`."""

    name: str
    family: str
    settings: Settings
    planned_ns: float | None = None  # the program's estimate per token
    result: SimResult | None = field(default=None, repr=False)  # simulated on the requests that choose
    report: SimResult | None = field(default=None, repr=False)  # simulated on requests that chose nothing
    over_ns: float = 0.0  # of `result`: time per token that the link is busy beyond its budget
    worst_ns: float | None = None  # of `result`: time per token on the slowest recording, if that is what counts
    tpots_ns: tuple[float, ...] = ()  # of `result`: time per token on each recording

    @property
    def tpot_ns(self) -> float:
        """Simulated time per token on the requests that choose; infinite before it was simulated."""
        if self.worst_ns is not None:
            return self.worst_ns
        return self.result.tpot_ns if self.result is not None else float("inf")


def family(settings: Settings) -> str:
    """The kind of plan: miss action, admission beyond demand, prefetch depth, draft, format, cache or none."""
    parts: list[str] = [settings.miss_action]
    if settings.admission != "demand":
        parts.append(settings.admission)
    if settings.pool != "layer":
        parts.append("shared pool")
    if settings.predictor in NEXT_STEP:
        parts.append("next step")
    if settings.prefetch_depth:
        parts.append(f"depth {settings.prefetch_depth}")
    if settings.draft.kind != "none":
        parts.append(f"{settings.draft.kind} draft")
    if settings.speculate_layers:
        parts.append(f"speculated by {settings.predictor}")
    if settings.expert_format is not None:
        parts.append(said_format(settings.expert_format))
    if settings.slots_per_layer is not None and not any(settings.slots_per_layer):
        parts.append("cache off")
    return ", ".join(parts)


def said_format(format: str | tuple[str, ...] | None) -> str:
    """An expert format in words."""
    return "formats by layer" if isinstance(format, tuple) else str(format)


@dataclass(frozen=True)
class Space:
    """What may be varied on this machine, with these recordings, within so much device memory."""

    shape: ModelShape
    base: Settings
    slots: int  # of the base's format, staging included
    threads: tuple[int, ...]
    looks: Mapping[int, tuple[Look, ...]]  # depth -> most recall first
    widths: tuple[int, ...]
    draft: Draft | None = None  # whose windows the recordings hold, if the profile can cost them
    changes: tuple[Change, ...] = ()
    dtype: str = "float32"
    warm: bool = False  # whether there are counts of a recording to start from
    draft_bytes: int = 0  # of a draft model that is not on the device anyway
    expert_bytes: int = 1  # of the base's format
    room_bytes: int = 0  # for slots, persistent and staging
    losses: Mapping[str, float] = field(default_factory=dict)  # of formats that layers may be in, in per cent
    reads_ahead: bool = False  # whether the profile knows CPU workers that read ahead
    smaller: str | None = None  # a format with the base's numbers in fewer bytes that may be used, too
    limits: Limits = NO_LIMITS

    @classmethod
    def of(
        cls,
        traces: Sequence[Trace],
        costs: CostModel,
        base: Settings,
        slots: int,
        allowed: Sequence[Change] = (),
        warm: bool = False,
        draft_bytes: int | None = None,
    ) -> Space:
        """Threads the profile measured; predictors, depths, widths and draft that the traces hold and it can cost.

        Of the changes `allowed`, those that can be simulated. `draft_bytes` of the model that drafted the recordings;
        None: unknown, so such drafts are left out.
        """
        shape, known = costs.shape, looks(traces, costs)
        most = widest(traces, known)
        k = shape.top_k
        widths = {w for w in (max(1, k // 4), max(1, k // 2), k, min(2 * k, most), most) if 0 < w <= most}
        draft, beside = usable_draft(traces, costs), 0
        if draft is not None and draft.model_name not in (None, base.draft.model_name):
            draft, beside = (None, 0) if draft_bytes is None else (draft, draft_bytes)
        dtype, size, every = costs.profile.meta.dtype, costs.expert_bytes, tuple(sorted(widths))
        ready = (
            {name for name, _ in known.get(1, ())} if costs.measured("speculated") and shape.top_k in every else set()
        )
        changes = tuple(change for change in allowed if usable(change, costs, base, ready))
        threads, room, reads = costs.cpu_threads, slots * size, costs.measured("read_ahead")
        return cls(
            shape,
            base,
            slots,
            threads,
            known,
            every,
            draft,
            changes,
            dtype,
            warm,
            beside,
            size,
            room,
            reads_ahead=reads,
        )

    def evictions(self) -> list[dict[str, Any]]:
        """Fields of every eviction order; those that need a recording to start from where there is one."""
        usual = Settings().half_life
        orders = ("lru", "lfu", "lfru", "utility", *(("static",) if self.warm else ()))
        found: list[dict[str, Any]] = [{"eviction": name, "half_life": usual} for name in orders]
        return found + [{"eviction": "aged", "half_life": steps} for steps in HALF_LIVES]

    def budget(self, settings: Settings) -> int:
        """Slots, persistent and staging, beside the calibration and the draft model that `settings` add to the base."""
        more = predictor_bytes(self.shape, self.dtype, settings) - predictor_bytes(self.shape, self.dtype, self.base)
        if settings.expert_format == self.base.expert_format:
            size = self.expert_bytes
        else:
            size = slot_bytes(layer_formats(settings.expert_format, self.shape, self.dtype), self.shape)
        model = self.draft_bytes if settings.draft in self.drafts else 0
        return (self.room_bytes - more - model) // size

    def fits(self, settings: Settings) -> bool:
        """Whether settings that name their slots stay within the memory."""
        return sum(settings.slots_per_layer or ()) + staging_slots(settings, self.shape) <= self.budget(settings)

    def uniform(self, **changes: Any) -> Settings | None:
        """`base` with `changes` and the largest uniform slot count; None if its staging does not fit."""
        return self.filled(self.base.changed(slots_per_layer=None, cache_ratio=None, **changes))

    def filled(self, settings: Settings) -> Settings | None:
        """`settings` with the largest uniform slot count, where they do not say; None if they do not fit."""
        try:
            counts = check_slots(settings, self.shape, self.budget(settings), 1)
        except BudgetError:
            return None
        return settings.changed(slots_per_layer=counts, cache_ratio=None)

    def prefetches(self) -> Iterator[dict[str, Any]]:
        """Prefetch options, off first; then what changes the text."""
        yield NO_PREFETCH
        for depth, (look, *_) in self.looks.items():
            for width in self.widths:
                yield {**looked(look), "prefetch_depth": depth, "prefetch_width": width}
        for change in self.changes:
            fields = {**NO_PREFETCH, "expert_format": change.expert_format}
            if change.layers:
                next_layer = {"prefetch_depth": 1, "prefetch_width": self.shape.top_k}
                fields.update(predictor=change.predictor, **next_layer, speculate_layers=change.layers)
            yield fields

    def loss_pct(self, settings: Settings) -> float | None:
        """What `settings` lose: 0 where they change no number of the base's, None where that is not known."""
        layers, format = settings.speculated(self.shape), settings.expert_format
        wanted = (settings.predictor if layers else "none", layers, format)
        for change in self.changes:
            if (change.predictor, change.layers, change.expert_format) == wanted:
                return change.loss_pct
        if self.adds_up(settings):
            loss = sum(self.losses[name] for name in format or ()) / self.shape.n_moe_layers
            return loss if loss <= most_loss_pct(self.limits, self.shape.n_moe_layers) else None
        return 0.0 if not layers and self.same_numbers(settings) else None

    def same_numbers(self, settings: Settings) -> bool:
        """Whether experts hold the base's numbers."""
        return settings.expert_format in (self.base.expert_format, self.smaller)

    def adds_up(self, settings: Settings) -> bool:
        """Whether the loss of `settings` is assumed: every layer loses its share of what its format loses."""
        format, measured = settings.expert_format, {change.expert_format for change in self.changes}
        mixed = isinstance(format, tuple) and not settings.speculate_layers and format not in measured
        return mixed and set(format or ()) <= self.losses.keys()

    def mixes(self) -> Iterator[tuple[tuple[str, float], ...]]:
        """Formats that layers may be in, with their losses, the largest first: it sets the size of a slot."""
        sizes = {name: block_layout(name, self.shape).bytes for name in FORMATS}
        known = sorted(self.losses.items(), key=lambda item: (-sizes[item[0]], item[0]))  # type: ignore[index]
        seen: set[int] = set()
        for at, (name, _) in enumerate(known[:-1]):
            size = sizes[name]  # type: ignore[index]
            if size not in seen:
                seen.add(size)
                yield tuple(known[at:])

    def misses(self) -> Iterator[dict[str, Any]]:
        """Miss actions with thread count and admission."""
        yield {"miss_action": "fetch", "admission": "demand"}
        for action in ("cpu", "split"):
            for threads in self.threads:
                for admission in ("demand", "background"):
                    yield {"miss_action": action, "cpu_threads": threads, "admission": admission}

    def pooled(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """One pool for all layers, by utility; with CPU threads also absent experts split, and fetched ahead, by it."""
        shared = {"pool": "shared", "eviction": "utility"}
        shared = {**shared, **NO_PREFETCH, "admission": "demand"}
        yield "shared pool, utility", {**shared, "miss_action": "fetch"}
        if self.threads:
            split = {"miss_action": "split", "split_rule": "tau", "cpu_threads": self.threads[-1]}
            yield "shared pool, split by utility", {**shared, **split, "objective": "makespan", "predictor": "utility"}

    def presets(self) -> Iterator[Candidate]:
        """What other systems do, as far as it is allowed here, recorded, costed, and fits."""
        for name, preset in PRESETS.items():
            if preset.warm and not self.warm:
                continue
            settings = self._preset(name)
            if settings is not None and self._recorded(settings):
                yield Candidate(f"preset {name}", family(settings), settings)

    def _preset(self, name: str) -> Settings | None:
        """The preset's settings, for the slots there are beside what it stages."""
        threads = self.threads[-1] if self.threads else 1
        own = {key: getattr(self.base, key) for key in KEPT}
        try:
            settings = preset_settings(name, self.shape, threads, 0).changed(**own)
            if settings.draft.kind != "none" and self.draft is not None:
                settings = settings.changed(draft={**settings.draft.model_dump(), "model": self.draft.model})
            room = self.budget(settings)
            placed = preset_settings(name, self.shape, threads, room).slots_per_layer
            return self.filled(settings.changed(slots_per_layer=placed))
        except SettingsError:
            return None

    def _recorded(self, settings: Settings) -> bool:
        """Whether the recordings hold what `settings` use, the profile can cost it, and its text is allowed."""
        if settings.draft.kind != "none" and settings.draft not in self.drafts:
            return False
        if settings.miss_action != "fetch" and settings.cpu_threads not in self.threads:
            return False
        if settings.predictor in GATE_SIDE:
            look = (settings.predictor, settings.prefetch_rolled)
            if look not in self.looks.get(settings.prefetch_depth, ()):
                return False
            if settings.width(self.shape) > max(self.widths):
                return False
        return self.loss_pct(settings) is not None

    def fixed(self) -> Iterator[Candidate]:
        """Candidates that always compete, the default first."""
        uniform = [("default", self.uniform())]
        off = self.base.changed(slots_per_layer=(0,) * self.shape.n_moe_layers, cache_ratio=None)
        uniform.append(("cache off", off if self.fits(off) else None))
        for prefetch in self.prefetches():
            if prefetch is not NO_PREFETCH:
                uniform.append((_named(prefetch), self.uniform(**prefetch)))
        for miss in self.misses():
            if miss["miss_action"] != "fetch":
                name = f"uniform, {miss['miss_action']} on {miss['cpu_threads']}, {miss['admission']}"
                uniform.append((name, self.uniform(**miss)))
        uniform += [(name, self.uniform(**fields)) for name, fields in self.pooled()]
        if self.draft is not None:
            uniform += [(f"{name}, drafts", self.drafted(settings, self.draft)) for name, settings in uniform]
        for name, settings in uniform:
            if settings is not None:
                yield Candidate(name, family(settings), settings)

    @cached_property
    def drafts(self) -> tuple[Draft, ...]:
        """The recorded draft, and the same with half as many tokens, a quarter, and so on."""
        if self.draft is None:
            return ()
        gammas = [self.draft.gamma >> halved for halved in range(self.draft.gamma.bit_length())]
        return tuple(self.draft.model_copy(update={"gamma": gamma}) for gamma in gammas)

    def drafted(self, settings: Settings | None, draft: Draft) -> Settings | None:
        """`settings` with one of `drafts`, whose staging takes slots; None: no room, or drafted so already."""
        if settings is None or settings.draft == draft:
            return None
        return self.fitted(settings.changed(draft=draft.model_dump()))

    def fitted(self, settings: Settings) -> Settings | None:
        """`settings` that name their slots, made to fill the memory: the largest layers give up what there is no room
        for, the smallest take what is left (none do where nothing is kept). None: no room.
        """
        counts = list(settings.slots_per_layer or ())
        over = sum(counts) + staging_slots(settings, self.shape) - self.budget(settings)
        if over > sum(counts):
            return None
        for _ in range(max(0, over)):
            counts[counts.index(max(counts))] -= 1
        for _ in range(-over if any(counts) else 0):
            if min(counts) == self.shape.experts:
                break
            counts[counts.index(min(counts))] += 1
        return settings.changed(slots_per_layer=tuple(counts))


def looked(look: Look) -> dict[str, Any]:
    """Fields of settings that predict by `look`."""
    return {"predictor": look[0], "prefetch_rolled": look[1], "speculate_layers": ()}


def _named(prefetch: Mapping[str, Any]) -> str:
    parts = ["uniform"]
    if prefetch["prefetch_depth"]:
        parts.append("{predictor}, depth {prefetch_depth}, width {prefetch_width}".format(**prefetch))
    if prefetch["speculate_layers"]:
        parts.append("speculated")
    if prefetch.get("expert_format") is not None:
        parts.append(said_format(prefetch["expert_format"]))
    return ", ".join(parts)


def usable(change: Change, costs: CostModel, base: Settings, ready: Collection[str]) -> bool:
    """Whether the profile holds the format, and the recordings the predictions that would be executed (`ready`)."""
    if change.layers and change.predictor not in ready:
        return False
    try:
        costs.for_settings(base.changed(expert_format=change.expert_format))
    except (MismatchError, SettingsError):
        return False
    return True
