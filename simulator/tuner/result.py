"""What a tune returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreload.settings import Settings
from foreload.simulator.bounds import Bounds
from foreload.simulator.candidates import Candidate
from foreload.simulator.tuner.jobs import Plan, Robust
from foreload.simulator.tuner.study import Study

PRESET = "preset "
"""How the names of candidates begin that are presets."""


@dataclass(frozen=True)
class TuneResult:
    """The outcome of a tune; every figure in it is simulated."""

    best: Candidate  # `default` itself if nothing beats it
    default: Candidate
    candidates: tuple[Candidate, ...]  # simulated on all requests that choose, best first
    bounds: Bounds  # on the requests that choose
    slots: int  # budget, staging included
    fit: tuple[int, ...]  # requests of the first recording that the programs saw
    select: tuple[int, ...]  # requests that chose
    held_out: tuple[int, ...]  # requests that did neither; empty in a short trace
    quality_loss_pct: float = 0.0  # of the best: rise in perplexity, measured or given; 0 where the text stays as it is
    plan: Plan | None = None  # the cheapest division of slots, with what is proven about it
    recordings: int = 1
    robust: Robust = "mean"
    study: Study | None = None  # what lies around the answer, if asked for
    loss_assumed: bool = False  # whether that adds up what layers in different formats lose
    losses: Mapping[Settings, float] | None = None  # of candidates that change the text
    passed_over: Mapping[str, float] | None = None  # family -> ms per token, of those simulated on a part alone

    @property
    def kept_default(self) -> bool:
        """Whether the advice is to change nothing."""
        return self.best is self.default

    @property
    def speedup(self) -> float:
        """Default over best, simulated; on held-out requests where there are any."""
        if self.default.report is not None and self.best.report is not None:
            return self.default.report.tpot_ns / self.best.report.tpot_ns
        return self.default.tpot_ns / self.best.tpot_ns

    @property
    def changes_text(self) -> bool:
        """Whether the best settings give other text than the default."""
        return self.best.settings in (self.losses or {})

    def families(self) -> tuple[Candidate, ...]:
        """The best candidate of each family, best first."""
        return tuple({c.family: c for c in reversed(self.candidates)}[name] for name in _names(self.candidates))

    def presets(self) -> tuple[Candidate, ...]:
        """The presets that competed, best first."""
        return tuple(c for c in self.candidates if c.name.startswith(PRESET))

    def quality_front(self) -> tuple[tuple[float, Candidate], ...]:
        """Loss in per cent and the fastest candidate that loses no more, where more loss is faster; by loss."""
        losses = self.losses or {}
        found: list[tuple[float, Candidate]] = []
        for candidate in sorted(self.candidates, key=lambda c: (losses.get(c.settings, 0.0), c.tpot_ns)):
            if not found or candidate.tpot_ns < found[-1][1].tpot_ns:
                found.append((losses.get(candidate.settings, 0.0), candidate))
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """JSON values, times in milliseconds."""
        return {
            "kept_default": self.kept_default,
            "speedup": self.speedup,
            "slots": self.slots,
            "requests": {"fit": self.fit, "select": self.select, "held_out": self.held_out},
            "recordings": self.recordings,
            "robust": self.robust,
            "default": _shown(self.default),
            "best": _shown(self.best),
            "families": [_shown(candidate) for candidate in self.families()],
            "presets": [_shown(candidate) for candidate in self.presets()],
            "simulated": [{"name": c.name, "tpot_ms": c.tpot_ns / 1e6} for c in self.candidates],
            "passed_over_ms": dict(self.passed_over or {}),
            "program": None if self.plan is None else plan_values(self.plan),
            "bounds": self.bounds.as_dict(),
            "study": None if self.study is None else self.study.as_dict(),
            "quality_loss_pct": self.quality_loss_pct,
            "quality_loss_source": "assumed" if self.loss_assumed else "measured or given",
            "quality_front": [
                {"loss_pct": loss, "name": c.name, "tpot_ms": c.tpot_ns / 1e6} for loss, c in self.quality_front()
            ],
        }


def plan_values(plan: Plan) -> dict[str, Any]:
    """A plan and what is proven about it as JSON values."""

    def finite(ns: float | None) -> float | None:
        return None if ns is None or not np.isfinite(ns) else ns / 1e6

    return {
        "settings": plan.settings.model_dump(mode="json", exclude_defaults=True),
        "planned_ms": plan.planned_ns / 1e6,
        "bound_ms": finite(plan.bound_ns),
        "relaxed_ms": finite(plan.relaxed_ns),
        "gap": plan.gap if np.isfinite(plan.gap) else None,
        "outcome": plan.outcome,
        "solver": plan.solver,
    }


def _names(candidates: Sequence[Candidate]) -> list[str]:
    return list(dict.fromkeys(candidate.family for candidate in candidates))


def _shown(candidate: Candidate) -> dict[str, Any]:
    result = candidate.report or candidate.result
    return {
        "name": candidate.name,
        "family": candidate.family,
        "settings": candidate.settings.model_dump(mode="json", exclude_defaults=True),
        "planned_ms": None if candidate.planned_ns is None else candidate.planned_ns / 1e6,
        "choosing_ms": [ns / 1e6 for ns in candidate.tpots_ns],
        "predicted": None if result is None else result.as_dict(),
    }
