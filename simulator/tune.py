"""`tune`: integer programs propose, the simulator decides, the default stays unless something clearly beats it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from foreload.budget import fixed_bytes, predictor_bytes, slot_budget
from foreload.errors import BudgetError, MismatchError, UsageError
from foreload.formats import SMALLER, ExpertFormat, block_layout, layer_bytes, layer_formats
from foreload.profiler.schema import HardwareProfile
from foreload.quality import QualityReport
from foreload.settings import Settings, check_slots
from foreload.shape import ModelShape
from foreload.simulator.bounds import Bounds, bounds
from foreload.simulator.candidates import Candidate, Change, Space, usable
from foreload.simulator.costs import CostModel
from foreload.simulator.result import SimResult, joined
from foreload.simulator.tuner.jobs import Chosen, Context, Plan, PlanJob, Robust, SimJob
from foreload.simulator.tuner.journal import Journal
from foreload.simulator.tuner.pool import Backend, Pool, Progress
from foreload.simulator.tuner.result import PRESET, TuneResult
from foreload.simulator.tuner.rows import Limits
from foreload.simulator.tuner.search import Found, Search
from foreload.simulator.tuner.study import study
from foreload.simulator.workload import load_requests, request_numbers
from foreload.traces.schema import PREFILL, Trace
from foreload.units import format_bytes

__all__ = ["TuneOptions", "TuneResult", "Tuning", "prepare", "split_requests", "tune"]

KEEP_BELOW = 0.01
"""A gain of at most this share is no reason to leave the default."""
PRESETS_WITHIN = 1.02
"""On the requests that choose, the answer is never further behind the best preset."""


class TuneOptions(TypedDict, total=False):
    """What may be asked of a tune; one of `vram_bytes` and `slots` is needed."""

    vram_bytes: int | None  # device memory there is
    context_tokens: int | None  # of keys and values beside the slots; default: the longest recorded
    slots: int | None  # instead: expert slots of the base's format, persistent and staging
    ram_bytes: int | None  # host memory for all experts: formats that need more do not compete
    base: Settings | None  # the default to beat; what is not tuned is taken from it
    link_ns: int | None  # time per token that copies may keep the link busy
    quality: QualityReport | None  # measured losses of settings that change the text
    format_loss_pct: Mapping[str, float] | None  # losses of expert formats, as given
    repack: bool  # whether experts may be held in fewer bytes that lose nothing: a running engine must load them anew
    max_quality_loss_pct: float | None  # what may be lost; without it nothing that changes the text competes
    warm: NDArray[np.int64] | None  # [MoE layers, experts] uses in a recording that every run starts from
    replayed: bool  # whether the engine will replay recorded routing, as benchmarks do, which takes graphs some time
    draft_bytes: int | None  # of the model that drafted the recordings: lets its windows compete
    robust: Robust  # several recordings: the mean over their tokens, or the slowest one
    seed: int | None  # draws which requests fit, select and are held out; default: in their order
    jobs: int  # processes
    backend: Backend
    address: str | None  # of a Dask scheduler
    resume: Path | None  # file that keeps what is finished
    progress: Progress | None


def split_requests(
    numbers: Sequence[int], seed: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Requests to fit on, to select by and to report on: halves and quarters; none is held out of fewer than three.

    In the order they were recorded or, with a seed, in one drawn by it.
    """
    chosen = tuple(numbers) if seed is None else tuple(random.Random(seed).sample(list(numbers), len(numbers)))
    if len(chosen) < 2:
        return chosen, chosen, ()
    fit = len(chosen) // 2
    select = fit + (len(chosen) - fit + 1) // 2
    return chosen[:fit], chosen[fit:select], chosen[select:]


def tune(
    traces: Trace | Sequence[Trace],
    profile: HardwareProfile,
    shape: ModelShape,
    dtype: str,
    **asked: Unpack[TuneOptions],
) -> TuneResult:
    """The best settings for a memory budget (`TuneOptions`).

    Deterministic, whoever does the work. Raises BudgetError if the budget cannot hold staging, MismatchError if traces,
    profile and shape do not belong together or a trace has no decode steps.
    """
    with prepare(traces, profile, shape, dtype, **asked) as tuning:
        return tuning.run()


