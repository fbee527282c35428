"""`CostModel`: what every block of a step costs on the profiled machine, in integer nanoseconds.

A look-up at a measured point returns it verbatim; between two points it is linear; outside it holds the rate of the
nearest point (bytes and counts) or its slope (context, tokens of a prompt chunk), and says so in `source`. What the
profile cannot say (another thread count, no such probe) is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from foreload.errors import FileError, MismatchError
from foreload.formats import FORMATS, PackedFormat, block_layout, layer_bytes, layer_formats
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.lookup import GRAPH_WINDOW_BLOCKS, SLOPED, WINDOW_BLOCKS, Point, Source, interpolate, points_of
from foreload.simulator.variation import shares
from foreload.simulator.windows import Plane, plane
from foreload.units import us_to_ns

SCALE = 1 << 20
"""Work done per nanosecond by a resource that nothing slows down."""

_SEVERITY: tuple[Source, ...] = ("measured", "interpolated", "extrapolated", "assumed")
_BY_FORMAT = {"experts_gpu": "gpu_format", "experts_cpu": "cpu_format"}
"""Probes of experts in the engine, and what they take alone in each format."""


@dataclass(frozen=True)
class Cost:
    """Time of one block: on the host thread, and how long it keeps an asynchronous GPU busy (0: it does not)."""

    host_ns: int
    gpu_ns: int
    source: Source

    @property
    def busy_ns(self) -> int:
        """The longer of both."""
        return max(self.host_ns, self.gpu_ns)


def predict_probe(predictor: str) -> str:
    """The probe that measured predictions of `predictor`, rolled forms included."""
    return "predict" if predictor == "gate" else f"predict_{predictor}"


def worst(*sources: Source) -> Source:
    """The least trustworthy of `sources`."""
    return _SEVERITY[max(map(_SEVERITY.index, sources))]


class CostModel:
    """Look-ups over one profile for one model shape. Raises MismatchError if the profile is of another shape."""

    def __init__(
        self,
        profile: HardwareProfile,
        shape: ModelShape,
        dtype: str | None = None,
        format: PackedFormat | None = None,
        replayed: bool = False,
    ) -> None:
        """`format` of the experts: default, and measured best, is the one the profile's engine ran in.

        `replayed`: of an engine whose routing comes from a recording, which takes graphs some time.
        """
        profile.check_model(shape, dtype or profile.meta.dtype)
        self.own_format = profile.meta.expert_format or layer_formats(None, shape, profile.meta.dtype)[0]
        expected = block_layout(self.own_format, shape).bytes
        if profile.meta.expert_bytes != expected:
            raise FileError(f"profile: meta.expert_bytes is {profile.meta.expert_bytes}: the shape says {expected}")
        self.profile = profile
        self.shape = shape
        self.format = format or self.own_format
        self.expert_bytes = block_layout(self.format, shape).bytes
        self.asynchronous = profile.meta.device == "cuda"
        self.graphs = profile.meta.path == "graphs"
        self.replayed = replayed
        self._slab_bytes = self.expert_bytes * shape.all_experts  # of all experts, which are pinned together or not
        self._by_layer: tuple[CostModel, ...] = ()  # where layers are in different formats
        self.used: dict[str, Source] = {}
        self._tables: dict[tuple[str, tuple[tuple[str, int], ...]], list[Point]] = {}
        self._known: dict[tuple[object, ...], Cost] = {}
        self._rates: dict[tuple[str, int, int, int], int] = {}
        self._planes: dict[tuple[str, int], Plane] = {}
        self._varied: dict[tuple[str, int], tuple[int, ...]] = {}

    def fresh(self) -> CostModel:
        """The same model with nothing looked up yet, so that `used` tells what one simulation relied on."""
        return self._in(self.formats, self.replayed)

    def replaying(self) -> CostModel:
        """The model of an engine that replays a recording's routing (`Engine.replay`)."""
        return self._in(self.formats, True)

    def _in(self, formats: Sequence[PackedFormat], replayed: bool) -> CostModel:
        """Of layers in `formats`: the model of the largest, which knows those of the others (`at`)."""
        shape = self.shape
        distinct = sorted(set(formats), key=lambda name: (-block_layout(name, shape).bytes, name))
        made = {name: CostModel(self.profile, shape, format=name, replayed=replayed) for name in distinct}
        whole = made[distinct[0]]
        for model in made.values():
            model._tables, model._planes, model._varied = self._tables, self._planes, self._varied
            model.used = whole.used
            model._slab_bytes = shape.experts * sum(layer_bytes(tuple(formats), shape))
        if len(distinct) > 1:
            whole._by_layer = tuple(made[name] for name in formats)
        return whole

    def at(self, layer: int) -> CostModel:
        """The model for the format of a MoE layer; this one where all have the same."""
        return self._by_layer[layer] if self._by_layer else self

    @property
    def formats(self) -> tuple[PackedFormat, ...]:
        """Of each MoE layer."""
        return tuple(model.format for model in self._by_layer) or (self.format,) * self.shape.n_moe_layers

    @property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert of each MoE layer."""
        return tuple(self.at(layer).expert_bytes for layer in range(self.shape.n_moe_layers))

    @property
    def copies_ns(self) -> tuple[int, ...]:
        """`copy_ns` of each MoE layer."""
        return tuple(self.at(layer).copy_ns for layer in range(self.shape.n_moe_layers))

    def kinds(self) -> tuple[list[CostModel], NDArray[np.int64]]:
        """The models of the distinct formats, and which of them each MoE layer's is, [L]."""
        models = list(dict.fromkeys(self._by_layer or (self,)))
        of_layer = [models.index(self.at(layer)) for layer in range(self.shape.n_moe_layers)]
        return models, np.array(of_layer, np.int64)

    def for_settings(self, settings: Settings) -> CostModel:
        """The model for the `expert_format` of `settings`, this one if it is that already.

        Raises MismatchError if the profile lacks a format.
        """
        formats = layer_formats(settings.expert_format, self.shape, self.profile.meta.dtype)
        if formats == self.formats:
            return self
        known = {self.own_format, *(FORMATS[m.at["format"]] for m in self.profile.measurements if "format" in m.at)}
        unknown = sorted(set(formats) - known)
        if unknown:
            raise MismatchError(
                f"profile: expert_format {unknown[0]} was not measured: it was {', '.join(sorted(known))}"
            )
        return self._in(formats, self.replayed)

    @cached_property
    def _own(self) -> CostModel:
        """The model in the format that contention was measured in."""
        if self.format == self.own_format:
            return self
        own = CostModel(self.profile, self.shape)
        own._tables, own._planes, own.used = self._tables, self._planes, self.used
        return own

    def _table(self, probe: str, fixed: Mapping[str, int]) -> list[Point]:
        key = (probe, tuple(sorted(fixed.items())))
        if key not in self._tables:
            self._tables[key] = points_of(probe, self.profile.points(probe, **fixed))
        return self._tables[key]

    def cost(self, probe: str, at: int = 0, threads: int = 0, **fixed: int) -> Cost:
        """`probe` at coordinate `at`; `threads` and `fixed` must match a measured point.

        Raises FileError if the profile lacks the probe, MismatchError if it lacks the thread count.
        """
        key = (probe, at, threads, *fixed.items())
        found = self._known.get(key)
        if found is None:
            if threads:
                self._check_threads(probe, threads)
                fixed = {**fixed, "threads": threads}
            host, gpu, source = interpolate(self._table(probe, fixed), at, probe in SLOPED)
            if probe in _BY_FORMAT and self.format != self.own_format:
                (host, gpu), other = self._shifted(probe, at, (host, gpu), fixed)
                source = worst(source, other)
            found = self._known[key] = Cost(host, gpu, source)
            self.used[probe] = worst(source, self.used.get(probe, "measured"))
        return found

    def _shifted(
        self, probe: str, at: int, found: tuple[int, int], fixed: Mapping[str, int]
    ) -> tuple[tuple[int, int], Source]:
        """Host and GPU time in this format: what was found, and what the formats measured alone differ by. On the CPU
        their ratio: what slows the reading of memory in a step does so byte by byte.
        """
        formats = (self.own_format, self.format)
        tables = [self._table(_BY_FORMAT[probe], {**fixed, "format": FORMATS.index(format)}) for format in formats]
        own, this = (interpolate(table, at, False) for table in tables)
        if probe == "experts_cpu":
            return (max(1, found[0] * this[0] // max(1, own[0])), found[1]), worst(own[2], this[2])
        host = max(1, found[0] + this[0] - own[0])
        gpu = max(1, found[1] + this[1] - own[1]) if found[1] else 0
        return (host, gpu), worst(own[2], this[2])

    def _check_threads(self, probe: str, threads: int) -> None:
        known = sorted({m.at["threads"] for m in self.profile.points(probe) if "threads" in m.at})
        if threads not in known:
            shown = ", ".join(map(str, known)) or "none"
            raise MismatchError(f"profile: {probe} was not measured at cpu_threads {threads}: it was at {shown}")

    def block(self, probe: str, at: int = 0, tokens: int = 1) -> Cost:
        """`probe` at `at` over `tokens` tokens in one step; FileError if the profile has no window to say so."""
        one = self.cost(probe, at) if probe != "plan" else self.plan
        return self.beyond(one, probe, tokens)

    def beyond(self, one: Cost, block: str, tokens: int) -> Cost:
        """`one`, the cost over a single token, with what `block` takes longer over `tokens`."""
        if tokens == 1:
            return one
        base, found = (self.cost(f"window_{block}", n) for n in (1, tokens))
        more, busier = max(0, found.host_ns - base.host_ns), max(0, found.gpu_ns - base.gpu_ns)
        return Cost(one.host_ns + more, one.gpu_ns + busier, worst(one.source, found.source))

    def draft(self, settings: Settings, tokens: int) -> Cost:
        """Proposing `tokens` tokens; MismatchError if another draft model was measured than the settings name."""
        if settings.draft.kind == "model" and self.profile.meta.draft_model != settings.draft.model_name:
            measured = self.profile.meta.draft_model or "none"
            raise MismatchError(
                f"profile: measured with draft model {measured!r}, the settings draft with "
                f"{settings.draft.model_name!r}: foreload profile --draft-model"
            )
        return self.cost(f"draft_{settings.draft.kind}", max(1, tokens))

    def has_windows(self, draft: str) -> bool:
        """Whether the profile can say what windows of this kind of draft cost."""
        blocks = GRAPH_WINDOW_BLOCKS if self.graphs else WINDOW_BLOCKS
        return self._probes >= {*blocks, "window_experts_gpu", f"draft_{draft}"}

    def _plane(self, probe: str, threads: int = 0) -> Plane:
        key = (probe, threads)
        if key not in self._planes:
            if threads:
                self._check_threads(probe, threads)
            fixed = {"threads": threads} if threads else {}
            self._planes[key] = plane(self.profile, probe, with_base=threads > 0, **fixed)
        self.used[probe] = worst("interpolated", self.used.get(probe, "measured"))
        return self._planes[key]

    @cached_property
    def repacked_ns(self) -> int:
        """What the resident experts of a token take the GPU longer in a layer than in the profiled engine's format."""
        return self._window_shift("experts_gpu", self.shape.top_k)[1]

    def experts_gpu(self, experts: int, tokens: int = 0) -> Cost:
        """`experts` resident experts: of a single token's step, or (`tokens` above 0) of a window's, with so many."""
        if tokens == 0 or experts == 0:
            return self.cost("experts_gpu", experts) if experts else Cost(0, 0, "measured")
        fitted = self._plane("window_experts_gpu")
        host, gpu = self._window_shift("experts_gpu", experts)
        in_format = max(1, fitted.host_ns(experts, tokens) + host), max(0, fitted.gpu_ns(experts, tokens) + gpu)
        return Cost(*in_format, "interpolated")

    def _window_shift(self, probe: str, experts: int, threads: int = 0) -> tuple[int, int]:
        """What the format changes for a window's distinct experts: as for as many with one token each."""
        if self._own is self:
            return 0, 0
        this, own = (model.cost(probe, experts, threads) for model in (self, self._own))
        return this.host_ns - own.host_ns, this.gpu_ns - own.gpu_ns

    @cached_property
    def copy_ns(self) -> int:
        """One expert copy on an otherwise idle machine, issue to arrival.

        Of pinned memory if that was measured, unless all experts together are more than may be pinned: the engine
        registers their memory whole, or not at all.
        """
        most = self.profile.meta.pinned_bytes
        return self._copy_ns(most is None or self._slab_bytes <= most)

    def _copy_ns(self, pinned: bool) -> int:
        """In another format that of the profiled engine, and what copies of both sizes, one at a time, differ by."""
        own_bytes, this_bytes = self.profile.meta.expert_bytes, self.expert_bytes
        fixed = {"pinned": max(m.at.get("pinned", 0) for m in self.profile.points("copy")) if pinned else 0}
        table = self._table("copy", fixed)
        alone = [point for point in table if point.at != own_bytes]
        if this_bytes == own_bytes or len(alone) == len(table) or len(alone) < 2:
            return self.cost("copy", this_bytes, **fixed).host_ns
        own = self.cost("copy", own_bytes, **fixed).host_ns
        (this_ns, _, found), (own_ns, _, of_own) = (interpolate(alone, size, True) for size in (this_bytes, own_bytes))
        self.used["copy"] = worst(worst(found, of_own), self.used["copy"])
        return max(1, own + this_ns - own_ns)

    def all_pinned(self) -> CostModel:
        """The model as if all experts could be pinned."""
        found = self._in(self.formats, self.replayed)
        for model in found.kinds()[0]:
            model._slab_bytes = 0
        return found

    def dense_ns(self, context: int, tokens: int = 1) -> int:
        """Blocks of one layer-step over `tokens` tokens, without experts and predictions, on whichever is slower.

        Of graphs what the device takes: a step of one launch has no more.
        """
        if self.graphs:
            return self.block("attention", context, tokens).gpu_ns
        found = [self.block(probe, at, tokens) for probe, at in (("plan", 0), ("attention", context))]
        found += [self.block("route", tokens=tokens), self.block("finish", tokens=tokens)]
        return sum(cost.busy_ns for cost in found)

    def between_ns(self, context: int, tokens: int = 1) -> int:
        """The same where the host decides in every layer: what lies between the experts of two layers."""
        if not self.graphs:
            return self.dense_ns(context, tokens)
        return self.dense_ns(context, tokens) + self.block("plan", tokens=tokens).host_ns + self.cost("launch").host_ns

    @cached_property
    def speculating_ns(self) -> int:
        """What a layer that executes predictions takes longer than one that routes and predicts; below 0: less."""
        found = self.cost("speculated")
        if not self.graphs:
            return found.busy_ns - self.cost("route").busy_ns
        at = self.profile.points("speculated")[0].at.get("context", 0)
        return found.gpu_ns - self.cost("attention", at).gpu_ns - self.cost("predict", 1).gpu_ns

    @cached_property
    def middle_context(self) -> int:
        """The middle one of the contexts at which attention was measured."""
        contexts = sorted(m.at["context"] for m in self.profile.points("attention") if "context" in m.at)
        return contexts[len(contexts) // 2]

    @cached_property
    def plan(self) -> Cost:
        """Planning a layer-step that queues no copy."""
        return self.cost("plan", copies=0)

    @cached_property
    def queueing_ns(self) -> int:
        """What planning takes longer when it wakes the copy thread."""
        return max(0, self.cost("plan", copies=1).host_ns - self.plan.host_ns)

    def predict(self, settings: Settings, depth: int) -> Cost:
        """Predictions for `depth` later layers by the predictor of `settings`."""
        return self.cost(predict_probe(settings.prediction(depth)), depth)

    def measured(self, probe: str) -> bool:
        """Whether the profile holds any measurement of `probe`."""
        return probe in self._probes

    @cached_property
    def _probes(self) -> frozenset[str]:
        return frozenset(m.probe for m in self.profile.measurements)

    @cached_property
    def interrupt_ns(self) -> int:
        """What the decoding thread loses when a copy lands while it works; with graphs, where it issues the next."""
        return self.cost("issue" if self.graphs else "interrupt").host_ns

    @cached_property
    def _longest_wait_us(self) -> int:
        return max(m.at.get("wait_us", 0) for m in self.profile.points("after_wait"))

    def cold_ns(self, waited_ns: int, cpu_threads: int = 0) -> int:
        """How much longer a layer-step's host blocks take after the host has waited `waited_ns` for copies.

        `cpu_threads` above 0: and for that many threads of CPU experts, too.
        """
        longest = min(self._longest_wait_us, waited_ns // 1000)
        warm, cold = (self.cost("after_wait", at).host_ns for at in (0, longest))
        after_cpu = self.cost("after_cpu", 0, cpu_threads).host_ns if cpu_threads else 0
        return max(0, cold - warm, after_cpu - warm)

    @cached_property
    def cpu_threads(self) -> tuple[int, ...]:
        """Thread counts at which every CPU probe was measured, ascending; empty without any."""
        needed = ("experts_cpu", "copy_beside_cpu", "experts_cpu_beside_copy") + (() if self.graphs else ("both",))
        counts = [
            {m.at["threads"] for m in self.profile.measurements if m.probe == probe and "threads" in m.at}
            for probe in needed
        ]
        return tuple(sorted(set.intersection(*counts)))

    def experts_gpu_ns(self, experts: int, tokens: int = 0) -> int:
        """Resident experts until they are done; arguments as for `experts_gpu`."""
        return self.experts_gpu(experts, tokens).busy_ns

    def experts_cpu_ns(self, experts: int, threads: int, tokens: int = 0) -> int:
        """Experts on an otherwise idle CPU, hand-off and result included; `tokens` as for `experts_gpu`."""
        if tokens == 0 or experts == 0:
            return self.cost("experts_cpu", experts, threads).host_ns if experts else 0
        found = self._plane("window_experts_cpu", threads).host_ns(experts, tokens)
        return max(1, found + self._window_shift("experts_cpu", experts, threads)[0])

    def read_ahead(self, settings: Settings) -> tuple[tuple[int, int], ...]:
        """(idle, less): nanoseconds that workers of the CPU were idle, and what experts take less if one of them was
        read meanwhile; ascending, more idling than the last brings no more. Empty where nothing is read.
        """
        if not settings.cpu_read_ahead:
            return ()
        self._check_threads("read_ahead", settings.cpu_threads)
        found, less = [(0, 0)], 0
        for point in self._table("read_ahead", {"threads": settings.cpu_threads}):
            less = max(less, point.host_ns)  # longer rests bring no less
            found.append((1000 * point.at, less))
            self.used["read_ahead"] = worst("assumed" if point.assumed else "interpolated")
        return tuple(found)

    def varies(self, probe: str, threads: int) -> tuple[int, ...]:
        """Equally likely factors of what `probe` took on or beside so many threads, of SCALE and so in the mean, as the
        profile had them; ascending. One alone if it does not say.
        """
        key = (probe, threads)
        if key not in self._varied:
            self._varied[key] = tuple(int(share) for share in np.rint(SCALE * shares(self.profile, probe, threads)))
        return self._varied[key]

    # Contention: work per nanosecond beside another resource, of SCALE. Nothing is faster in company.

    def copy_rate(self, threads: int) -> int:
        """Rate of a copy while CPU experts run."""
        if self._own is not self:
            return self._own.copy_rate(threads)
        key = ("copy", 0, 0, threads)
        if key not in self._rates:
            beside = self.cost("copy_beside_cpu", 0, threads).host_ns
            self._rates[key] = _rate(self._copy_ns(True), beside)  # both as the profiled engine had them
        return self._rates[key]

    def cpu_rate(self, experts: int, threads: int) -> int:
        """Rate of `experts` CPU experts while a copy runs."""
        if self._own is not self:
            return self._own.cpu_rate(experts, threads)
        key = ("cpu", 0, experts, threads)
        if key not in self._rates:
            beside = self.cost("experts_cpu_beside_copy", experts, threads).host_ns
            self._rates[key] = _rate(self.experts_cpu_ns(experts, threads), beside)
        return self._rates[key]

    def both_rate(self, gpu: int, cpu: int, threads: int) -> int:
        """Rate of `gpu` resident and `cpu` CPU experts beside each other; a GPU's kernels do not notice.

        Both are slowed by one factor s while both run, so that T(both) = s min + (max - min) of the isolated times.
        """
        if self._own is not self:
            return self._own.both_rate(gpu, cpu, threads)
        if self.graphs:
            return SCALE
        key = ("both", gpu, cpu, threads)
        if key not in self._rates:
            at_gpu, at_cpu, both_ns = self._nearest_both(gpu, cpu, threads)
            short, long = sorted((self.experts_gpu_ns(at_gpu), self.experts_cpu_ns(at_cpu, threads)))
            self._rates[key] = _rate(short, both_ns - long + short)
        return self._rates[key]

    def _nearest_both(self, gpu: int, cpu: int, threads: int) -> tuple[int, int, int]:
        """The measured (gpu, cpu, total ns) whose counts are nearest."""
        self._check_threads("both", threads)
        found = [m for m in self.profile.points("both", threads=threads) if {"gpu", "cpu"} <= m.at.keys()]
        if not found:
            raise FileError("profile: measurements of 'both' lack the coordinates 'gpu' and 'cpu'")
        near = min(found, key=lambda m: (abs(m.at["gpu"] - gpu) + abs(m.at["cpu"] - cpu), m.at["gpu"], m.at["cpu"]))
        exact = (near.at["gpu"], near.at["cpu"]) == (gpu, cpu)
        source: Source = "assumed" if near.source == "assumed" else ("measured" if exact else "interpolated")
        self.used["both"] = worst(source, self.used.get("both", "measured"))
        return near.at["gpu"], near.at["cpu"], us_to_ns(near.cost_us[0])


def _rate(alone_ns: int, beside_ns: int) -> int:
    return SCALE if beside_ns <= alone_ns else max(1, SCALE * alone_ns // beside_ns)


def as_costs(profile: HardwareProfile | CostModel, shape: ModelShape) -> CostModel:
    """`profile` as a CostModel for `shape`; MismatchError if it is of another shape."""
    if not isinstance(profile, CostModel):
        return CostModel(profile, shape)
    if profile.shape != shape:
        raise MismatchError(f"profile: measured for model shape {profile.shape.hash}, this model is {shape.hash}")
    return profile
