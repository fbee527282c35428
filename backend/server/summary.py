"""Counts and times of a running engine as `/engine/stats` shows them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from foreload.backend.engine import Engine
from foreload.backend.policy import Counter
from foreload.backend.policy.copied import copied_bytes
from foreload.backend.policy.state import DECODE, KEPT
from foreload.backend.server.context import Context
from foreload.backend.server.statistics import STALLS, Snapshot
from foreload.backend.server.views import (
    Drafts,
    Experts,
    LayerView,
    RecordingView,
    Requests,
    StatsView,
    Times,
    Waiter,
)


def stats(context: Context) -> StatsView:
    """Everything, now."""
    engine, seen = context.engine, context.statistics
    waiting, running, delivering = context.desk.counts()
    first, now = seen.recent()
    state = context.recording.state
    return StatsView(
        source="measured",
        model=context.model,
        device=engine.options.device,
        dtype=engine.dtype_name,
        emulated_link_bytes_per_s=engine.link_bytes_per_s,
        settings=engine.settings.describe(),
        memory=engine.describe_memory(),
        uptime_s=time.monotonic() - seen.started,
        prompt_tokens=seen.prompt_tokens,
        generated_tokens=seen.generated_tokens,
        requests=Requests(
            waiting=waiting,
            running=running,
            delivering=delivering,
            finished=seen.finished,
            cancelled=seen.cancelled,
            failed=seen.failed,
            refused=seen.refused,
        ),
        queue=[Waiter(id=name, position=at, seconds=since) for name, at, since in context.desk.positions()],
        tpot=times(list(seen.gaps_ns)),
        ttft=times(list(seen.ttfts_ns)),
        recent=experts(first, now, engine.layer_bytes),
        total=experts(seen.start, now, engine.layer_bytes),
        drafts=Drafts(
            steps=seen.steps,
            drafted=seen.drafted,
            accepted=seen.accepted,
            acceptance=_rate(seen.accepted, seen.drafted),
            tokens_per_step=_rate(seen.steps + seen.accepted, seen.steps),
        ),
        layers=layers(engine),
        recording=None if state is None else RecordingView(file=state.file, requests=state.requests, rows=state.rows),
    )


def times(found_ns: Collection[int]) -> Times:
    """Mean and quantiles."""
    if not found_ns:
        return Times(mean_ms=None, p50_ms=None, p95_ms=None, count=0)
    values = np.asarray(found_ns) / 1e6
    p50, p95 = np.quantile(values, (0.5, 0.95)).tolist()
    return Times(mean_ms=float(values.mean()), p50_ms=p50, p95_ms=p95, count=len(values))


def experts(first: Snapshot, last: Snapshot, layer_bytes: Sequence[int]) -> Experts:
    """What happened between two snapshots."""
    tokens = last.tokens - first.tokens
    by_layer = last.counters - first.counters
    counts = by_layer.sum(axis=0)
    hits, late, misses = (int(counts[which]) for which in (Counter.HITS, Counter.LATE, Counter.MISSES))
    demanded, copied = hits + late + misses, copied_bytes(by_layer, layer_bytes)
    spent = {
        kind: (ns - first.times_ns.get(kind, 0)) / 1e6 / tokens for kind, ns in last.times_ns.items() if tokens > 0
    }
    return Experts(
        tokens=tokens,
        hits=hits,
        late=late,
        misses=misses,
        hit_rate=_rate(hits, demanded),
        late_rate=_rate(late, demanded),
        miss_rate=_rate(misses, demanded),
        on_cpu=int(counts[Counter.ON_CPU]),
        fetched=int(counts[Counter.FETCHED]),
        prefetched=int(counts[Counter.PREFETCHED]),
        wasted=int(counts[Counter.WASTED]),
        cancelled=int(counts[Counter.CANCELLED]),
        uploaded=int(counts[Counter.UPLOADED]),
        bytes_copied=copied,
        bytes_per_token=_rate(copied, tokens),
        stall_ms_per_token={cause: spent[kind] for kind, cause in STALLS.items() if kind in spent},
        time_ms_per_token=spent,
    )


def layers(engine: Engine) -> list[LayerView]:
    """Each MoE layer since the start."""
    counters = engine.brain.counters[DECODE]
    resident = (engine.brain.state.status == KEPT).sum(axis=1)
    found = []
    for at, number in enumerate(engine.shape.moe_layers):
        row = counters[at]
        hits, late, misses = (int(row[which]) for which in (Counter.HITS, Counter.LATE, Counter.MISSES))
        copied = copied_bytes(row[None], engine.layer_bytes[at : at + 1])
        found.append(
            LayerView(
                layer=number,
                slots=engine.capacity[at],
                resident=int(resident[at]),
                hits=hits,
                late=late,
                misses=misses,
                hit_rate=_rate(hits, hits + late + misses),
                on_cpu=int(row[Counter.ON_CPU]),
                bytes_copied=copied,
            )
        )
    return found


def _rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None