@contextmanager
def prepare(
    traces: Trace | Sequence[Trace],
    profile: HardwareProfile,
    shape: ModelShape,
    dtype: str,
    **asked: Unpack[TuneOptions],
) -> Iterator[Tuning]:
    """A tune that is set up and checked, to run or to look at; arguments and errors as for `tune`."""
    recorded = [traces] if isinstance(traces, Trace) else list(traces)
    base, warm = asked.get("base") or Settings(), asked.get("warm")
    for trace in recorded:
        if not (trace.phase != PREFILL).any():
            raise MismatchError("trace: holds no decode steps to tune on")
    replayed = asked.get("replayed", False)
    costs = CostModel(profile, shape, dtype, replayed=replayed).for_settings(base)
    slots, room_bytes = _budget(recorded, costs, base, asked)
    ram = asked.get("ram_bytes")
    _check_ram(costs, ram)
    start = base.changed(slots_per_layer=None, cache_ratio=None)
    check_slots(start, shape, slots, costs.expert_bytes)
    lossy = _lossy(recorded, start, asked)
    limits = Limits(ram, profile.meta.pinned_bytes, asked.get("link_ns"), asked.get("max_quality_loss_pct"))
    allowed = [c for c in lossy if c.loss_pct <= (limits.loss_pct or 0) and _held(c.expert_format, costs, ram)]
    known = {(change.predictor, change.layers) for change in allowed}
    if start.speculate_layers and (start.predictor, start.speculated(shape)) not in known:
        raise UsageError(
            "the settings to beat speculate, which changes the text: give their measured loss (foreload quality) and "
            "a budget for it that holds them"
        )
    space = Space.of(recorded, costs, start, slots, allowed, warm is not None, asked.get("draft_bytes"))
    splits = [split_requests(request_numbers(trace), asked.get("seed")) for trace in recorded]
    fit, select, held = (tuple(split[part] for split in splits) for part in range(3))
    with ExitStack() as stack:
        resume = asked.get("resume")
        journal = None if resume is None else stack.enter_context(Journal(resume))
        workers = (asked.get("jobs", 1), asked.get("backend", "local"), asked.get("address"))
        context = Context.of(recorded, profile, shape, dtype, warm, replayed)
        pool = stack.enter_context(Pool(context, *workers, journal, asked.get("progress")))
        parts = (fit, select, held)
        smaller = _smaller(costs, start) if asked.get("repack") else None
        losses = _by_layer(lossy, costs, start)
        space = replace(space, room_bytes=room_bytes, limits=limits, losses=losses, smaller=smaller)
        yield Tuning(pool, space, costs, parts, asked.get("robust", "mean"))


def _budget(traces: Sequence[Trace], costs: CostModel, base: Settings, asked: TuneOptions) -> tuple[int, int]:
    """Slots, persistent and staging, and the bytes for them."""
    vram, slots = asked.get("vram_bytes"), asked.get("slots")
    if (vram is None) == (slots is None):
        raise UsageError("tune needs one of vram_bytes and slots")
    if slots is not None:
        return slots, slots * costs.expert_bytes
    assert vram is not None
    shape, dtype = costs.shape, costs.profile.meta.dtype
    context = asked.get("context_tokens") or max(int(trace.position.max()) for trace in traces) + 1
    beside = (asked.get("draft_bytes") or 0) if base.draft.model_name is not None else 0
    found = slot_budget(shape, dtype, vram, context, base, beside)
    fixed = fixed_bytes(shape, dtype, context) + base.headroom_bytes + predictor_bytes(shape, dtype, base) + beside
    return found, vram - fixed


def _check_ram(costs: CostModel, ram_bytes: int | None) -> None:
    """BudgetError if host memory cannot hold the experts of the settings to beat."""
    needed = costs.shape.experts * sum(costs.layer_bytes)
    if ram_bytes is not None and needed > ram_bytes:
        short = needed - ram_bytes
        raise BudgetError(
            f"host memory of {format_bytes(ram_bytes)} cannot hold the experts, {format_bytes(needed)} in "
            f"{costs.format}: {format_bytes(short)} ({short} bytes) short",
            "ram",
            short,
        )


