"""What decode steps cost where they are graphs: the blocks of `CostModel` put together for one setting.

The device begins what is launched `launch` later at the earliest. Entering a layer is one block of the device; how
much of it there is depends on what the settings make graphs do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from foreload.profiler.schema import PROBED_CONTEXT
from foreload.settings import Settings
from foreload.simulator.costs import SCALE, Cost, CostModel, worst


@dataclass(frozen=True)
class HostCosts:
    """Nanoseconds of the decoding thread that do not go by the step."""

    issue_ns: int  # each copy issued
    late_ns: int  # launching an expert behind its copy
    submit_ns: int  # handing experts to the CPU


class GraphCosts:
    """Blocks of one setting. Raises FileError if the profile lacks a probe they need."""

    def __init__(self, costs: CostModel, settings: Settings) -> None:
        self._costs, self._settings = costs, settings
        self.on_cpu = settings.miss_action != "fetch"
        submit = costs.cost("submit").host_ns if self.on_cpu else 0
        self.host = HostCosts(costs.cost("issue").host_ns, costs.cost("late").host_ns, submit)
        self._more = costs.cost("enter_cpu").gpu_ns if self.on_cpu else 0
        self._more += costs.cost("replayed").gpu_ns if costs.replayed else 0
        self._executes = costs.speculating_ns if settings.speculated(costs.shape) else 0

    def look_up(self, context: int, tokens: int, all_slots: bool) -> None:
        """Look up what a step may need, so that what is said of sources does not go by what happened in it."""
        for depth in range(min(self._settings.prefetch_depth, self._costs.shape.n_moe_layers - 1) + 1):
            self.foresee(tokens, depth)
        for block in ("plan", "embed", "head", "finish"):
            self._costs.block(block, tokens=tokens)
        self._costs.block("attention", context, tokens)
        _ = self._costs.interrupt_ns, self.ahead_ns
        if all_slots:
            self.whole_ns(context, tokens, 0)

    def extra_ns(self, executes: bool) -> int:
        """What entering a layer takes the device beyond `attention`, until its routing is told; may be below 0."""
        return self._more + (self._executes if executes else 0)

    @cached_property
    def ahead_ns(self) -> int:
        """What of entering a layer the device has done before the outputs of CPU experts are there; may be below 0.

        Of the plan, the experts it runs itself and predictions nothing is left then.
        """
        costs = self._costs
        if not self.on_cpu or not costs.measured("gpu_behind_cpu"):
            return -costs.cost("launch").host_ns
        behind = costs.cost("gpu_behind_cpu", 0, self._settings.cpu_threads, copies=0).gpu_ns
        entering = costs.cost("attention", PROBED_CONTEXT).gpu_ns + costs.cost("enter_cpu").gpu_ns
        return entering - behind

    def launch_ns(self, context: int, tokens: int) -> int:
        """Launching what enters a layer."""
        return self._costs.block("attention", context, tokens).host_ns

    def enter(self, context: int, tokens: int, executes: bool) -> Cost:
        """Entering a layer in a step whose last token is at `context`, until its routing is told."""
        base = self._costs.block("attention", context, tokens)
        return Cost(base.host_ns, max(1, base.gpu_ns + self.extra_ns(executes)), base.source)

    def foresee(self, tokens: int, depth: int) -> Cost:
        """Looking `depth` layers ahead: on the device behind the routing, then on the host."""
        if not depth:
            return Cost(0, 0, "measured")
        found = self._costs.predict(self._settings, depth)
        planned = self._costs.cost("predict", depth)  # the host does not tell predictors apart
        both = Cost(planned.host_ns, max(0, found.gpu_ns), worst(planned.source, found.source))
        return self._costs.beyond(both, "predict", tokens)

    def head(self, tokens: int) -> Cost:
        """The end of a step; the host's part follows its last layer."""
        return self._costs.block("head", tokens=tokens)

    def late(self, tokens: int, layer: int) -> Cost:
        """An expert of a MoE layer behind its copy; `tokens` as for `CostModel.experts_gpu`."""
        one = self._costs.at(layer).experts_gpu(1, tokens)
        return Cost(self.host.late_ns, one.gpu_ns, one.source)

    def whole_ns(self, context: int, tokens: int, experts: int) -> int:
        """A step of one launch whose layers have so many distinct experts together."""
        costs, shape = self._costs, self._costs.shape
        whole_ns, others = costs.block("whole", context, tokens).gpu_ns, experts - shape.n_moe_layers * shape.top_k
        if tokens > 1 and costs.measured("window_whole_expert"):
            whole_ns += max(0, others) * costs.cost("window_whole_expert", tokens).gpu_ns
        return whole_ns + self._repacked_ns + self._replayed_ns

    @cached_property
    def _repacked_ns(self) -> int:
        return sum(self._costs.at(layer).repacked_ns for layer in range(self._costs.shape.n_moe_layers))

    @cached_property
    def _replayed_ns(self) -> int:
        layers = self._costs.shape.n_moe_layers
        return layers * self._costs.cost("replayed").gpu_ns if self._costs.replayed else 0


@dataclass(frozen=True)
class DeviceTimes:
    """How a device that is launched upon follows its host and the link."""

    latency_ns: int = 0  # from a launch to its start
    copy_start_ns: int = 0  # what a copy takes longer if none is before it
    gpu_rate: int = SCALE  # of SCALE, while copies run
    asleep_ns: int = 0  # what CPU experts take longer
    rest_ns: int = 0  # after so long a rest
    host_wake_ns: int = 0  # from an issue to the host going on
    bring_ns: int = 0  # host: before launching experts behind copies, telling the device of those that are issued
    driven: bool = False  # the decoding thread issues copies itself
    read_ahead: tuple[tuple[int, int], ...] = ()  # as `CostModel.read_ahead`

    @classmethod
    def of(cls, costs: CostModel, settings: Settings) -> DeviceTimes:
        """Nothing of it without graphs, where the profile's blocks include it."""
        read = costs.read_ahead(settings)
        if not costs.graphs:
            return cls(host_wake_ns=costs.cost("wait").host_ns)
        on_cpu, threads = settings.miss_action != "fetch", settings.cpu_threads
        behind = on_cpu and costs.measured("gpu_behind_cpu")
        probe, by = ("gpu_behind_cpu", threads) if behind else ("gpu_beside_copy", 0)
        alone, beside = (costs.cost(probe, 0, by, copies=n).gpu_ns for n in (0, 1))
        rate = SCALE if beside <= alone else max(1, SCALE * alone // beside)
        asleep, rest = 0, 0
        if on_cpu and costs.measured("cpu_asleep"):
            asleep = costs.cost("cpu_asleep", 0, threads).host_ns
            rest = 1000 * costs.profile.points("cpu_asleep", threads=threads)[0].at["idle_us"]
        launch, start = costs.cost("launch").host_ns, costs.cost("copy_start").host_ns
        bring = costs.cost("bring").host_ns if costs.measured("bring") else 0
        return cls(launch, start, rate, asleep, rest, bring_ns=bring, driven=True, read_ahead=read)
