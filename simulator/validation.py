"""Predicted beside measured: signed errors by metric and regime, rank agreement, what choosing by prediction costs.

Settings whose own repetitions spread too far say more about the machine than about the simulator: they are named
apart, and no figure but `all_settings` has them in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from foreload.backend.policy import Counter
from foreload.backend.policy.state import DECODE
from foreload.errors import UsageError
from foreload.settings import Settings
from foreload.simulator.clock import WAIT_CPU, WAIT_ISSUE, WAIT_LINK
from foreload.simulator.result import SimResult

SPREAD_PCT = 5.0
"""Settings whose repetitions spread further are named apart."""
TELLING = 0.02
"""Pairs whose measured medians differ by less have no order to agree on."""
METRICS = {
    "tpot_pct": "time per token, %",
    "ttft_pct": "time to first token, %",
    "bytes_pct": "bytes copied, %",
    "hits_and_late_points": "hits and late hits, points",
    "late_points": "late hits, points",
}
"""What errors are of, and in which unit."""
LINK, CPU, GPU, MIXED = "link", "cpu", "gpu", "mixed"


@dataclass(frozen=True)
class Figures:
    """What one setting does, predicted or measured, over the same tokens."""

    tpot_ns: float
    hit_rate: float  # experts resident when demanded, of all demanded in decode
    late_rate: float  # experts whose prefetch was queued or in flight
    bytes_per_token: float  # that the link carried
    ttft_ns: float | None = None  # mean over requests; None without prompts
    time_ns: Mapping[str, int] = field(default_factory=dict)  # decode time by kind, where it is known

    @classmethod
    def of(cls, result: SimResult) -> Figures:
        """The figures of a simulated run."""
        hits, late, _ = rates(result.counters[DECODE])
        ttft = float(result.ttft_ns.mean()) if result.ttft_ns.any() else None
        carried = result.bytes_per_token()
        return cls(result.tpot_ns, hits, late, carried, ttft, dict(result.time_ns))

    @property
    def regime(self) -> str:
        """What most of the time goes to: waiting for the link, for CPU experts, or the device and its host thread."""
        return regime(self.time_ns)


def regime(time_ns: Mapping[str, int]) -> str:
    """LINK, CPU or GPU if more than half of the decode time is theirs, else MIXED; MIXED where time is not known."""
    total = sum(time_ns.values())
    link = time_ns.get(WAIT_LINK, 0) + time_ns.get(WAIT_ISSUE, 0)
    cpu = time_ns.get(WAIT_CPU, 0)
    shares = {LINK: link, CPU: cpu, GPU: total - link - cpu}
    most = max(shares, key=lambda name: shares[name])
    return most if 2 * shares[most] > total else MIXED


def rates(counters: NDArray[np.int64]) -> tuple[float, float, int]:
    """Hits and late hits as shares of the demand, and experts that the link carried; counters [layers, Counter]."""
    counted = counters.sum(axis=0)
    hits, late, misses = (int(counted[c]) for c in (Counter.HITS, Counter.LATE, Counter.MISSES))
    moved = int(counted[[Counter.FETCHED, Counter.PREFETCHED, Counter.UPLOADED]].sum())
    demanded = max(1, hits + late + misses)
    return hits / demanded, late / demanded, moved


@dataclass(frozen=True)
class Comparison:
    """One setting: what was predicted, the time per token of each repetition, and the other figures as measured."""

    settings: Settings
    predicted: Figures
    measured_tpot_ns: Sequence[float]
    measured: Figures | None = None


@dataclass(frozen=True)
class ErrorFigures:
    """Over `settings` errors: the signed mean, percentiles of absolute ones, and the worst with its sign."""

    settings: int
    mean: float
    p50: float
    p90: float
    p99: float
    worst: float

    @classmethod
    def of(cls, errors: NDArray[np.float64]) -> ErrorFigures | None:
        """Of the errors that are known; None if none is."""
        known = errors[~np.isnan(errors)]
        if not len(known):
            return None
        size = np.abs(known)
        p50, p90, p99 = (float(np.percentile(size, at)) for at in (50, 90, 99))
        return cls(len(known), float(known.mean()), p50, p90, p99, float(known[int(np.argmax(size))]))


@dataclass(frozen=True)
class Calibrated:
    """Errors left when all predictions are scaled so that one setting's is exact. No prediction: it was measured."""

    by: str
    factor: float
    others: ErrorFigures | None


@dataclass(frozen=True)
class ValidationSummary:
    """Over the settings compared. Errors of times and bytes are (predicted - measured) / measured in per cent."""

    settings: int
    apart: tuple[str, ...]  # settings whose repetitions spread further than SPREAD_PCT; not in the figures below
    mean_error_pct: float  # of the time per token, signed
    p50_error_pct: float  # of absolute errors
    p90_error_pct: float
    p99_error_pct: float
    worst_error_pct: float
    rank_agreement: float | None  # Kendall's tau over pairs measured TELLING apart; None without such pairs
    ranked_pairs: int
    pick: str  # the setting predicted best
    regret_pct: float  # how much slower that is than the one measured best
    errors: Mapping[str, Mapping[str, ErrorFigures]]  # by metric, then "all" or a regime
    all_settings: ErrorFigures | None  # of the time per token, those apart included
    calibrated: Calibrated | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


_COLUMNS = {
    "settings": "str", "regime": "str", "predicted_tpot_ms": "float64", "measured_tpot_ms": "float64",
    "measured_spread_pct": "float64", "error_pct": "float64", "predicted_hit_rate": "float64",
    "measured_hit_rate": "float64", "predicted_late_rate": "float64", "measured_late_rate": "float64",
    "predicted_bytes_per_token": "float64", "measured_bytes_per_token": "float64", "predicted_ttft_ms": "float64",
    "measured_ttft_ms": "float64",
}  # fmt: skip