def _by_layer(lossy: Sequence[Change], costs: CostModel, base: Settings) -> dict[str, float]:
    """Losses of the formats that a layer may be in: those that can be simulated, and the base's where it has a name."""
    found = {}
    own = costs.formats[0]
    if len(set(costs.formats)) == 1 and own in get_args(ExpertFormat):
        found[str(own)] = 0.0
    for change in lossy:
        name = change.expert_format
        if isinstance(name, str) and not change.layers and usable(change, costs, base, ()):
            found.setdefault(name, change.loss_pct)
    return found if len(found) > 1 else {}


def _smaller(costs: CostModel, base: Settings) -> str | None:
    """The format that holds what the experts of `base` are in fewer bytes, if the profile measured it."""
    name = SMALLER.get(costs.formats[0]) if len(set(costs.formats)) == 1 else None
    if name is None or block_layout(name, costs.shape).bytes >= costs.expert_bytes:  # short rows have long heads
        return None
    return name if usable(Change("none", (), name, 0.0), costs, base, ()) else None


def _held(expert_format: str | tuple[str, ...] | None, costs: CostModel, ram_bytes: int | None) -> bool:
    """Whether host memory holds all experts in a format, as settings say it."""
    chosen = Settings.parse({"expert_format": expert_format}).expert_format
    formats = layer_formats(chosen, costs.shape, costs.profile.meta.dtype)
    return ram_bytes is None or costs.shape.experts * sum(layer_bytes(formats, costs.shape)) <= ram_bytes


def _lossy(traces: Sequence[Trace], base: Settings, asked: TuneOptions) -> list[Change]:
    """What changes the text at a known loss, of this model alone; nothing without a budget for it."""
    quality, budget_pct = asked.get("quality"), asked.get("max_quality_loss_pct")
    given = asked.get("format_loss_pct") or {}
    if (quality is None and not given) != (budget_pct is None):
        raise UsageError("a quality budget and losses (measured: foreload quality) go together: give both or none")
    if budget_pct is None:
        return []
    changes = [Change("none", (), name, loss) for name, loss in given.items() if name != base.expert_format]
    if quality is not None:
        for trace in traces:
            if quality.weights_hash != trace.meta.weights_hash:
                raise MismatchError(
                    f"quality report: of {quality.model!r} with weights {quality.weights_hash}, the recording is of "
                    f"{trace.meta.model!r} with weights {trace.meta.weights_hash}"
                )
        changes += _measured(quality, base)
    return changes


def _measured(quality: QualityReport, base: Settings) -> list[Change]:
    """The variants of a report that settings can be: true routing in prompts."""
    found = []
    for variant in quality.variants:
        format, speculates = variant.expert_format, bool(variant.layers)
        if variant.in_prompts or not (speculates or format != base.expert_format):
            continue
        predictor = variant.predictor if speculates else "none"
        found.append(Change(predictor, variant.layers, format, quality.loss_pct(variant)))
    return found


