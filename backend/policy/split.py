"""How many of a layer-step's absent experts are fetched, the rest computed on the CPU (design: section 5, Split)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

FETCH, CPU, SPLIT_MAKESPAN, SPLIT_BANDWIDTH = 0, 1, 2, 3
"""Miss rules as compiled functions take them: `miss_action`, with `split` told apart by `split_rule`."""


class SplitCosts(NamedTuple):
    """Contended costs of one layer-step's experts, one token each, in nanoseconds."""

    io_ns: int
    gpu_ns: NDArray[np.int64]  # [n + 1] n resident experts on the GPU
    cpu_ns: NDArray[np.int64]  # [n + 1] n experts on the CPU


@njit(cache=True)
def link_backlog_ns(in_flight: int, ahead: int, io_ns: int) -> int:
    """Expected time until the copies in flight and the `ahead` queued demand copies are done (the R of section 5).

    The copy at the head of the link is half done on average.
    """
    backlog = (in_flight + ahead) * io_ns
    return backlog - io_ns // 2 if in_flight > 0 else backlog


@njit(cache=True)
def makespan_ns(fetched: int, absent: int, resident: int, late: int, backlog_ns: int, costs: SplitCosts) -> int:
    """End of the layer-step's experts: max(T_gpu(resident), R + n t_io + t_gpu(1), t_cpu(m - n))."""
    gpu = costs.gpu_ns[min(resident, len(costs.gpu_ns) - 1)]
    link = 0
    if fetched + late > 0:
        link = backlog_ns + fetched * costs.io_ns + costs.gpu_ns[min(1, len(costs.gpu_ns) - 1)]
    cpu = costs.cpu_ns[min(absent - fetched, len(costs.cpu_ns) - 1)]
    return int(max(gpu, link, cpu))


@njit(cache=True)
def fetch_count(rule: int, absent: int, resident: int, late: int, backlog_ns: int, costs: SplitCosts) -> int:
    """How many of the `absent` experts to fetch; ties go to fetching more, which also warms the cache."""
    if rule == FETCH or absent == 0:
        return absent
    if rule == CPU:
        return 0
    if rule == SPLIT_BANDWIDTH:
        cpu_ns = costs.cpu_ns[min(1, len(costs.cpu_ns) - 1)]
        total = costs.io_ns + cpu_ns
        return int((2 * absent * cpu_ns + total) // (2 * total))
    best, best_ns = 0, makespan_ns(0, absent, resident, late, backlog_ns, costs)
    for fetched in range(1, absent + 1):
        time_ns = makespan_ns(fetched, absent, resident, late, backlog_ns, costs)
        if time_ns <= best_ns:
            best, best_ns = fetched, time_ns
    return best