def compare(comparisons: Sequence[Comparison]) -> pd.DataFrame:
    """One row per setting.

    Columns: settings (text), regime (as predicted), times in ms (measured: median of the repetitions, spread: max - min
    of them, of the median), error_pct (signed), shares of the demand, bytes; NaN where nothing was measured.
    Raises UsageError for a setting without a measured time.
    """
    return pd.DataFrame([_row(comparison) for comparison in comparisons], columns=list(_COLUMNS)).astype(_COLUMNS)


def _row(comparison: Comparison) -> dict[str, Any]:
    shown, times = comparison.settings.describe(), list(comparison.measured_tpot_ns)
    if not times or min(times) <= 0:
        raise UsageError(f"validation: no measured time above 0 for {shown}")
    middle, predicted, measured = median(times), comparison.predicted, comparison.measured
    row = {
        "settings": shown,
        "regime": predicted.regime,
        "predicted_tpot_ms": predicted.tpot_ns / 1e6,
        "measured_tpot_ms": middle / 1e6,
        "measured_spread_pct": 100 * (max(times) - min(times)) / middle,
        "error_pct": 100 * (predicted.tpot_ns - middle) / middle,
    }
    for side, found in (("predicted", predicted), ("measured", measured)):
        row[f"{side}_hit_rate"] = np.nan if found is None else found.hit_rate
        row[f"{side}_late_rate"] = np.nan if found is None else found.late_rate
        row[f"{side}_bytes_per_token"] = np.nan if found is None else found.bytes_per_token
        row[f"{side}_ttft_ms"] = np.nan if found is None or found.ttft_ns is None else found.ttft_ns / 1e6
    return row


def _errors(table: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Errors by metric: per cent of times and bytes, points of rates."""

    def of(name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return table[f"predicted_{name}"].to_numpy(), table[f"measured_{name}"].to_numpy()

    def relative(name: str) -> NDArray[np.float64]:
        predicted, measured = of(name)
        found: NDArray[np.float64] = 100 * (predicted - measured) / np.where(measured > 0, measured, np.nan)
        return found

    hits, late = (np.subtract(*of(name)) for name in ("hit_rate", "late_rate"))
    values = (
        table["error_pct"].to_numpy(),
        relative("ttft_ms"),
        relative("bytes_per_token"),
        100 * (hits + late),
        100 * late,
    )
    return dict(zip(METRICS, values, strict=True))


def _by_regime(table: pd.DataFrame) -> dict[str, dict[str, ErrorFigures]]:
    regimes, found = table["regime"].to_numpy(), dict[str, dict[str, ErrorFigures]]()
    for metric, errors in _errors(table).items():
        parts = {"all": ErrorFigures.of(errors)}
        parts |= {name: ErrorFigures.of(errors[regimes == name]) for name in (LINK, CPU, GPU, MIXED)}
        known = {name: figures for name, figures in parts.items() if figures is not None}
        if known:
            found[metric] = known
    return found


def rank_agreement(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float | None, int]:
    """Kendall's tau over the pairs whose measured values differ by more than TELLING, and how many pairs these are."""
    pairs = agreed = 0
    for a, b in combinations(range(len(measured)), 2):
        low, high = sorted((measured[a], measured[b]))
        if high > low * (1 + TELLING):
            pairs += 1
            agreed += int(np.sign(predicted[a] - predicted[b]) * np.sign(measured[a] - measured[b]))
    return (agreed / pairs if pairs else None), pairs


def calibrated(table: pd.DataFrame, at: int = 0) -> Calibrated:
    """What is left of the errors when row `at` is taken to be known."""
    predicted, measured = table["predicted_tpot_ms"].to_numpy(), table["measured_tpot_ms"].to_numpy()
    factor = float(measured[at] / predicted[at])
    errors = np.delete(100 * (factor * predicted - measured) / measured, at)
    return Calibrated(str(table["settings"].iloc[at]), factor, ErrorFigures.of(errors))


def summarise(table: pd.DataFrame, one_point: bool = False) -> ValidationSummary:
    """Figures over the rows of `compare`; `one_point`: also those of `calibrated` by the first row.

    Where all rows spread too far, none is left out. UsageError without rows.
    """
    if table.empty:
        raise UsageError("validation: nothing was compared")
    noisy = (table["measured_spread_pct"] > SPREAD_PCT).to_numpy()
    steady = table[~noisy] if not noisy.all() else table
    predicted, measured = steady["predicted_tpot_ms"].to_numpy(), steady["measured_tpot_ms"].to_numpy()
    errors, chosen = _by_regime(steady), int(np.argmin(predicted))
    tpot = errors["tpot_pct"]["all"]
    agreement, pairs = rank_agreement(predicted.tolist(), measured.tolist())
    return ValidationSummary(
        settings=len(table),
        apart=tuple(table["settings"][noisy]) if not noisy.all() else (),
        mean_error_pct=tpot.mean,
        p50_error_pct=tpot.p50,
        p90_error_pct=tpot.p90,
        p99_error_pct=tpot.p99,
        worst_error_pct=tpot.worst,
        rank_agreement=agreement,
        ranked_pairs=pairs,
        pick=str(steady["settings"].iloc[chosen]),
        regret_pct=float(100 * (measured[chosen] / measured.min() - 1)),
        errors=errors,
        all_settings=ErrorFigures.of(table["error_pct"].to_numpy()),
        calibrated=calibrated(steady) if one_point else None,
    )
