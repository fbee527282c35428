"""The settings that `foreload validate` tries: over cache ratio, miss action, admission, eviction, depth and draft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from foreload.errors import ForeloadError
from foreload.settings import Settings, slot_counts, staging_slots
from foreload.simulator.costs import CostModel
from foreload.simulator.workload import load_requests, recorded_draft
from foreload.traces.schema import Trace

RATIOS = (0.0, 0.25, 0.5, 1.0)
DEPTHS = 2


def grid(trace: Trace, costs: CostModel, slots: int) -> list[Settings]:
    """What profile and recording can say something about and `slots` device slots, staging included, can hold."""
    found: list[Settings] = []
    for fields in _fields(trace, costs):
        one = Settings.parse(fields)
        fits = sum(slot_counts(one, costs.shape)) + staging_slots(one, costs.shape) <= slots
        if fits and one not in found and _held(trace, costs, one):
            found.append(one)
    return found


def _held(trace: Trace, costs: CostModel, settings: Settings) -> bool:
    try:
        load_requests(trace, costs.shape, settings, trace.requests()[:1])
    except ForeloadError:
        return False
    return settings.draft.kind == "none" or costs.has_windows(settings.draft.kind)


def _fields(trace: Trace, costs: CostModel) -> Iterator[dict[str, Any]]:
    windows = recorded_draft(trace)
    draft = {} if windows is None else {"draft": {"kind": windows[0], "gamma": windows[1]}}
    if trace.meta.sampling.get("draft_model"):
        draft["draft"]["model"] = trace.meta.sampling["draft_model"]
    threads = costs.cpu_threads[-1:]
    actions: list[dict[str, Any]] = [
        {"miss_action": name, "cpu_threads": n} for name in ("cpu", "split") for n in threads
    ]
    for ratio in RATIOS:
        base: dict[str, Any] = {"cache_ratio": ratio}
        yield base
        if draft:
            yield {**base, **draft}
        if ratio == 1:
            continue
        for depth in range(1, DEPTHS + 1):
            yield {**base, "predictor": "gate", "prefetch_depth": depth}
        for action in actions:
            yield {**base, **action}
            yield {**base, **action, "predictor": "gate", "prefetch_depth": 1}
            if draft:
                yield {**base, **action, **draft}
            if ratio:
                yield {**base, **action, "admission": "background"}
        if ratio:
            yield {**base, "eviction": "lfu"}
