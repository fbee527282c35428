"""Simulate with the compiled model: tables from the cost model, requests one after the other, a `SimResult`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreload.backend.policy import Brain
from foreload.backend.policy.split import NO_COSTS
from foreload.backend.policy.state import DECODE, PREFILL, WARM
from foreload.errors import InternalError, MismatchError
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.shape import ModelShape
from foreload.simulator.compiled import graphs, host, prompts
from foreload.simulator.compiled.host import Steps
from foreload.simulator.compiled.machine import FAILED, HOST, KINDS, PHASE, RESTED_SINCE, ROW, Machine, new_machine
from foreload.simulator.compiled.tables import blocks, pairs, rates, used
from foreload.simulator.compiled.tables import graphs as graph_tables
from foreload.simulator.contended import split_costs
from foreload.simulator.costs import CostModel, as_costs
from foreload.simulator.graph_costs import GraphCosts
from foreload.simulator.result import SimResult, owned, shared_ns, token_parts
from foreload.simulator.workload import Request, load_requests
from foreload.traces.schema import Trace

_FAILURES = {1: "a buffer is full", 2: "the host waits for what cannot happen", 3: "no staging slot is left"}


def simulate(
    trace: Trace,
    profile: HardwareProfile | CostModel,
    shape: ModelShape,
    settings: Settings,
    capacity: tuple[int, ...],
    requests: Sequence[int] | None = None,
    warm: NDArray[np.int64] | None = None,
) -> SimResult:
    """What `engine_model.simulate` returns, without a timeline, some fifty times as fast."""
    chosen = load_requests(trace, shape, settings, requests)
    return simulate_requests(chosen, as_costs(profile, shape), settings, capacity, warm, trace.meta.sampled)


def simulate_requests(
    requests: Sequence[Request],
    costs: CostModel,
    settings: Settings,
    capacity: tuple[int, ...],
    warm: NDArray[np.int64] | None = None,
    sampled: bool = False,
) -> SimResult:
    """The same for loaded requests. Raises MismatchError and FileError as the SimPy model."""
    layers, costs = costs.shape.n_moe_layers, costs.for_settings(settings)
    if len(capacity) != layers:
        raise MismatchError(f"capacity has {len(capacity)} entries: the model has {layers} MoE layers")
    run = _Run(requests, costs, settings, tuple(capacity), warm, sampled)
    run.warm_start()
    for request in requests:
        run.serve(request)
    return run.result()


class _Run:
    def __init__(
        self,
        requests: Sequence[Request],
        costs: CostModel,
        settings: Settings,
        capacity: tuple[int, ...],
        warm: NDArray[np.int64] | None,
        sampled: bool,
    ) -> None:
        shape = costs.shape
        self.requests, self.costs, self.settings, self.sampled = requests, costs, settings, sampled
        split = split_costs(costs, shape, settings) if settings.needs_costs is not None else None
        self.brain = Brain(shape, settings, capacity, split, warm)
        self.split = split or NO_COSTS
        fed = max((n for request in requests for n in request.fed), default=1)
        most = max((request.demand.shape[2] for request in requests), default=shape.top_k)
        tokens = fed * shape.top_k if fed > 1 else 0
        self.rates = rates(costs, settings, most, tokens)
        longest = max((len(request.prompt) for request in requests), default=0)
        self.chunk_tokens = max(1, min(settings.prefill_chunk_tokens, longest))
        self.blocks = blocks(costs, settings, most, tokens, fed, sampled, self.chunk_tokens)
        self.machine: Machine = new_machine(
            layers=shape.n_moe_layers,
            experts=shape.experts,
            most=most,
            tokens=tokens,
            chunk_tokens=self.chunk_tokens,
            longest_us=self.blocks.cold.shape[1] - 1,
            asynchronous=costs.asynchronous,
            formats=len(self.rates.cpu_ns),
        )
        self.machine.at[RESTED_SINCE] = -self.rates.rest_ns - 1
        self.graphs = graph_tables(costs, settings, fed) if costs.graphs else None
        self.all_slots = sum(capacity) == shape.n_moe_layers * shape.experts
        self.token_ns: list[int] = []
        self.ttft_ns: list[int] = []
        self.warm_ns = 0

    def _checked(self) -> int:
        """The host's time; InternalError if the machine got stuck."""
        failed = int(self.machine.at[FAILED])
        if failed:
            raise InternalError(f"the simulated engine is stuck: {_FAILURES[failed]}")
        return int(self.machine.at[HOST])

    def warm_start(self) -> None:
        """Load what the brain wants before the first request."""
        m, state = self.machine, self.brain.state
        layers, experts = (index.astype(np.int64) for index in np.nonzero(self.brain.warm_targets()))
        m.at[ROW] = m.at[PHASE] = WARM
        prompts.warm_start(m, self.rates, state, self.brain.rules, layers, experts)
        m.at[PHASE] = DECODE
        self.warm_ns = self._checked()

    def serve(self, request: Request) -> None:
        """One prompt and its tokens."""
        m, brain = self.machine, self.brain
        m.at[ROW], begun = PREFILL, int(m.at[HOST])
        host.settle(m, self.rates, brain.state)
        brain.start_request()
        host.drain_link(m, self.rates, brain.state)
        m.at[PHASE] = PREFILL
        of_prompt = (m, self.rates, self.blocks, brain.state, brain.rules)
        prompts.prefill(*of_prompt, self.chunk_tokens, request.prompt)
        m.at[PHASE] = m.at[ROW] = DECODE
        self.ttft_ns.append(self._checked() - begun)
        depth, step_ns = self.settings.prefetch_depth, np.zeros(len(request.fed), np.int64)
        steps = self._steps(request)
        if self.graphs is None:
            host.decode(m, self.rates, self.blocks, brain.state, brain.rules, self.split, steps, depth, step_ns)
        else:
            shared = (m, self.rates, self.blocks, self.graphs)
            graphs.decode(*shared, brain.state, brain.rules, self.split, steps, depth, step_ns)
        self._checked()
        self.token_ns += shared_ns(step_ns.tolist(), request.emitted)

    def _steps(self, request: Request) -> Steps:
        places = list(zip(request.context, request.fed, strict=True))
        whole = [0] * len(places)
        if self.costs.graphs and self.all_slots:
            found = GraphCosts(self.costs, self.settings)
            distinct = np.count_nonzero(request.counts, axis=(1, 2)).tolist()
            whole = [found.whole_ns(*place, experts) for place, experts in zip(places, distinct, strict=True)]
        return Steps(
            demand=request.demand,
            counts=request.counts,
            predicted=request.ahead(self.settings.prefetch_depth),
            fed=np.array(request.fed, np.int64),
            emitted=np.array(request.emitted, np.int64),
            attention=pairs(self.costs.block("attention", context, fed) for context, fed in places),
            whole=np.array(whole, np.int64),
        )

    def result(self) -> SimResult:
        """What came of it; InternalError if the times by kind do not add up."""
        self.brain.check_integrity()
        token_ns = np.array(self.token_ns, np.int64)
        times = [{k: int(ns) for k, ns in zip(KINDS, row, strict=True) if ns} for row in self.machine.time]
        if int(token_ns.sum()) != sum(times[DECODE].values()):
            raise InternalError("the simulated times by kind do not add up to the total")
        return SimResult(
            settings=self.settings,
            capacity=tuple(int(c) for c in self.brain.state.capacity),
            token_ns=token_ns,
            token_part=token_parts(owned(self.requests)),
            steps=sum(len(request.emitted) for request in self.requests),
            ttft_ns=np.array(self.ttft_ns, np.int64),
            warm_ns=self.warm_ns,
            time_ns=times[DECODE],
            prefill_time_ns=times[PREFILL],
            counters=self.brain.counters.copy(),
            layer_bytes=self.costs.layer_bytes,
            copy_ns=self.costs.copies_ns,
            sources=used(self.costs, self.settings, self.machine, self.requests, self.sampled, self.all_slots),
        )
