"""What no setting can beat: the bytes any cache must move, and the work that is left with every expert resident.

Belady's MIN with bypass, per layer and with whole-set accounting, bounds the experts that are not resident from an
earlier step. A prompt is a step whose loads are not counted and after which any of its experts may stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy.rules import BELADY
from foreload.shape import ModelShape
from foreload.simulator.costs import SCALE, CostModel
from foreload.simulator.stacks import layer_hits
from foreload.simulator.workload import Request


@dataclass(frozen=True)
class Bounds:
    """Floors per decode token, in nanoseconds on the profiled machine. T >= max(link_ns, compute_ns)."""

    loads: float  # experts not resident from an earlier step, at least, per token
    bytes_per_token: float
    link_ns: float  # to bring or compute those: bytes / (link + CPU, contended)
    compute_ns: float  # dense blocks, and the experts split between device and CPU at will
    resident_ns: float  # a run with every expert resident (not a bound where the CPU helps)

    @property
    def floor_ns(self) -> float:
        """The larger of both floors."""
        return max(self.link_ns, self.compute_ns)

    def as_dict(self) -> dict[str, Any]:
        """JSON values, times in milliseconds."""
        return {
            "loads_per_token": self.loads,
            "bytes_per_token": self.bytes_per_token,
            "link_ms": self.link_ns / 1e6,
            "compute_ms": self.compute_ns / 1e6,
            "floor_ms": self.floor_ns / 1e6,
            "resident_ms": self.resident_ns / 1e6,
        }


def belady_loads(requests: Sequence[Request], shape: ModelShape) -> NDArray[np.int64]:
    """Fewest decode loads [L, E + 1] of each layer at every slot count, over the requests in order from empty."""
    layers, k = shape.n_moe_layers, shape.top_k
    blocks = [_rows(block, k) for r in requests for block in (r.prompt, *r.demand[:, None]) if len(block)]
    counted = np.array([c for r in requests for c in [False] * bool(len(r.prompt)) + [True] * len(r.demand)], np.bool_)
    starts = np.concatenate([[0], np.cumsum([len(block) for block in blocks])]).astype(np.int64)
    ids = np.concatenate([np.zeros((0, layers, k), np.int16), *blocks])
    where = (starts, starts[:-1], counted, np.zeros(len(counted), np.bool_))
    demanded = [sum(np.count_nonzero(request.counts[:, layer]) for request in requests) for layer in range(layers)]
    hits = [
        layer_hits(np.ascontiguousarray(ids[:, layer]), where, BELADY, (layer, 0), shape.experts)
        for layer in range(layers)
    ]
    return np.array(demanded, np.int64)[:, None] - np.array(hits)


def _rows(demand: NDArray[np.int32], k: int) -> NDArray[np.int16]:
    """The experts of a step [R, L, D], those that are not -1, in rows of k; what is left of the last repeats one."""
    rows, layers, wide = demand.shape
    if wide == k:
        return demand.astype(np.int16)
    padded = np.full((rows, layers, -(-wide // k) * k), -1, np.int16)
    padded[:, :, :wide] = demand
    filled = np.where(padded < 0, padded[:, :, :1], padded)
    return np.ascontiguousarray(filled.reshape(rows, layers, -1, k).swapaxes(1, 2).reshape(-1, layers, k))


def fewest_loads(loads: NDArray[np.int64], slots: int) -> int:
    """Loads of the best division of `slots` over the layers; loads [L, E + 1] are convex in the slot count."""
    savings = np.sort((loads[:, :-1] - loads[:, 1:]).ravel())[::-1]
    return int(loads[:, 0].sum() - savings[:slots].sum())


def experts_per_second(costs: CostModel) -> float:
    """The most experts per second that link and CPU bring or compute together, each slowed by the other.

    Of layers in different formats those of the fastest.
    """
    best = 0.0
    for model in costs.kinds()[0]:
        link = 1e9 / model.copy_ns
        best = max(best, link)
        for threads, n in product(model.cpu_threads, range(1, model.shape.top_k + 1)):
            cpu = n * 1e9 / model.experts_cpu_ns(n, threads)
            both = link * model.copy_rate(threads) / SCALE + cpu * model.cpu_rate(n, threads) / SCALE
            best = max(best, cpu, both)
    return best


def _blocks_ns(costs: CostModel, context: int, fed: int) -> int:
    """Dense work of one step over `fed` tokens: everything but experts, predictions and drafts."""
    ends = costs.block("embed", tokens=fed).busy_ns + costs.block("head", tokens=fed).busy_ns
    return ends + costs.shape.n_moe_layers * costs.dense_ns(context, fed)


def _experts_ns(costs: CostModel, most: int, windows: bool) -> tuple[list[int], list[int]]:
    """Least time of 0..`most` distinct experts of a layer-step, shared between device and CPU or all resident."""

    def tokens(experts: int) -> int:  # at least one each, where a step has several
        return experts if windows else 0

    resident = [costs.experts_gpu_ns(n, tokens(n)) for n in range(most + 1)]
    cheapest = [min(resident[n:]) if n else 0 for n in range(most + 1)]
    least = list(cheapest)
    for threads in costs.cpu_threads if most else ():
        on_cpu = [costs.experts_cpu_ns(n, threads, tokens(n)) for n in range(most + 1)]
        for n in range(1, most + 1):
            least[n] = min(least[n], *(max(cheapest[n - m], on_cpu[m]) for m in range(1, n + 1)))
    return least, resident


def _all_experts_ns(requests: Sequence[Request], costs: CostModel, windows: bool) -> tuple[float, float]:
    """Least time of the experts of all layer-steps: shared between device and CPU, or all resident."""
    models, of_layer = costs.kinds()
    total = np.zeros(2)
    for kind, model in enumerate(models):
        counts = [np.count_nonzero(request.counts[:, of_layer == kind], axis=2).ravel() for request in requests]
        layer_steps = np.bincount(np.concatenate([np.zeros(0, np.int64), *counts]).astype(np.int64))
        total += np.array(_experts_ns(model, len(layer_steps) - 1, windows)) @ layer_steps
    return float(total[0]), float(total[1])


def bounds(
    requests: Sequence[Request],
    costs: CostModel,
    slots: int,
    loads: NDArray[np.int64] | None = None,
    warm: int = 0,
) -> Bounds:
    """Floors for `slots` persistent slots, divided over the layers at will. `loads`: of `belady_loads`, if at hand.

    Per token that the steps of `requests` add to the text: other windows have other floors. Each of the `warm` experts
    loaded before the first request saves one load at most.
    """
    table = belady_loads(requests, costs.shape) if loads is None else loads
    tokens = max(1, sum(request.tokens for request in requests))
    per_token = max(0, fewest_loads(table, slots) - warm) / tokens
    steps = [step for request in requests for step in zip(request.context, request.fed, strict=True)]
    dense = sum(_blocks_ns(costs, context, fed) for context, fed in steps)
    least, resident = _all_experts_ns(requests, costs, any(fed > 1 for _, fed in steps))
    whole = sum(costs.block("whole", context, fed).gpu_ns for context, fed in steps) if costs.graphs else np.inf
    return Bounds(
        loads=per_token,
        bytes_per_token=per_token * min(costs.layer_bytes),
        link_ns=per_token * 1e9 / experts_per_second(costs),
        compute_ns=min(dense + least, whole) / tokens,
        resident_ns=min(dense + resident, whole) / tokens,
    )
