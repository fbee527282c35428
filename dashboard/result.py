"""The folder of a run: what `demo` and `tune` leave there, and `report` shows.

result.json     RunResult (below): outcomes, bounds, candidates, provenance; the only file that must be there
settings.json   the tuned settings
profile.json    the machine, as `foreload profile` writes it
trace.parquet   the recording
timeline.json   the timeline for Perfetto, only linked
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foreload.errors import FileError
from foreload.files import parse_model, read_mapping
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings
from foreload.traces.io import TraceReader
from foreload.traces.schema import TraceMeta

Positive = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
_STRICT = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Outcome(BaseModel):
    """One setting: time per output token as predicted and, if it ran, as measured; hit rate; bytes copied per token."""

    model_config = _STRICT

    predicted_tpot_ms: Positive
    measured_tpot_ms: Positive | None = None
    hit_rate: Share
    bytes_per_token: Positive


class ErrorPct(BaseModel):
    """Signed prediction error, (predicted - measured) / measured in percent; None where nothing was measured."""

    model_config = _STRICT

    default: float | None = None
    tuned: float | None = None


class Breakdown(BaseModel):
    """Where a token's time goes, in ms by cause, and the hit rate of each MoE layer; `source` says how it is known."""

    model_config = _STRICT

    source: Literal["measured", "simulated"] = "simulated"
    time_ms: dict[str, Positive] = {}
    stalls: tuple[str, ...] = ()  # the keys of `time_ms` in which nothing is computed
    hit_rate_per_layer: tuple[Share, ...] = ()


class Candidate(BaseModel):
    """One setting the tuner has compared; all figures are simulated."""

    model_config = _STRICT

    name: str
    predicted_tpot_ms: Positive
    hit_rate: Share
    bytes_per_token: Positive
    settings: dict[str, Any] = {}
    chosen: bool = False


class RunMeta(BaseModel):
    """Provenance of the run."""

    model_config = _STRICT

    model: str
    shape_hash: str
    device: str
    machine: str
    link: str  # "PCIe, measured" or "emulated, 2.00 GB/s"
    phase: str = "decode"
    context: str  # tokens of prompt and generation
    seed: int
    date: str
    software: dict[str, str]


class RunResult(BaseModel):
    """`result.json`. `bounds` are those of `foreload.simulator.bounds`: `..._ms` are times per token."""

    model_config = _STRICT

    default: Outcome
    tuned: Outcome
    speedup: Positive
    error_pct: ErrorPct
    bounds: dict[str, Positive] = {}
    candidates: tuple[Candidate, ...] = ()
    breakdown: dict[Literal["default", "tuned"], Breakdown] = {}
    default_settings: dict[str, Any] = {}
    meta: RunMeta


@dataclass(frozen=True)
class Run:
    """A run folder in memory; what the folder does not hold is None."""

    folder: Path
    result: RunResult
    settings: Settings | None
    profile: HardwareProfile | None
    trace: TraceMeta | None
    trace_rows: int
    timeline: bool


def load_run(folder: Path) -> Run:
    """The run in `folder`; FileError names the file and field if one is missing, corrupt or of another schema."""
    folder = Path(folder)
    if not (folder / "result.json").is_file():
        raise FileError(f"{folder}: no run here: result.json is missing (foreload demo and tune --run write one)")
    result = parse_model(RunResult, read_mapping(folder / "result.json", "result"), str(folder / "result.json"))
    settings, profile = folder / "settings.json", folder / "profile.json"
    meta, rows = None, 0
    if (folder / "trace.parquet").exists():
        with TraceReader(folder / "trace.parquet") as reader:
            meta, rows = reader.meta, reader.rows
    return Run(
        folder=folder,
        result=result,
        settings=Settings.load(settings) if settings.exists() else None,
        profile=HardwareProfile.load(profile) if profile.exists() else None,
        trace=meta,
        trace_rows=rows,
        timeline=(folder / "timeline.json").exists(),
    )
