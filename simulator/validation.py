"""Predicted beside measured: signed errors, rank agreement and what choosing by prediction costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import kendalltau

from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.simulator.result import SimResult


@dataclass(frozen=True)
class Comparison:
    """One setting: what was predicted, and the time per token of each repetition as measured."""

    settings: Settings
    predicted: SimResult
    measured_tpot_ns: Sequence[float]
    measured_hit_rate: float | None = None


@dataclass(frozen=True)
class ValidationSummary:
    """Over all settings compared. Errors are (predicted - measured) / measured in per cent."""

    settings: int
    mean_error_pct: float  # signed
    p50_error_pct: float  # of absolute errors
    p90_error_pct: float
    worst_error_pct: float
    rank_agreement: float | None  # Kendall's tau of predicted and measured order; None below two settings
    regret_pct: float  # how much slower the setting predicted best is than the one measured best

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def compare(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """One row per setting.

    Columns: settings (text), predicted_ms, measured_ms (median), spread_pct (max - min of the repetitions, of the
    median), error_pct (signed), predicted_hit_rate, measured_hit_rate, hit_rate_difference (NaN if not measured).
    Raises UsageError for a setting without a measurement.
    """
    rows = [_row(comparison) for comparison in comparisons]
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


_COLUMNS = {
    "settings": "str",
    "predicted_ms": "float64",
    "measured_ms": "float64",
    "spread_pct": "float64",
    "error_pct": "float64",
    "predicted_hit_rate": "float64",
    "measured_hit_rate": "float64",
    "hit_rate_difference": "float64",
}


def _row(comparison: Comparison) -> dict[str, Any]:
    shown, times = comparison.settings.describe(), list(comparison.measured_tpot_ns)
    if not times or min(times) <= 0:
        raise UsageError(f"validation: no measured time above 0 for {shown}")
    middle = median(times)
    hit_rate = np.nan if comparison.measured_hit_rate is None else comparison.measured_hit_rate
    return {
        "settings": shown,
        "predicted_ms": comparison.predicted.tpot_ns / 1e6,
        "measured_ms": middle / 1e6,
        "spread_pct": 100 * (max(times) - min(times)) / middle,
        "error_pct": 100 * (comparison.predicted.tpot_ns - middle) / middle,
        "predicted_hit_rate": comparison.predicted.hit_rate,
        "measured_hit_rate": hit_rate,
        "hit_rate_difference": comparison.predicted.hit_rate - hit_rate,
    }


def summarise(table: pd.DataFrame) -> ValidationSummary:
    """Figures over the rows of `compare`; UsageError without rows."""
    if table.empty:
        raise UsageError("validation: nothing was compared")
    error = table["error_pct"].to_numpy()
    size = np.abs(error)
    predicted, measured = table["predicted_ms"].to_numpy(), table["measured_ms"].to_numpy()
    agreement = None
    if len(table) > 1 and np.ptp(predicted) > 0 and np.ptp(measured) > 0:
        agreement = float(kendalltau(predicted, measured).statistic)
    chosen = measured[int(np.argmin(predicted))]
    return ValidationSummary(
        settings=len(table),
        mean_error_pct=float(error.mean()),
        p50_error_pct=float(np.percentile(size, 50)),
        p90_error_pct=float(np.percentile(size, 90)),
        worst_error_pct=float(error[int(np.argmax(size))]),
        rank_agreement=agreement,
        regret_pct=float(100 * (chosen / measured.min() - 1)),
    )
