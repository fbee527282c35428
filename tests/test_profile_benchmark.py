"""The profile benchmark on a played device: files, cases, its deadline."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "backend" / "cuda"))
sys.path.insert(0, str(Path(__file__).parent / "backend"))

from played import accelerate
from test_random_weights import toy

from benchmarks import profile_h200
from benchmarks.decode_rows import measure_rates
from foreload.backend.engine import Engine, EngineOptions
from foreload.profiler import probes
from foreload.profiler.run import bench_settings
from foreload.profiler.schema import HardwareProfile
from foreload.profiler.stats import averaged, summarise

EFFORT = replace(probes.QUICK, rounds=3, contexts=(1, 32), chunks=(1, 8), sizes=(1 << 14,), seconds=0.02, depth=1)
pytestmark = pytest.mark.filterwarnings("ignore:profile. a fixed block varied")


@pytest.mark.integration
def test_on_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "QUICK", EFFORT)
    monkeypatch.setattr("foreload.profiler.formats.SCRATCH_BYTES", 1 << 20)
    model = toy("qwen3-30b-a3b")
    with Engine(model, EngineOptions(context_tokens=64), bench_settings(model.shape)) as engine:
        device = accelerate(engine, 2, poison=False)
        found = profile_h200.on_engine(engine, {}, time.monotonic() + 20, tmp_path)
        rates = measure_rates(engine)
        late = profile_h200.on_engine(engine, {}, time.monotonic(), tmp_path / "late")
        engine.copies.close()
        device.close()
        engine.copies = type("Closed", (), {"close": lambda _: None})()
    assert min(rates.link, rates.cpu, rates.link_beside, rates.cpu_beside) > 0
    assert sorted(rates.cpu_ns) == list(range(1, model.shape.top_k + 1))
    assert found["left_out"] == []
    assert late["left_out"]
    measured = HardwareProfile.load(tmp_path / "profile-h200-qwen3-30b-a3b.json")
    assert measured.meta.path == "graphs"
    assert json.loads((tmp_path / "microcases-h200.json").read_text()) == found
    names = [one["name"] for one in found["microcases"]]
    assert {"one copy", "8 copies"} <= set(names)
    assert any("beside copies" in name for name in names)
    assert all(one["predicted_us"] >= 0 < one["measured_us"] for one in found["microcases"])


@pytest.mark.unit
def test_a_case_is_its_samples() -> None:
    samples = [10.0] * 53 + [8.0] * 3 + [12.0] * 3
    one = profile_h200.case("x", 11_000, summarise("x", samples), samples)
    assert (one.measured_us, one.samples) == (10.0, 59)
    mean = profile_h200.case("x", 11_000, averaged("x", [*samples, 20.0]), samples)
    assert mean.measured_us == pytest.approx(602 / 60, abs=1e-3)
    assert one.error_pct == pytest.approx(10.0)
    assert one.spread_pct == pytest.approx(40.0)
