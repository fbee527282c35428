"""The 48 settings of the validation on full-size shapes, chosen before anything was measured.

Over cache ratio {0, .05, .17, .25, .5, 1}, eviction, prefetch depth {0, 1, 2}, miss action, admission and draft.
`tests/test_validate_benchmark.py` shows that no two of them do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.replayed import Trial
from foreload.settings import Settings

GAMMA = 4
D1: dict[str, Any] = {"predictor": "gate", "prefetch_depth": 1}
D2: dict[str, Any] = {"predictor": "gate", "prefetch_depth": 2}
CPU: dict[str, Any] = {"miss_action": "cpu"}
SPLIT: dict[str, Any] = {"miss_action": "split"}
LATER: dict[str, Any] = {"admission": "background"}
FIXED: dict[str, Any] = {"admission": "none"}
NGRAM: dict[str, Any] = {"draft": {"kind": "ngram", "gamma": GAMMA}}
HALF: dict[str, Any] = {"threads": "half"}
WARMED: dict[str, Any] = {"warmed": True}

CHOSEN: tuple[tuple[float, tuple[dict[str, Any], ...]], ...] = (
    (0.0, ({}, D1, D2, FIXED | CPU, FIXED | CPU | HALF, FIXED | SPLIT, SPLIT | D1, NGRAM, NGRAM | SPLIT, NGRAM | D1)),
    (
        0.05,
        (
            {}, {"eviction": "lfu"}, D1, D2, CPU | LATER, SPLIT, SPLIT | {"eviction": "aged"}, SPLIT | LATER | D1,
            NGRAM, NGRAM | SPLIT | LATER,
        ),
    ),
    (
        0.17,
        (
            {}, {"eviction": "lfru"}, D1, {"eviction": "static"} | WARMED, CPU | LATER, SPLIT | LATER,
            SPLIT | LATER | {"eviction": "lfu"}, SPLIT | LATER | D2, SPLIT | LATER | HALF, NGRAM, NGRAM | SPLIT | LATER,
        ),
    ),
    (
        0.25,
        (
            {}, {"eviction": "utility"} | NGRAM, FIXED | WARMED, D1, SPLIT | {"eviction": "lfru"},
            FIXED | CPU | WARMED, SPLIT | LATER, SPLIT | LATER | D1, NGRAM | D1,
        ),
    ),
    (0.5, ({}, {"eviction": "lfru"} | D1, CPU | LATER, SPLIT | LATER, FIXED | SPLIT | WARMED)),
    (1.0, (FIXED, {}, FIXED | NGRAM)),
)  # fmt: skip


def trials(threads: Sequence[int]) -> list[Trial]:
    """All of them, with CPU experts on the most of `threads` (those that were profiled), or on half as many."""
    most = max(threads)
    half = max((n for n in threads if n <= (most + 1) // 2), default=most)
    return [_trial(ratio, fields, most, half) for ratio, chosen in CHOSEN for fields in chosen]


def _trial(ratio: float, fields: dict[str, Any], most: int, half: int) -> Trial:
    values = {key: value for key, value in fields.items() if key not in ("threads", "warmed")}
    if "miss_action" in fields:
        values["cpu_threads"] = half if fields.get("threads") == "half" else most
    return Trial(Settings.parse({"cache_ratio": ratio, **values}), bool(fields.get("warmed")))
