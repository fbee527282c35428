"""What a tune would simulate, and about how long it would take, from a few steps of everything it does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foreload.simulator.tables import GRID_POINTS
from foreload.simulator.tune import Tuning
from foreload.simulator.tuner.jobs import ROUGH_POINTS, PlanJob, SimJob, perform, sharing
from foreload.simulator.tuner.moves import neighbours
from foreload.simulator.tuner.search import EXPANDED, MIXED_KINDS, PLANNED_WHOLE, PLANS_EACH, ROUNDS, SHORT_LIST

SAMPLE = 24
"""Decode steps of each request that are tried."""


@dataclass(frozen=True)
class Forecast:
    """Counts are the most there may be; `seconds` of one processor."""

    candidates: tuple[str, ...]  # those that always compete
    options: int
    replays: int
    plan_steps: int
    simulations: int
    select_steps: int
    seconds: float
    jobs: int = 1

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "candidates": list(self.candidates),
            "options": self.options,
            "replays": self.replays,
            "plan_steps": self.plan_steps,
            "simulations": self.simulations,
            "select_steps": self.select_steps,
            "processor_seconds": self.seconds,
            "jobs": self.jobs,
        }


def forecast(tuning: Tuning) -> Forecast:
    """Of a tune that is set up. What search will change is taken to be as much as of the default in every round."""
    search, space, context = tuning.search(), tuning.space, tuning.pool.context
    fixed = [*space.fixed(), *space.presets()]
    options = search.options()
    asks = [(option, space.budget(option)) for option in options]
    rough = sharing(asks, space.shape, search.rough_plan())
    fit, select, _ = tuning.parts
    default = fixed[0].settings
    sample_plan = PlanJob(((options[0], space.budget(options[0])),), fit, SAMPLE)
    plan_s = _seconds(lambda: perform(context, sample_plan))
    simulate_s = _seconds(lambda: perform(context, SimJob(default, select, SAMPLE)))
    plan_steps, whole_steps = search.steps_of(fit, search.plan_steps), search.steps_of(fit, search.whole_steps)
    sampled_fit, sampled_select = search.steps_of(fit, SAMPLE), search.steps_of(select, SAMPLE)
    part, whole = search.steps_of(select, search.screen_steps), search.steps_of(select, None)
    changes = ROUNDS * EXPANDED * sum(1 for _ in neighbours(space, default))
    first, again = len(fixed) + SHORT_LIST, 2 * PLANNED_WHOLE
    wholes = first + again * PLANS_EACH + changes if search.screen_steps is None else first // 2 + 3 * ROUNDS
    parts = 0 if search.screen_steps is None else first + again * PLANS_EACH + changes
    replay_s = plan_s / GRID_POINTS / sampled_fit
    grids = again + MIXED_KINDS * sum(1 for _ in space.mixes())
    seconds = replay_s * plan_steps * ROUGH_POINTS * len(rough) + replay_s * whole_steps * GRID_POINTS * grids
    seconds += again * PLANS_EACH * plan_s + simulate_s / sampled_select * (part * parts + whole * wholes)
    return Forecast(
        candidates=tuple(candidate.name for candidate in fixed),
        options=len(options),
        replays=ROUGH_POINTS * len(rough) + GRID_POINTS * grids,
        plan_steps=plan_steps,
        simulations=parts + wholes,
        select_steps=whole,
        seconds=seconds,
    )


def _seconds(work: Callable[[], object]) -> float:
    """Processor seconds of a second run: the first one may compile."""
    work()
    begun = time.process_time()
    work()
    return time.process_time() - begun
