"""Presets: what each says, where experts are placed, and what the command line makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreload.assets import ASSETS
from foreload.cli import main
from foreload.errors import MismatchError, SettingsError
from foreload.machine import machine_name
from foreload.presets import PRESETS, preset_settings
from foreload.profiler.schema import HardwareProfile
from foreload.settings import Settings, check_slots, staging_slots
from foreload.shape import ModelShape
from foreload.traces.histogram import warm_counts
from foreload.traces.schema import PredictionColumn, Trace

SIZE = 3 * 8


@pytest.mark.unit
@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("slots", [8, 20, 60])
def test_every_preset_is_a_setting_that_fits(name: str, slots: int, shape: ModelShape, tmp_path: Path) -> None:
    chosen = preset_settings(name, shape, 2, slots)
    room = max(slots, staging_slots(chosen, shape))
    assert sum(check_slots(chosen, shape, room, 1)) <= room
    chosen.save(tmp_path / "preset.toml")
    assert Settings.load(tmp_path / "preset.toml") == chosen
    ratio = preset_settings(name, shape, 2, cache_ratio=0.5)
    counts = ratio.slots_per_layer or (int((ratio.cache_ratio or 0) * shape.experts),) * shape.n_moe_layers
    assert sum(counts) <= SIZE // 2


@pytest.mark.unit
def test_where_layers_are_whole(shape: ModelShape) -> None:
    """Three MoE layers of eight experts."""
    assert preset_settings("llama_cpp", shape, 1, cache_ratio=0.7).slots_per_layer == (0, 8, 8)
    assert preset_settings("llama_cpp", shape, 1, cache_ratio=0.3).slots_per_layer == (0, 0, 0)
    assert preset_settings("fate", shape, 1, cache_ratio=0.7).slots_per_layer == (8, 8, 0)
    assert preset_settings("fate", shape, 1, cache_ratio=0.3).slots_per_layer == (2, 2, 2)
    assert preset_settings("on_demand", shape, 1, 60).slots_per_layer == (0, 0, 0)
    assert preset_settings("mixtral_offloading", shape, 1).slots_per_layer is None


@pytest.mark.unit
def test_refusals(shape: ModelShape) -> None:
    with pytest.raises(SettingsError, match="preset 'vllm' is unknown: there are on_demand, mixtral_offloading"):
        preset_settings("vllm", shape, 1)
    with pytest.raises(SettingsError, match="preset llama_cpp places experts by the room there is: give --vram"):
        preset_settings("llama_cpp", shape, 1)


Files = Callable[..., list[str]]


@pytest.fixture
def files(
    make_trace: Callable[..., Trace], make_profile: Callable[..., Any], write_trace: Callable[..., None], tmp_path: Path
) -> Files:
    """Flags that name a profile and a recording."""

    def write(**fields: Any) -> list[str]:
        columns = [PredictionColumn(predictor="gate", depth=1, width=4)]
        write_trace(tmp_path / "t.parquet", make_trace(predictions=columns, **fields))
        make_profile().save(tmp_path / "p.json")
        return ["--profile", str(tmp_path / "p.json"), "--trace", str(tmp_path / "t.parquet")]

    return write


def result(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.integration
def test_simulate_lists_and_takes_them(files: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "--preset", "help"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in PRESETS)
    flags = files()
    code, found = result(capsys, "simulate", *flags, "--preset", "llama_cpp", "--cache-ratio", "0.7")
    assert (code, found["slots_per_layer"]) == (0, [0, 8, 8])
    assert found["warm_start"]["bytes"] == 16 * 1536
    assert found["warm_start"]["ms"] > 16 * 0.1
    assert found["counters"]["on_cpu"][1:] == [0, 0]
    warm = ["--warm-start", str(tmp_path / "t.parquet")]
    code, found = result(capsys, "simulate", *flags, "--preset", "fiddler", "--cache-ratio", "0.5", *warm)
    assert (code, found["warm_start"]["bytes"]) == (0, 12 * 1536)
    code, found = result(capsys, "simulate", *flags, "--preset", "fiddler", "--cache-ratio", "0.5")
    assert code == 2
    assert "eviction 'static' needs counts of a recording" in found["error"]
    code, found = result(capsys, "simulate", *flags, "--preset", "llama_cpp")
    assert code == 2
    code, found = result(capsys, "simulate", *flags, "--preset", "fate", "--settings", "s.json")
    assert (code, found["error"]) == (2, "--settings and --preset exclude each other: give one of them")


@pytest.mark.integration
def test_an_oracle_is_labelled_a_bound(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["simulate", *files(), "--cache-ratio", "0.5"]
    code, oracle = result(capsys, *flags, "--eviction-oracle", "belady")
    assert (code, oracle["eviction_oracle"]) == (0, "belady")
    _, plain = result(capsys, *flags)
    assert plain["eviction_oracle"] is None
    assert oracle["hit_rate"] > plain["hit_rate"]
    assert main([*flags, "--eviction-oracle", "belady"]) == 0
    assert "a bound, no engine can run it" in " ".join(capsys.readouterr().out.split())


@pytest.mark.integration
def test_counts_of_another_model_are_refused(
    make_trace: Callable[..., Trace], write_trace: Callable[..., None], shape: ModelShape, tmp_path: Path
) -> None:
    trace = make_trace()
    write_trace(tmp_path / "t.parquet", trace)
    counts = warm_counts(tmp_path / "t.parquet", shape)
    assert counts.sum() == trace.experts.size
    assert counts[1, 3] == np.count_nonzero(trace.experts[:, 1] == 3)
    from dataclasses import replace

    with pytest.raises(MismatchError, match="a warm start needs a recording of the same model"):
        warm_counts(tmp_path / "t.parquet", replace(shape, hidden=32))


@pytest.mark.integration
def test_placed_layers_leave_room_for_a_draft(capsys: pytest.CaptureFixture[str]) -> None:
    """A draft model and its windows take device memory that whole layers then do not get."""
    flags = ["run", "mini", "--prompt", "The kernel", "-n", "3", "--device", "cpu", "--preset", "llama_cpp"]
    slots = []
    for draft in ((), ("--draft", "model", "--gamma", "8")):
        code, found = result(capsys, *flags, "--vram", "22MiB", *draft)
        assert code == 0
        slots.append(found["settings"].split("slots_per_layer=")[1].split()[0])
    assert slots[0] > slots[1]


@pytest.mark.integration
def test_validate_starts_warm(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What a recording warms is there in the simulation and on the engine: they count the same hits."""
    trace, chosen = tmp_path / "t.parquet", tmp_path / "s.json"
    record = ["record", "mini", "--out", str(trace), "--requests", "1", "--tokens", "6", "--depth", "0"]
    assert main([*record, "--device", "cpu"]) == 0
    Settings(cache_ratio=0.4, eviction="static").save(chosen)
    capsys.readouterr()
    profile, bundled = tmp_path / "p.json", HardwareProfile.load(ASSETS / "dashboard" / "profile-cpu.json")
    here = bundled.meta.model_copy(update={"machine": machine_name(), "software": {}})
    bundled.model_copy(update={"meta": here}).save(profile)
    flags = ["validate", "mini", "--profile", str(profile), "--trace", str(trace), "--settings", str(chosen)]
    code, found = result(capsys, *flags, "--repeats", "1", "--warm-start", str(trace))
    assert code == 0
    (row,) = found["rows"]
    assert row["predicted_hit_rate"] == row["measured_hit_rate"] > 0
    code, found = result(capsys, *flags, "--repeats", "1")
    assert (code, "eviction 'static' needs counts of a recording" in found["error"]) == (2, True)
