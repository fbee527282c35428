"""What the brain weighs on the profiled machine: `SplitCosts` of a `CostModel`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foreload.backend.policy import SplitCosts
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, step_experts
from foreload.shape import ModelShape
from foreload.simulator.costs import SCALE, CostModel


def split_costs(profile: HardwareProfile | CostModel, shape: ModelShape, settings: Settings) -> SplitCosts:
    """What the brain decides by (design: section 5): contended costs of one layer-step, and how long the link is idle.

    Copies and CPU experts beside each other, resident experts beside the CPU experts that are left; without CPU experts
    all of them alone. Of layers in different formats their mean: one set decides for all. Raises MismatchError if
    `settings.cpu_threads` was not measured.
    """
    costs = (profile if isinstance(profile, CostModel) else CostModel(profile, shape)).for_settings(settings)
    models, of_layer = costs.kinds()
    found = [_split_costs(model, settings) for model in models]
    return found[0] if len(found) == 1 else _mean([found[kind] for kind in of_layer])


def _mean(costs: Sequence[SplitCosts]) -> SplitCosts:
    """Of each field, rounded down."""
    return SplitCosts(*(sum(values) // len(costs) for values in zip(*costs, strict=True)))


def _split_costs(costs: CostModel, settings: Settings) -> SplitCosts:
    """The same where all layers are in one format."""
    shape = costs.shape
    k, threads = shape.top_k, settings.cpu_threads
    most, gamma = step_experts(settings, shape), settings.draft.gamma
    window = [n if gamma else 0 for n in range(most + 1)]  # tokens: one each
    counts = range(1, most + 1)
    io, gpu, cpu, token = costs.copy_ns, [costs.experts_gpu_ns(n, window[n]) for n in counts], [0] * most, 0
    if settings.miss_action != "fetch":
        io = io * SCALE // costs.copy_rate(threads)
        gpu = [ns * SCALE // costs.both_rate(n, max(1, k - n), threads) for n, ns in enumerate(gpu, 1)]
        cpu = [costs.experts_cpu_ns(n, threads, window[n]) * SCALE // costs.cpu_rate(n, threads) for n in counts]
    if settings.miss_action != "fetch" and gamma:
        more = costs.experts_cpu_ns(1, threads, 2) - costs.experts_cpu_ns(1, threads, 1)
        token = max(0, more) * SCALE // costs.cpu_rate(1, threads)
    dense = costs.between_ns(costs.middle_context, gamma + 1)
    if gamma:
        drafting = costs.draft(settings, gamma)
        dense += max(drafting.host_ns, drafting.gpu_ns) // shape.n_moe_layers
    return SplitCosts(
        io_ns=io,
        gpu_ns=np.array([0, *gpu], np.int64),
        cpu_ns=np.array([0, *cpu], np.int64),
        cpu_token_ns=token,
        dense_ns=dense,
        layer_ns=dense + costs.experts_gpu_ns(k, window[k]),
    )