@dataclass(frozen=True)
class Tuning:
    """A tune that is set up: what competes, on what, and who does the work."""

    pool: Pool
    space: Space
    costs: CostModel
    parts: tuple[Chosen, Chosen, Chosen]  # requests of each recording that fit, select, and are held out
    robust: Robust

    def search(self) -> Search:
        """The search over `space`."""
        return Search(self.pool, self.space, self.parts[0], self.parts[1], self.robust)

    def run(self, around: bool = False) -> TuneResult:
        """Search and choose; `around`: also look at single changes, other memory and other machines."""
        search = self.search()
        found = search.run()
        default = self._reported(found.default)
        ranked = found.ranked()
        if not ranked:
            raise self._too_busy(found)
        best = default
        if default.over_ns or ranked[0].tpot_ns < default.tpot_ns * (1 - KEEP_BELOW):
            winner = self._reported(ranked[0])
            presets = [c.tpot_ns for c in ranked if c.name.startswith(PRESET)]
            behind = (bool(presets) and default.tpot_ns > PRESETS_WITHIN * min(presets)) or default.over_ns > 0
            if winner.report is None or default.report is None or behind or _tpot(winner) < _tpot(default):
                best = winner
        known = {default.settings: default, best.settings: best}
        looked = study(search, self.space, found, best.settings) if around else None
        result = self._result(found, default, best, tuple(known.get(c.settings, c) for c in ranked))
        return replace(result, plan=self._proven(found, search.whole_steps), study=looked)

    def _too_busy(self, found: Found) -> BudgetError:
        """That all keep the link busy for longer than they may, and by how much the least of them."""
        least = min(found.whole.values(), key=lambda c: c.over_ns)
        copies_ns, size = self.costs.copies_ns[0], self.costs.layer_bytes[0]
        short = math.ceil(least.over_ns * size / copies_ns)
        return BudgetError(
            f"link time of {(self.space.limits.link_ns or 0) / 1e6:g} ms per token: the copies of {least.name} take "
            f"{least.over_ns / 1e6:.3f} ms more ({short} bytes), and those of all else that was simulated",
            "link",
            short,
        )

    def _result(
        self, found: Found, default: Candidate, best: Candidate, candidates: tuple[Candidate, ...]
    ) -> TuneResult:
        space, (fit, select, held_out) = self.space, self.parts
        losses = {c.settings: space.loss_pct(c.settings) or 0.0 for c in candidates if self._changes_text(c.settings)}
        passed: dict[str, float] = {}
        simulated = {c.family for c in candidates}
        for settings, ns in sorted(found.part.items(), key=lambda item: item[1]):
            name = found.names[settings].family
            if name not in simulated and ns < math.inf:
                passed.setdefault(name, ns / 1e6)
        return TuneResult(
            best=best,
            default=default,
            candidates=candidates,
            bounds=self._bounds(),
            slots=space.slots,
            fit=fit[0],
            select=select[0],
            held_out=held_out[0],
            quality_loss_pct=space.loss_pct(best.settings) or 0.0,
            loss_assumed=space.adds_up(best.settings),
            recordings=len(fit),
            robust=self.robust,
            losses=losses,
            passed_over=passed,
        )

    def _changes_text(self, settings: Settings) -> bool:
        return bool(settings.speculate_layers) or not self.space.same_numbers(settings)

    def _proven(self, found: Found, steps: int | None) -> Plan | None:
        """The cheapest plan of the programs again, to the optimum, with the linear program's bound beside it."""
        if not found.plans:
            return None
        cheapest = found.plans[0].settings
        ask = (cheapest.changed(slots_per_layer=None), self.space.budget(cheapest))
        limits = Limits(link_ns=self.space.limits.link_ns)
        job = PlanJob((ask,), self.parts[0], steps, self.robust, relax=True, limits=limits)
        (done,) = self.pool.map([job], "prove")
        return next((plan for plan in done if isinstance(plan, Plan)), None)

    def _bounds(self) -> Bounds:
        """The lower of the floors: of steps of one token and, where there are any, of the recorded windows.

        Of several recordings the mean over their tokens, or the one with the lowest floor, as they are judged.
        """
        drafts = [Settings(), *(Settings(draft=draft) for draft in self.space.drafts)]
        found = []
        for draft in drafts:
            for trace, numbers in zip(self.pool.context.traces, self.parts[1], strict=True):
                steps = load_requests(trace, self.space.shape, draft, numbers)
                found.append(bounds(steps, self.costs, self.space.slots))
        return min(found, key=lambda one: one.floor_ns)

    def _reported(self, candidate: Candidate) -> Candidate:
        """With the simulation on held-out requests, where every recording has some."""
        if not all(self.parts[2]) or candidate.report is not None:
            return candidate
        (results,) = self.search().simulated([SimJob(candidate.settings, self.parts[2])], "simulate held-out requests")
        return replace(candidate, report=joined(results))


def _tpot(candidate: Candidate) -> float:
    report: SimResult | None = candidate.report
    return report.tpot_ns if report is not None else candidate.tpot_ns
