"""Prediction of the experts of later layers (design: section 4): `PREDICTORS` lists the implementations by name."""

from __future__ import annotations

from foreload.backend.predict.base import Gates, Predictor
from foreload.backend.predict.calibration import Calibration
from foreload.backend.predict.estimator import Estimating
from foreload.backend.predict.gate import Gate
from foreload.backend.predict.hybrid import Hybrid
from foreload.backend.predict.quasi_hidden import QuasiHidden
from foreload.errors import SettingsError

PREDICTORS: dict[str, type[Predictor]] = {kind.name: kind for kind in (Gate, QuasiHidden, Estimating, Hybrid)}
CALIBRATED = tuple(name for name in PREDICTORS if name != Gate.name)
"""Predictors that need a calibration; rolled, `gate` needs one too."""


def needs_calibration(name: str, rolled: bool) -> bool:
    """Whether a predictor uses default vectors or the network."""
    return name in CALIBRATED or rolled


def refusal(name: str, rolled: bool) -> SettingsError:
    """What is said where a predictor lacks its calibration."""
    what = f"predictor {name!r}" + (" with prefetch_rolled" if rolled else "")
    return SettingsError(
        f"{what} needs a calibration of this model: make one (foreload calibrate) and give it (--calibration DIR)"
    )


def make_predictor(name: str, rolled: bool, gates: Gates, calibration: Calibration | None) -> Predictor:
    """The predictor of that name; SettingsError if it needs a calibration and there is none."""
    if needs_calibration(name, rolled) and calibration is None:
        raise refusal(name, rolled)
    return PREDICTORS[name](gates, calibration, rolled)


__all__ = ["CALIBRATED", "PREDICTORS", "Gates", "Predictor", "make_predictor", "needs_calibration", "refusal"]
