"""What `/engine` answers, as models: the shapes are part of the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from foreload.backend.applied import Applied
from foreload.backend.engine import Engine
from foreload.settings import staging_slots


class SettingsView(BaseModel):
    """The settings in force and what they come to on this engine."""

    settings: dict[str, Any]
    slots_per_layer: list[int]
    staging_slots: int
    slot_limit: int  # slots, persistent and staging, that device memory holds under these settings
    expert_bytes: int
    device_bytes: int  # memory that the slots take

    @classmethod
    def of(cls, engine: Engine) -> SettingsView:
        """Of a running engine."""
        return cls(
            settings=engine.settings.model_dump(mode="json"),
            slots_per_layer=list(engine.capacity),
            staging_slots=staging_slots(engine.settings, engine.shape),
            slot_limit=engine.slot_limit,
            expert_bytes=engine.expert_bytes,
            device_bytes=engine.pool.allocated_bytes,
        )


class Change(BaseModel):
    """One field's old and new value."""

    before: Any
    after: Any


class Cost(BaseModel):
    """What a change of settings cost, measured."""

    waited_ms: float  # until the running token was done
    paused_ms: float  # in which no token was decoded
    slots_before: int  # persistent, all layers
    slots_after: int
    device_bytes_before: int
    device_bytes_after: int
    experts_kept: int
    experts_dropped: int
    experts_moved: int  # within device memory; over the link nothing is copied again


class AppliedView(BaseModel):
    """Settings are in force: which fields changed, and what that cost."""

    changed: dict[str, Change]
    cost: Cost
    now: SettingsView

    @classmethod
    def of(cls, applied: Applied, engine: Engine) -> AppliedView:
        """After `Engine.apply`."""
        return cls(
            changed={key: Change(before=old, after=new) for key, (old, new) in applied.changed.items()},
            cost=Cost(
                waited_ms=applied.waited_ns / 1e6,
                paused_ms=applied.paused_ns / 1e6,
                slots_before=applied.slots_before,
                slots_after=applied.slots_after,
                device_bytes_before=applied.pool_bytes_before,
                device_bytes_after=applied.pool_bytes_after,
                experts_kept=applied.experts_kept,
                experts_dropped=applied.experts_dropped,
                experts_moved=applied.experts_moved,
            ),
            now=SettingsView.of(engine),
        )


class Waiter(BaseModel):
    """A request that runs (position 0 of a busy engine) or waits."""

    id: str
    position: int  # requests that go first
    seconds: float  # since arrival


class Requests(BaseModel):
    """Requests since the start, and where those are that are not over."""

    waiting: int
    running: int
    delivering: int
    finished: int
    cancelled: int
    failed: int
    refused: int


class Times(BaseModel):
    """Milliseconds over the latest tokens or requests; null without any."""

    mean_ms: float | None
    p50_ms: float | None
    p95_ms: float | None
    count: int


class Experts(BaseModel):
    """Demanded experts and copies, counted in decode."""

    tokens: int
    hits: int
    late: int
    misses: int
    hit_rate: float | None
    late_rate: float | None
    miss_rate: float | None
    on_cpu: int
    fetched: int
    prefetched: int
    wasted: int
    cancelled: int
    uploaded: int
    bytes_copied: int
    bytes_per_token: float | None
    stall_ms_per_token: dict[str, float]  # by what the host waited for: copy, cpu; absent where it never does
    time_ms_per_token: dict[str, float]  # of the decoding thread, by what it did


class Drafts(BaseModel):
    """Speculative decoding in requests that are over."""

    steps: int
    drafted: int
    accepted: int
    acceptance: float | None
    tokens_per_step: float | None


class LayerView(BaseModel):
    """One MoE layer, counted in decode since the start."""

    layer: int
    slots: int
    resident: int
    hits: int
    late: int
    misses: int
    hit_rate: float | None
    on_cpu: int
    bytes_copied: int


class RecordingView(BaseModel):
    """A recording of live traffic."""

    file: str
    requests: int
    rows: int


class StatsView(BaseModel):
    """All figures are measured on the running engine."""

    source: str
    model: str
    device: str
    dtype: str
    emulated_link_bytes_per_s: int | None
    settings: str  # the fields that differ from the default
    memory: str
    uptime_s: float
    prompt_tokens: int
    generated_tokens: int
    requests: Requests
    queue: list[Waiter]
    tpot: Times  # time per token after the first of a request, over the latest
    ttft: Times  # from the beginning of the prompt's first chunk
    recent: Experts  # over the latest tokens
    total: Experts
    drafts: Drafts
    layers: list[LayerView]
    recording: RecordingView | None
