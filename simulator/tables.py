"""Cost tables of the integer program: expected time of a layer-step at every slot count, from clockless replays.

A replay at about 13 slot counts says how often a layer-step fetches, computes on the CPU or finds a prefetch; the cost
model says what each of those takes; between slot counts the cost is linear. Demand copies overlap with the resident
experts of their own layer-step alone, prefetches with everything: an estimate that ranks plans, which are simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import SCALE, CostModel
from foreload.simulator.replay import Outcomes, replay
from foreload.simulator.workload import Request

GRID_POINTS = 13
AROUND = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15, 1.3, 1.6, 2.0, 2.6, 3.5)


def slot_grid(shape: ModelShape, points: int = GRID_POINTS) -> list[int]:
    """About so many slot counts of one layer, from none to all."""
    return sorted({round(n) for n in np.linspace(0, shape.experts, points).tolist()})


def grid_around(shape: ModelShape, slots: int) -> list[int]:
    """The same, close to each other about `slots`, the mean that there is room for: most layers have about that."""
    wanted = {min(shape.experts, round(slots * share)) for share in AROUND}
    return sorted({0, *wanted, shape.experts})


def replay_grid(
    requests: Sequence[Request],
    costs: CostModel,
    settings: Settings,
    grid: Sequence[int] | None = None,
    warm: NDArray[np.int64] | None = None,
) -> list[Outcomes]:
    """Outcomes with the same slot count in every layer, for each count of the grid."""
    shape = costs.shape
    split = split_costs(costs, shape, settings) if settings.needs_costs is not None else None
    chosen = slot_grid(shape) if grid is None else grid
    return [replay(requests, shape, settings, (count,) * shape.n_moe_layers, split, warm) for count in chosen]


def layer_costs(
    outcomes: Sequence[Outcomes], costs: CostModel, settings: Settings, context: int, grid: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """Mean nanoseconds of a layer-step [L, E + 1] at every slot count; `context` sets the attention cost."""
    shape, (models, of_layer) = costs.shape, costs.kinds()
    dense = _dense_ns(costs, settings, context)
    work = np.stack([_work_table(model, settings) for model in models])[of_layer]
    at_grid = np.array([_mean_ns(found, costs, dense, work) for found in outcomes])  # [grid, L]
    return _at_every(shape, at_grid, grid)


def link_times(
    outcomes: Sequence[Outcomes], costs: CostModel, grid: Sequence[int] | None = None
) -> NDArray[np.float64]:
    """Mean nanoseconds per step [L, E + 1] that a layer's copies keep the link busy, at every slot count."""
    shape = costs.shape
    at_grid = np.array([found.copied * np.array(costs.copies_ns) for found in outcomes])  # [grid, L]
    return _at_every(shape, at_grid, grid)


def _at_every(shape: ModelShape, at_grid: NDArray[np.float64], grid: Sequence[int] | None) -> NDArray[np.float64]:
    """Lines [L, E + 1] between the slot counts of [grid, L]."""
    every, chosen = np.arange(shape.experts + 1), slot_grid(shape) if grid is None else grid
    return np.array([np.interp(every, chosen, at_grid[:, layer]) for layer in range(shape.n_moe_layers)])


def _dense_ns(costs: CostModel, settings: Settings, context: int) -> int:
    """Blocks of one layer-step without experts, mean over the layers."""
    dense = costs.between_ns(context)
    if settings.prefetch_depth:
        dense += costs.predict(settings, settings.prefetch_depth).busy_ns
    if speculated := len(settings.speculated(costs.shape)):
        change = costs.speculating_ns
        dense += speculated * change // costs.shape.n_moe_layers
    return dense


def _work_table(costs: CostModel, settings: Settings) -> NDArray[np.float64]:
    """Nanoseconds of a layer-step's experts [k+1, k+1]: fetched, on the CPU; the others are resident."""
    k = costs.shape.top_k
    table = np.full((k + 1, k + 1), np.nan)
    for fetched, on_cpu in product(range(k + 1), repeat=2):
        if fetched + on_cpu <= k and (on_cpu == 0 or settings.miss_action != "fetch"):
            table[fetched, on_cpu] = _work_ns(costs, settings, fetched, on_cpu)
    return table


def _work_ns(costs: CostModel, settings: Settings, fetched: int, on_cpu: int) -> int:
    """Resident experts first, then each fetched one as it lands, then the CPU's results."""
    threads = settings.cpu_threads
    resident = costs.shape.top_k - fetched - on_cpu
    wake, copy, one = costs.cost("wait").host_ns, costs.copy_ns, costs.experts_gpu_ns(1)
    time, cpu = costs.experts_gpu_ns(resident), costs.experts_cpu_ns(on_cpu, threads)
    if on_cpu:
        if resident:
            time = time * SCALE // costs.both_rate(resident, on_cpu, threads)
        if fetched or settings.prefetch_depth:
            copy = copy * SCALE // costs.copy_rate(threads)
            cpu = cpu * SCALE // costs.cpu_rate(on_cpu, threads)
    for nth in range(1, fetched + 1):
        time = max(time, nth * copy + wake) + one
    return max(time, cpu)


def _mean_ns(found: Outcomes, costs: CostModel, dense: int, work: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean layer-step time [L]; a step is no shorter than what the link carries in it, prefetches included.

    work [L, k + 1, k + 1].
    """
    fetched, on_cpu, _ = np.indices(found.histogram.shape[1:])
    link = found.prefetched[:, None, None, None] + fetched
    copies_ns = np.array(costs.copies_ns)[:, None, None, None]
    times = np.maximum(dense + work[:, fetched, on_cpu], link * copies_ns)
    seen = found.histogram > 0
    total: NDArray[np.float64] = np.where(seen, found.histogram * times, 0.0).sum(axis=(1, 2, 3))
    return total / max(1, found.tokens)
