"""A made-up run folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from foreload.settings import Settings


def made_up_result() -> dict[str, Any]:
    """A result.json as the demo writes it."""
    return {
        "default": {"predicted_tpot_ms": 14.1, "measured_tpot_ms": 14.6, "hit_rate": 0.412, "bytes_per_token": 6.3e6},
        "tuned": {"predicted_tpot_ms": 7.72, "measured_tpot_ms": 7.55, "hit_rate": 0.655, "bytes_per_token": 2.1e6},
        "speedup": 1.93,
        "error_pct": {"default": -3.4, "tuned": 2.3},
        "bounds": {
            "loads_per_token": 4.25,
            "bytes_per_token": 1.9e6,
            "link_ms": 3.1,
            "compute_ms": 4.1,
            "floor_ms": 4.1,
            "resident_ms": 5.2,
        },
        "candidates": [
            {
                "name": "default",
                "predicted_tpot_ms": 14.1,
                "hit_rate": 0.412,
                "bytes_per_token": 6.3e6,
                "settings": {"cache_ratio": 0.25},
            },
            {
                "name": "integer program, depth 0",
                "predicted_tpot_ms": 7.72,
                "hit_rate": 0.655,
                "bytes_per_token": 2.1e6,
                "settings": {"slots_per_layer": [12, 4, 7], "miss_action": "split", "admission": "background"},
                "chosen": True,
            },
            {
                "name": "integer program, depth 1",
                "predicted_tpot_ms": 9.4,
                "hit_rate": 0.61,
                "bytes_per_token": 4.4e6,
                "settings": {"slots_per_layer": [11, 4, 7], "predictor": "gate", "prefetch_depth": 1},
            },
        ],
        "breakdown": {
            "default": {
                "time_ms": {"attention": 1.3, "route": 0.6, "experts_gpu": 1.6, "head": 0.3, "wait_link": 10.1},
                "stalls": ["wait_link"],
                "hit_rate_per_layer": [0.3, 0.45, 0.5],
            },
            "tuned": {
                "time_ms": {
                    "attention": 1.3,
                    "route": 0.6,
                    "experts_gpu": 1.6,
                    "head": 0.3,
                    "wait_link": 2.2,
                    "wait_cpu": 1.7,
                },
                "stalls": ["wait_link", "wait_cpu"],
                "hit_rate_per_layer": [0.82, 0.51, 0.64],
            },
        },
        "default_settings": {"cache_ratio": 0.25},
        "meta": {
            "model": "mini",
            "shape_hash": "316510da3bf2",
            "device": "cpu",
            "machine": "AMD EPYC 9B14, 2 cores, Linux x86_64",
            "link": "emulated, 2.00 GB/s",
            "context": "prompts of 128 tokens, 64 tokens generated",
            "seed": 0,
            "date": "2026-11-29",
            "software": {"python": "3.11.7", "foreload": "0.1.0", "torch": "2.13.0"},
        },
    }


@pytest.fixture
def run_folder(tmp_path: Path, make_profile: Any, make_trace: Any, write_trace: Any) -> Callable[..., Path]:
    """Write a run folder; `result` replaces fields of result.json."""

    def make(**result: Any) -> Path:
        folder = tmp_path / "demo"
        folder.mkdir()
        (folder / "result.json").write_text(json.dumps({**made_up_result(), **result}))
        make_profile().save(folder / "profile.json")
        Settings(slots_per_layer=(12, 4, 7), miss_action="split", admission="background").save(folder / "settings.json")
        write_trace(folder / "trace.parquet", make_trace(subjects=("prose", "code")))
        (folder / "timeline.json").write_text("{}")
        return folder

    return make
