"""Hit rates at every slot count of 2,000 tokens x 48 layers x 8 of 128, and the statistics of `trace analyze`.

A pass gives all 129 slot counts; the replay, which asks the brain, gives one (32 slots per layer).
"""

from __future__ import annotations

from benchmarks.inputs import SHAPE, trace
from benchmarks.timing import Rate, group, measure
from foreload.settings import Settings
from foreload.simulator.curves import POLICIES, curve_steps, curves
from foreload.simulator.replay import replay
from foreload.simulator.workload import load_requests
from foreload.traces.statistics import Gatherer

TOKENS = 2000
SLOTS = (32,) * SHAPE.n_moe_layers


def run() -> list[Rate]:
    """Tokens per second, Belady first; 2,000 a second or more are the 2,000 tokens in under a second."""
    made = trace(TOKENS)
    steps = curve_steps([made], made.meta)
    rates = []
    for policy in POLICIES:

        def passed(policy: str = policy) -> object:
            return curves(steps, (policy,))

        rates.append(measure(f"{policy}, every slot count", passed, TOKENS, "tokens", 3))
    requests = load_requests(made, SHAPE)
    for eviction in ("lru", "lfru"):
        settings = Settings(slots_per_layer=SLOTS, eviction=eviction)

        def replayed(settings: Settings = settings) -> object:
            return replay(requests, SHAPE, settings, SLOTS)

        rates.append(measure(f"{eviction} replayed, 32 slots", replayed, TOKENS, "tokens", 3))

    def gathered() -> object:
        gatherer = Gatherer(made.meta, made.rows)
        gatherer.add(made)
        return gatherer.statistics()

    rates.append(measure("statistics", gathered, TOKENS, "tokens", 3))
    return group(rates)
