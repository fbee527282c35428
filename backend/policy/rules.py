"""`Rules`: settings as the compiled functions take them, numbers in one named tuple."""

from __future__ import annotations

from typing import NamedTuple

from foreload.settings import Settings, step_experts
from foreload.shape import ModelShape

POOL_LAYER, POOL_SHARED = 0, 1
ADMIT_NONE, ADMIT_DEMAND, ADMIT_BACKGROUND = 0, 1, 2
FETCH, CPU, SPLIT_MAKESPAN, SPLIT_BANDWIDTH, SPLIT_TAU, SPLIT_PER_EXPERT = 0, 1, 2, 3, 4, 5
"""Miss rules: `miss_action`, with `split` told apart by `split_rule`."""
MAKESPAN, BALANCE = 0, 1
NO_AHEAD, PREVIOUS_STEP, BY_UTILITY = 0, 1, 2
"""Predictors of a layer's next step."""
DELTA, LEVEL = 0, 1
ADAPT_OFF, ADAPT_REAL, ADAPT_FLOORED = 0, 1, 2
TAU_AUTO = 0

EVICTIONS = ("lru", "lfu", "lfru", "aged", "static", "utility", "random", "belady")
"""Order names; the index is what compiled functions take. `belady` is the simulator's alone: see `policy.order`."""
LRU, LFU, LFRU, AGED, STATIC, UTILITY, RANDOM, BELADY = 0, 1, 2, 3, 4, 5, 6, 7

_ADMISSIONS = {"none": ADMIT_NONE, "demand": ADMIT_DEMAND, "background": ADMIT_BACKGROUND}
_SPLITS = {
    "makespan": SPLIT_MAKESPAN,
    "bandwidth": SPLIT_BANDWIDTH,
    "tau": SPLIT_TAU,
    "per_expert": SPLIT_PER_EXPERT,
}
_AHEAD = {"previous_step": PREVIOUS_STEP, "utility": BY_UTILITY}
_ADAPT = {"off": ADAPT_OFF, "real": ADAPT_REAL, "floored": ADAPT_FLOORED}


class Rules(NamedTuple):
    """What is decided by, whatever has happened."""

    eviction: int
    half_life: int
    pool: int
    miss: int
    objective: int
    admission: int
    admit_per_step: int
    shares_link: bool  # whether other copies follow uploads
    reserve: int  # staging slots that prefetches leave to the next layer-step's demand
    ahead: int
    ahead_width: int  # most copies for a layer's next step
    utility: int  # 1: something decides by utility, so it is kept up to date
    levels: int  # K
    signal: int
    adapt: int
    rate: float  # lambda
    tau: int  # TAU_AUTO or 1..K+1
    cpu_reads: int  # 1: the CPU reads the last predicted expert of the next layer ahead, and the link does not copy it
    reset_done: int  # 1: eviction takes the utility of layers already done in this step as 0


def rules_of(settings: Settings, shape: ModelShape, oracle: bool = False) -> Rules:
    """The rules of `settings`; `oracle` replaces the eviction order by one that knows the future (simulator)."""
    utility = settings.utility
    return Rules(
        eviction=BELADY if oracle else EVICTIONS.index(settings.eviction),
        half_life=settings.half_life,
        pool=POOL_SHARED if settings.pool == "shared" else POOL_LAYER,
        miss=miss_rule(settings),
        objective=BALANCE if settings.objective == "balance" else MAKESPAN,
        admission=_ADMISSIONS[settings.admission],
        admit_per_step=settings.admit_per_step,
        shares_link=settings.miss_action != "cpu" or settings.prefetch_depth > 0,
        reserve=step_experts(settings, shape),
        ahead=_AHEAD.get(settings.predictor, NO_AHEAD),
        ahead_width=min(shape.experts, (settings.draft.gamma + 1) * settings.width(shape)),
        utility=int(settings.uses_utility),
        levels=utility.k,
        signal=LEVEL if utility.signal == "level" else DELTA,
        adapt=_ADAPT[utility.adapt],
        rate=utility.rate,
        tau=TAU_AUTO if utility.tau == "auto" else utility.tau,
        cpu_reads=int(settings.cpu_read_ahead),
        reset_done=int(utility.reset_done),
    )


def miss_rule(settings: Settings) -> int:
    """The number for `miss_action` and `split_rule`."""
    if settings.miss_action == "split":
        return _SPLITS[settings.split_rule]
    return FETCH if settings.miss_action == "fetch" else CPU
