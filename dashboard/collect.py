"""From what was simulated and measured to `result.json` of a run folder."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from foreload.backend.policy import Counter
from foreload.dashboard.result import Breakdown, Candidate, ErrorPct, Outcome, RunMeta, RunResult
from foreload.machine import software
from foreload.profiler.schema import HardwareProfile
from foreload.simulator.candidates import Candidate as Tried
from foreload.simulator.clock import STALLS
from foreload.simulator.result import SimResult
from foreload.simulator.tune import TuneResult
from foreload.traces.schema import PREFILL, Trace

Side = Literal["default", "tuned"]
DECODE_PHASE = 0  # of SimResult.counters


@dataclass(frozen=True)
class Measured:
    """What the engine measured of one setting: time per output token, and its counters."""

    tpot_ms: float
    hit_rate: float
    bytes_per_token: float


def run_result(tuned: TuneResult, meta: RunMeta, measured: Mapping[Side, Measured] | None = None) -> RunResult:
    """`result.json` of a tune and, where the engine ran both settings on the same requests, of the measurement."""
    predicted: Mapping[Side, SimResult] = {
        "default": predicted_of(tuned.default),
        "tuned": predicted_of(tuned.best),
    }
    known: Mapping[Side, Measured] = measured or {}
    outcomes = {side: outcome(result, known.get(side)) for side, result in predicted.items()}
    return RunResult(
        default=outcomes["default"],
        tuned=outcomes["tuned"],
        speedup=speedup(outcomes["default"], outcomes["tuned"]),
        error_pct=ErrorPct(default=error_pct(outcomes["default"]), tuned=error_pct(outcomes["tuned"])),
        bounds=tuned.bounds.as_dict(),
        candidates=tuple(_candidate(tried, tried is tuned.best) for tried in _shown(tuned)),
        breakdown={side: breakdown(result) for side, result in predicted.items()},
        default_settings=tuned.default.settings.model_dump(mode="json", exclude_none=True),
        meta=meta,
    )


def predicted_of(candidate: Tried) -> SimResult:
    """The simulation to report for a candidate: on held-out requests where there are any."""
    result = candidate.report or candidate.result
    assert result is not None, "the tuner returns simulated candidates"
    return result


def outcome(result: SimResult, measured: Measured | None) -> Outcome:
    """Prediction and measurement of one setting; hit rate and bytes are the engine's where it ran."""
    return Outcome(
        predicted_tpot_ms=result.tpot_ns / 1e6,
        measured_tpot_ms=None if measured is None else measured.tpot_ms,
        hit_rate=result.hit_rate if measured is None else measured.hit_rate,
        bytes_per_token=result.bytes_per_token() if measured is None else measured.bytes_per_token,
    )


def speedup(default: Outcome, tuned: Outcome) -> float:
    """Default over tuned: measured if both were, else simulated; 1 where nothing was decoded."""
    if default.measured_tpot_ms is not None and tuned.measured_tpot_ms:
        return default.measured_tpot_ms / tuned.measured_tpot_ms
    return default.predicted_tpot_ms / tuned.predicted_tpot_ms if tuned.predicted_tpot_ms else 1.0


def error_pct(result: Outcome) -> float | None:
    """Signed error of the prediction in percent of the measurement."""
    if not result.measured_tpot_ms:
        return None
    return 100 * (result.predicted_tpot_ms - result.measured_tpot_ms) / result.measured_tpot_ms


def breakdown(result: SimResult) -> Breakdown:
    """Time per token by kind, stalls named, and the hit rate of each layer."""
    tokens = max(1, result.tokens)
    counts = result.counters[DECODE_PHASE]
    demanded = counts[:, [Counter.HITS, Counter.LATE, Counter.MISSES]].sum(axis=1)
    pairs = zip(counts[:, Counter.HITS].tolist(), demanded.tolist(), strict=True)
    rates = [hits / total if total else 0.0 for hits, total in pairs]
    times = {kind: ns / tokens / 1e6 for kind, ns in result.time_ns.items() if ns}
    stalls = tuple(kind for kind in STALLS if kind in times)
    return Breakdown(source="simulated", time_ms=times, stalls=stalls, hit_rate_per_layer=tuple(rates))


def _shown(tuned: TuneResult) -> Sequence[Tried]:
    """The best of each family, and default and best in any case."""
    shown = {id(tried): tried for tried in (*tuned.families(), tuned.default, tuned.best)}
    return list(shown.values())


def _candidate(tried: Tried, chosen: bool) -> Candidate:
    """With the figures that it was chosen or passed over by."""
    result = tried.result or predicted_of(tried)
    return Candidate(
        name=tried.name if tried.name != "program" else f"integer program: {tried.family}",
        predicted_tpot_ms=result.tpot_ns / 1e6,
        hit_rate=result.hit_rate,
        bytes_per_token=result.bytes_per_token(),
        settings=tried.settings.model_dump(mode="json", exclude_none=True),
        chosen=chosen,
    )


def run_meta(profile: HardwareProfile, trace: Trace, seed: int | None = None) -> RunMeta:
    """Provenance of a run on the profiled machine with this recording."""
    rate = profile.meta.emulated_link_bytes_per_s
    prompt, decoded = int((trace.phase == PREFILL).sum()), trace.decode_rows
    return RunMeta(
        model=trace.meta.model,
        shape_hash=trace.meta.shape_hash,
        device=profile.meta.device_name,
        machine=profile.meta.machine,
        link="real" if rate is None else f"emulated, {rate / 1e9:.3g} GB/s",
        context=f"{len(trace.requests())} requests, {prompt} prompt tokens and {decoded} decoded tokens recorded",
        seed=trace.meta.seed if seed is None else seed,
        date=datetime.date.today().isoformat(),
        software=software(),
    )
