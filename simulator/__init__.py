"""Simulator: cost model, engine model, replay, bounds, integer program, tuner and validation.

Names are loaded on first use, so that importing the package costs nothing. The functions `bounds`, `replay` and `tune`
are in the modules of those names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foreload.simulator.bounds import Bounds, belady_loads
    from foreload.simulator.candidates import Candidate
    from foreload.simulator.contended import split_costs
    from foreload.simulator.costs import CostModel
    from foreload.simulator.engine_model import simulate
    from foreload.simulator.result import SimResult
    from foreload.simulator.solver import Outcome, Problem, Solution, solve
    from foreload.simulator.timeline import TimelineEvent
    from foreload.simulator.tune import TuneResult
    from foreload.simulator.validation import Comparison, ValidationSummary, compare, summarise
    from foreload.simulator.workload import load_requests

_HOME = {
    "Bounds": "bounds",
    "Candidate": "candidates",
    "Comparison": "validation",
    "CostModel": "costs",
    "Outcome": "solver",
    "Problem": "solver",
    "SimResult": "result",
    "Solution": "solver",
    "TimelineEvent": "timeline",
    "TuneResult": "tune",
    "ValidationSummary": "validation",
    "belady_loads": "bounds",
    "compare": "validation",
    "load_requests": "workload",
    "simulate": "engine_model",
    "solve": "solver",
    "split_costs": "contended",
    "summarise": "validation",
}

__all__ = [
    "Bounds",
    "Candidate",
    "Comparison",
    "CostModel",
    "Outcome",
    "Problem",
    "SimResult",
    "Solution",
    "TimelineEvent",
    "TuneResult",
    "ValidationSummary",
    "belady_loads",
    "compare",
    "load_requests",
    "simulate",
    "solve",
    "split_costs",
    "summarise",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
