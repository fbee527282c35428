"""The cost model as arrays for compiled functions, and which of its points a run relied on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from itertools import product

import numpy as np
from numpy.typing import NDArray

from foreload.settings import Settings
from foreload.simulator.compiled.graphs import Graphs
from foreload.simulator.compiled.host import Blocks
from foreload.simulator.compiled.machine import SEEN_BOTH, SEEN_CPU, SEEN_CPU_RATE, SEEN_GPU, Machine
from foreload.simulator.compiled.rates import Rates
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import SCALE, Cost, CostModel
from foreload.simulator.graph_costs import DeviceTimes, GraphCosts
from foreload.simulator.workload import Request

_NOTHING = Cost(0, 0, "measured")
_WINDOWED = ("embed", "route", "plan", "finish", "head")


def pairs(costs: Iterable[Cost]) -> NDArray[np.int64]:
    """(host, GPU) nanoseconds, [n, 2]."""
    return np.array([(cost.host_ns, cost.gpu_ns) for cost in costs], np.int64).reshape(-1, 2)


def _counted(cost: Callable[[int], Cost], most: int) -> NDArray[np.int64]:
    """Costs of 1..`most`, [most + 1, 2]."""
    return pairs([_NOTHING, *(cost(n) for n in range(1, most + 1))])


def rates(costs: CostModel, settings: Settings, most: int, tokens: int) -> Rates:
    """Link, CPU and how they share, for up to `most` experts and `tokens` tokens; without CPU experts, the link."""
    threads, (models, of_layer) = settings.cpu_threads, costs.kinds()
    cpu_ns, cpu_rate = np.zeros((len(models), most + 1, tokens + 1), np.int64), np.full(most + 1, SCALE, np.int64)
    both_rate = np.full((most + 1, most + 1), SCALE, np.int64)
    copy_rate, varies = SCALE, [costs.varies(probe, threads) for probe in ("copy_beside_cpu", "experts_cpu")]
    if settings.miss_action != "fetch":
        copy_rate = costs.copy_rate(threads)
        for n in range(1, most + 1):
            cpu_ns[:, n] = [[model.experts_cpu_ns(n, threads, t) for t in range(tokens + 1)] for model in models]
            cpu_rate[n] = costs.cpu_rate(n, threads)
            both_rate[1:, n] = [costs.both_rate(gpu, n, threads) for gpu in range(1, most + 1)]
    *times, read = astuple(DeviceTimes.of(costs, settings))
    return Rates(
        *(
            of_layer,
            np.array(costs.copies_ns, np.int64),
            copy_rate,
            np.array(varies[0], np.int64),
            costs.cost("wait").host_ns,
            *times,
            np.array(read, np.int64).reshape(-1, 2),
            cpu_ns,
            np.array(varies[1], np.int64),
            cpu_rate,
            both_rate,
        )
    )


def blocks(costs: CostModel, settings: Settings, most: int, tokens: int, fed: int, sampled: bool, chunk: int) -> Blocks:
    """Everything that runs on host and GPU; as for `rates`, up to `fed` tokens in a step and `chunk` of a prompt."""
    threads = settings.cpu_threads if settings.miss_action != "fetch" else 0
    draft, depth = settings.draft.kind, settings.prefetch_depth

    def ahead(n: int) -> NDArray[np.int64]:
        return _counted(lambda h: costs.beyond(costs.predict(settings, h), "predict", n), depth)

    executes = np.zeros(costs.shape.n_moe_layers, np.bool_)
    executes[list(settings.speculated(costs.shape))] = True
    longest = max(m.at.get("wait_us", 0) for m in costs.profile.points("after_wait"))
    cold = [[costs.cold_ns(us * 1000, n) for us in range(longest + 1)] for n in (0, threads)]
    groups = [_resident(model, most, tokens) for model in costs.kinds()[0]]
    late = np.stack([group[min(1, most)] for group in groups])
    if costs.graphs:
        late[:, :, 0] = costs.cost("late").host_ns
    speculated = costs.cost("speculated") if executes.any() and not costs.graphs else _NOTHING
    windowed = {probe: _counted(lambda n, p=probe: _over(costs, p, n), fed) for probe in _WINDOWED}  # type: ignore[misc]
    return Blocks(
        **windowed,
        speculated=_counted(
            lambda n: costs.beyond(speculated, "route", n) if speculated is not _NOTHING else _NOTHING, fed
        ),
        predict=np.stack([ahead(max(1, n)) for n in range(fed + 1)]),
        draft=_counted(lambda n: costs.cost(f"draft_{draft}", n) if draft != "none" else _NOTHING, fed),
        sample=_counted(lambda n: costs.cost("sample", n) if draft != "none" and sampled else _NOTHING, fed),
        experts=np.stack(groups),
        late=late,
        prefill_layer=_counted(lambda n: costs.cost("prefill_layer", n), chunk),
        prefill_expert=_counted(lambda n: costs.cost("prefill_expert", n), chunk),
        cold=np.array(cold, np.int64),
        executes=executes,
        queueing_ns=0 if costs.graphs else costs.queueing_ns,
        interrupt_ns=costs.interrupt_ns,
        drafting=draft != "none",
        shares=not costs.graphs,
        grouped=costs.graphs,
    )


def _resident(costs: CostModel, most: int, tokens: int) -> NDArray[np.int64]:
    """Resident experts of one format, [most + 1, tokens + 1, 2]."""
    found = [_counted(lambda n, t=t: costs.experts_gpu(n, t), most) for t in range(tokens + 1)]  # type: ignore[misc]
    return np.stack(found, axis=1)


def _over(costs: CostModel, probe: str, tokens: int) -> Cost:
    """A block over several tokens; graphs have no routing of their own."""
    return _NOTHING if costs.graphs and probe == "route" else costs.block(probe, 0, tokens)


def graphs(costs: CostModel, settings: Settings, fed: int) -> Graphs:
    """What graphs add, for steps of up to `fed` tokens."""
    found, depths = GraphCosts(costs, settings), range(settings.prefetch_depth + 1)
    extra = np.array([found.extra_ns(executes) for executes in (False, True)], np.int64)
    foresee = np.zeros((fed + 1, len(depths), 2), np.int64)
    for n, depth in product(range(1, fed + 1), depths):
        cost = found.foresee(n, depth)
        foresee[n, depth] = cost.host_ns, cost.gpu_ns
    return Graphs(extra, foresee, found.host.issue_ns, found.host.submit_ns, found.ahead_ns)


def used(
    costs: CostModel,
    settings: Settings,
    m: Machine,
    requests: Sequence[Request],
    sampled: bool,
    all_slots: bool,
) -> dict[str, str]:
    """Probe -> the worst provenance among the points a run relied on; `all_slots`: every expert may be resident."""
    asked, threads = costs.fresh(), settings.cpu_threads
    asked.cost("wait")
    DeviceTimes.of(asked, settings)
    models, _ = asked.kinds()
    _ = [model.copy_ns for model in models], asked.interrupt_ns
    if settings.needs_costs is not None:
        split_costs(asked, costs.shape, settings)
    found = GraphCosts(asked, settings) if asked.graphs else None
    for request in requests:
        _of_steps(asked, settings, request, sampled, found, all_slots)
    for after_cpu, us in np.argwhere(m.seen_us).tolist():
        asked.cold_ns(us * 1000, threads if after_cpu else 0)
    for row, tokens in np.argwhere(m.seen_tokens).tolist():
        asked.cost(("prefill_layer", "prefill_expert")[row], tokens)
        asked.cost("embed")
        asked.cost("head")
    for format, row, n, other in np.argwhere(m.seen).tolist():
        if row == SEEN_GPU:
            models[format].experts_gpu(n, other)
        elif row == SEEN_CPU:
            models[format].experts_cpu_ns(n, threads, other)
        elif row == SEEN_CPU_RATE:
            _ = asked.cpu_rate(n, threads) if n else asked.copy_rate(threads)
        elif row == SEEN_BOTH:
            asked.both_rate(n, other, threads)
    routing = {"speculated_demand": "assumed"} if any(request.assumed for request in requests) else {}
    return dict(sorted({**asked.used, **routing}.items()))


def _of_steps(
    asked: CostModel,
    settings: Settings,
    request: Request,
    sampled: bool,
    graphs: GraphCosts | None,
    all_slots: bool,
) -> None:
    """Look up what the blocks of a request's steps cost."""
    drafting = settings.draft.kind != "none"
    for context, fed in set(zip(request.context, request.fed, strict=True)):
        if graphs is not None:
            graphs.look_up(context, fed, all_slots)
        else:
            asked.block("attention", context, fed)
    for fed in set(request.fed):
        if graphs is None:
            _of_blocks(asked, settings, fed)
        if drafting:
            asked.cost(f"draft_{settings.draft.kind}", max(1, fed - 1))
    for emitted in set(request.emitted) if drafting and sampled else ():
        asked.cost("sample", emitted)


def _of_blocks(asked: CostModel, settings: Settings, fed: int) -> None:
    """Blocks of a step over `fed` tokens, wherever it is."""
    for probe in _WINDOWED:
        asked.block(probe, 0, fed)
    for depth in range(1, min(settings.prefetch_depth, asked.shape.n_moe_layers - 1) + 1):
        asked.beyond(asked.predict(settings, depth), "predict", fed)
    if settings.speculated(asked.shape):
        asked.beyond(asked.cost("speculated"), "route", fed)
