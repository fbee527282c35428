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
from numba import njit
from numpy.typing import NDArray

from foreload.backend.policy.rules import BELADY
from foreload.shape import ModelShape
from foreload.simulator.costs import SCALE, CostModel
from foreload.simulator.stacks import next_uses, stack_pass
from foreload.simulator.workload import Request

_NEVER = np.int64(1) << 60


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
    if all(request.demand.shape[2] == shape.top_k and set(request.fed) <= {1} for request in requests):
        return _single_token_loads(requests, shape)
    demanded, counted = _steps(requests, shape)
    loads = np.zeros((shape.n_moe_layers, shape.experts + 1), np.int64)
    for layer in range(shape.n_moe_layers):
        _min_loads(np.ascontiguousarray(demanded[:, layer]), counted, loads[layer])
    return loads


def _single_token_loads(requests: Sequence[Request], shape: ModelShape) -> NDArray[np.int64]:
    """The same for steps of one token: one pass per layer holds what a cache of every size holds (`stacks`)."""
    blocks = [block for r in requests for block in (r.prompt, *r.demand[:, None]) if len(block)]
    counted = np.array([c for r in requests for c in [False] * bool(len(r.prompt)) + [True] * len(r.demand)], np.bool_)
    starts = np.concatenate([[0], np.cumsum([len(block) for block in blocks])]).astype(np.int64)
    ids = np.concatenate([np.zeros((0, shape.n_moe_layers, shape.top_k), np.int16), *blocks]).astype(np.int16)
    fresh = np.zeros(len(counted), np.bool_)
    loads = np.empty((shape.n_moe_layers, shape.experts + 1), np.int64)
    for layer in range(shape.n_moe_layers):
        of_layer, hits = np.ascontiguousarray(ids[:, layer]), np.zeros(shape.experts + 1, np.int64)
        future = np.empty(of_layer.shape, np.int32)
        next_uses(of_layer, starts, counted, future)
        stack_pass(of_layer, future, (starts, starts[:-1], counted, fresh), BELADY, (layer, 0), hits)
        loads[layer] = int(counted.sum()) * shape.top_k - np.cumsum(hits)
    return loads


def _steps(requests: Sequence[Request], shape: ModelShape) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Demand [S, L, E] of prompts and decode steps in order, and which steps' loads count [S]."""
    total = sum(len(r.emitted) + 1 for r in requests)
    demanded = np.zeros((total, shape.n_moe_layers, shape.experts), np.bool_)
    counted = np.ones(total, np.bool_)
    at, rows = 0, np.arange(shape.n_moe_layers)[:, None]
    for request in requests:
        for routed in request.prompt:
            demanded[at, rows, routed] = True
        counted[at] = False
        at += 1
        for step in range(len(request.emitted)):
            layers, experts = request.needed(step)
            demanded[at, layers, experts] = True
            at += 1
    return demanded, counted


@njit(cache=True)
def _min_loads(demanded: NDArray[np.bool_], counted: NDArray[np.bool_], loads: NDArray[np.int64]) -> None:
    """Farthest-in-future eviction for every capacity; demanded [S, E], loads [E + 1]."""
    steps, experts = demanded.shape
    following = np.full((steps, experts), _NEVER)
    later = np.full(experts, _NEVER)
    for at in range(steps - 1, -1, -1):
        following[at] = later
        for expert in range(experts):
            if demanded[at, expert]:
                later[expert] = at if counted[at] else _NEVER
    for capacity in range(experts + 1):
        kept = np.full(experts, _NEVER)  # when a kept expert is used next; NEVER: not kept
        for at in range(steps):
            for expert in range(experts):
                if demanded[at, expert]:
                    if counted[at] and kept[expert] == _NEVER:
                        loads[capacity] += 1
                    kept[expert] = following[at, expert]
            over = (kept != _NEVER).sum() - capacity
            for _ in range(over):
                worst = -1
                for expert in range(experts):
                    if kept[expert] != _NEVER and (worst < 0 or kept[expert] > kept[worst]):
                        worst = expert
                kept[worst] = _NEVER


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
